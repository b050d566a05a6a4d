"""Collectives by copy engines: kernels only reduce, they do not move data (ConCCL, arXiv 2412.14335, section 5).

Ranks write to each other's symmetric memory with plain copies. Stream memory operations set flags and wait for them, so
that no part of a collective queues behind a GEMM that occupies every SM. A call is

1. *ready*: signal to the peers that this rank's memory may be written; wait for their signals;
2. the copies, on one stream;
3. *done*: signal to the peers that the copies are complete, and wait for their signals.

Each wait resets its flag to zero, so a captured call can be replayed. Unlike ConCCL, this module also supports
reduce_scatter and all_reduce: copies exchange the data, and a small kernel reduces each chunk during the next copy.
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.domains.c3.collectives.nccl import DTYPES, Spec
from autotune.domains.c3.collectives.sm import LINE, kind_of, launch
from autotune.domains.c3.collectives.symmetric import Copies, Copy, Flags, give_all, new_event, new_stream, take
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import ITEMSIZE, REDUCING
from autotune.domains.c3.strategy import Strategy
from autotune.errors import Unsupported
from autotune.task import Artifact

_READY, _DONE, _CHUNKS = 0, 1, 2


class CopyCollective:
    """A collective by copy engines. All-gather and all-reduce are in place.

    Raises:
        Unsupported: a device has no access to a peer's memory, or the kernel is missing.

    """

    engine = "copy"
    met: Any = None

    def __init__(self, spec: Spec, group: Group, strategy: Strategy, artifact: Artifact | None = None) -> None:
        self.spec, self.group, self.strategy = spec, group, strategy
        dtype, ranks, me = DTYPES[spec.dtype], group.ranks, group.rank
        reducing = spec.op in REDUCING
        chunks = strategy.chunks if reducing else 1
        self._part = spec.part(ranks)
        self._bytes = self._part * ITEMSIZE[spec.dtype]
        there = {k.launch.get("op"): k for k in (artifact.kernels if artifact else ())}
        self._kernel = there.get(kind_of(mean=spec.mean))
        if reducing and self._kernel is None:
            raise Unsupported(f"the kernel of {spec.op} is missing")
        self._shared = take(group, self._bytes * ranks)  # written by peers
        self._result = take(group, self._bytes * ranks) if spec.op == "all_reduce" else None
        self._flags = Flags(group, _CHUNKS + chunks)
        self._signal = [self._flags.signal(k) for k in range(_CHUNKS + chunks)]
        self._wait = [self._flags.wait(k) for k in range(_CHUNKS + chunks)]
        if self._result is not None:
            self._source = self._result.view(dtype, self._part * ranks)
            self.input = self.output = self._source[: spec.numel]
        elif spec.op == "all_gather":
            self.output = self._shared.view(dtype, spec.numel)
            self._source = self.input = self.output[me * self._part :][: self._part]
        else:
            self._source = self.input = torch.empty(spec.numel, dtype=dtype, device=group.device)
            self.output = self._shared.view(dtype, spec.numel)
            if reducing:
                self.output = torch.empty(self._part, dtype=dtype, device=group.device)
        # Each peer's gathered or reduced data is copied to this rank's slot in the peer's shared buffer.
        source, step = self._source.data_ptr(), 0 if spec.op == "all_gather" else self._bytes
        pointers, slot_offset = self._shared.pointers, me * self._bytes
        self._pieces = cuts(self._bytes, chunks)
        self._copies = [
            Copies([(pointers[p] + slot_offset + begin, source + p * step + begin, length) for p in self._flags.peers])
            for begin, length in self._pieces
        ]
        self._gather: list[Copies] = []
        if self._result is not None:
            to_peers, peers = self._result.to_peers, self._flags.peers
            self._gather = [Copies(to_peers(peers, slot_offset + begin, length)) for begin, length in self._pieces]
        if reducing:
            self._reduction = new_stream(group.device, high=True)
            self._added = [new_event() for _ in range(chunks)]
        # Only an all-to-all copies a part within this device. Such a copy may be a kernel, which waits for SMs, so it
        # is enqueued where nothing else waits for it.
        own: list[Copy] = [(self.output.data_ptr() + slot_offset, source + slot_offset, self._bytes)]
        self._own = Copies(own if spec.op == "all_to_all" else [])
        self._own_last = strategy.order == "gemm_first"

    def enqueue(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        raw = stream.cuda_stream
        if not self._own_last:
            self._own(raw)
        self._signal[_READY](raw)
        self._wait[_READY](raw)
        if self.spec.op in REDUCING:
            for chunk, copies in enumerate(self._copies):
                copies(raw)
                self._signal[_CHUNKS + chunk](raw)
                # Branches of a graph may share a hardware queue: each rank must signal before it waits, or all hang.
                self._reduction.wait_stream(stream)
                self._add(chunk)
            self._finish(stream)
            return
        self._copies[0](raw)
        self._signal[_DONE](raw)
        if self._own_last:
            self._own(raw)
        self._wait[_DONE](raw)

    def _add(self, chunk: int) -> None:
        """Reduce one chunk of this rank's shard on the reduction stream, after every peer has written it."""
        begin, length = self._pieces[chunk]
        stream = self._reduction.cuda_stream
        self._wait[_CHUNKS + chunk](stream)
        if not length:
            return
        sources = self._sources(begin)
        target = sources[self.group.rank] if self._gather else self.output.data_ptr() + begin
        count = length // ITEMSIZE[self.spec.dtype]
        device = self.group.device.index or 0
        assert self._kernel is not None
        launch(self._kernel, device, self.strategy.blocks, [*sources, target], count, stream)
        if len(self._gather) > 1:
            self._added[chunk].record(self._reduction)

    def _sources(self, begin: int) -> list[int]:
        """Addresses of the terms of this rank's shard from byte ``begin`` on, in the order of ranks."""
        me, size, staged = self.group.rank, self._bytes, self._shared.memory.data_ptr()
        own = self._source.data_ptr() + me * size
        return [(own if r == me else staged + r * size) + begin for r in range(self.group.ranks)]

    def _finish(self, stream: Any) -> None:
        """After the last chunk: send the sums to the peers (all_reduce), and join the streams."""
        raw = stream.cuda_stream
        if not self._gather:
            stream.wait_stream(self._reduction)
            return
        for c, copies in enumerate(self._gather):
            if len(self._gather) > 1 and self._pieces[c][1]:
                stream.wait_event(self._added[c])
            elif c == len(self._gather) - 1:
                stream.wait_stream(self._reduction)
            copies(raw)
        stream.wait_stream(self._reduction)
        self._signal[_DONE](raw)
        self._wait[_DONE](raw)

    def close(self) -> None:
        """Free buffers and flags. A collective call; no call may be in progress."""
        give_all(self.group, self._flags, self._shared, self._result)


def cuts(nbytes: int, chunks: int) -> list[tuple[int, int]]:
    """Split ``nbytes`` at cache-line boundaries into ``chunks`` pieces (offset, size); the last ones may be empty."""
    step = -(-nbytes // (chunks * LINE)) * LINE
    begins = [min(nbytes, c * step) for c in range(chunks)]
    return [(begin, min(nbytes, begin + step) - begin) for begin in begins]
