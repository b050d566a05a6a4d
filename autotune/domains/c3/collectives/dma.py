"""Collectives by copy engines: no kernel moves data, and none runs but to add (ConCCL, arXiv 2412.14335, section 5).

Ranks write to (push) or read from (pull) each other's symmetric memory with plain copies. Flags are raised and waited
for by stream memory operations, so that nothing of a collective queues behind a GEMM that holds every SM. A call is

1. *ready*: tell the peers that this rank's memory may be written (push) or is worth reading (pull); wait for theirs;
2. the copies, chunk by chunk, over one stream or several;
3. *done*: tell the peers that the copies are through, and wait for theirs.

Flags go back to zero as they are waited for, so a captured call can be replayed. What ConCCL could not do:
reduce_scatter and all_reduce exchange by copies what a small kernel adds, each chunk while the next one travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.domains.c3.collectives.base import Spec
from autotune.domains.c3.collectives.buffers import cuts, dtype_of
from autotune.domains.c3.collectives.driver import Copies, Copy
from autotune.domains.c3.collectives.streams import new_event, new_stream
from autotune.domains.c3.collectives.symmetric import Flags, give, take
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import ITEMSIZE, REDUCING
from autotune.domains.c3.strategy import Strategy

if TYPE_CHECKING:
    from autotune.task import Artifact

_READY, _DONE, _CHUNKS = 0, 1, 2


class CopyCollective:
    """A collective by copy engines. All-gather and all-reduce are in place.

    Raises:
        Unsupported: some device cannot reach the memory of another; this driver has no batched copies.
    """

    engine = "copy"
    met = None

    def __init__(self, spec: Spec, group: Group, strategy: Strategy, artifact: Artifact | None = None) -> None:
        import torch

        self.spec, self.group, self.strategy = spec, group, strategy
        self.chunks = strategy.chunks
        dtype, item = dtype_of(spec.dtype), ITEMSIZE[spec.dtype]
        ranks, me = group.ranks, group.rank
        self._part = spec.part(ranks)
        self._bytes = self._part * item
        whole = self._bytes * ranks
        self._pieces = cuts(self._bytes, self.chunks)
        self._kernels = artifact.kernels if artifact is not None else ()
        self._flags = Flags(group, _CHUNKS + self.chunks)
        self._tell = [self._flags.tell(k) for k in range(_CHUNKS + self.chunks)]
        self._wait = [self._flags.wait(k) for k in range(_CHUNKS + self.chunks)]
        self._sides = [new_stream(group.device) for _ in range(strategy.streams - 1)]
        reducing = spec.op in REDUCING
        pulled = strategy.direction == "pull" and not reducing
        # The side that peers touch is symmetric: what is written to, or with pull what is read.
        self._shared = take(group, whole)
        if reducing:
            self._reduction = new_stream(group.device, high=True)
            self._added = [new_event() for _ in range(self.chunks)]
        if spec.op == "all_reduce":
            self._result = take(group, whole)
            full = self._result.view(dtype, self._part * ranks)
            self.input = self.output = full[: spec.numel]
            self._source = full
        elif spec.op == "reduce_scatter":
            self._source = self.input = torch.empty(spec.numel, dtype=dtype, device=group.device)
            self.output = torch.empty(self._part, dtype=dtype, device=group.device)
        elif spec.op == "all_gather":
            self.output = self._shared.view(dtype, spec.numel)
            self.input = self.output[me * self._part :][: self._part]
        else:
            symmetric = self._shared.view(dtype, spec.numel)
            plain = torch.empty(spec.numel, dtype=dtype, device=group.device)
            self.input, self.output = (symmetric, plain) if pulled else (plain, symmetric)
        plan = self._exchange() if reducing else self._moves(pulled)
        self._copies = [[self._copy(part) for part in self._spread(moves)] for moves in plan]
        self._gather = [self._copy(moves) for moves in self._second()] if spec.op == "all_reduce" else []
        local = self._local()
        self._own = self._copy([local]) if local is not None else None
        # A copy within a device may be a kernel, which waits for SMs: it goes where it keeps nothing else waiting.
        self._own_last = strategy.order == "gemm_first"

    def _copy(self, moves: list[Copy]) -> Copies:
        return Copies(moves, batch=self.strategy.batch)

    def _spread(self, moves: list[Copy]) -> list[list[Copy]]:
        """Copies dealt to the streams."""
        streams = self.strategy.streams
        return [moves[k::streams] for k in range(streams)]

    def _moves(self, pulled: bool) -> list[list[Copy]]:
        """Copies of each chunk of an all-gather or all-to-all."""
        me, size = self.group.rank, self._bytes
        peers, shared = self._flags.peers, self._shared.pointers
        gather = self.spec.op == "all_gather"
        out = []
        for begin, length in self._pieces:
            moves = []
            for p in peers:
                if pulled:
                    source = shared[p] + (p if gather else me) * size
                    target = self.output.data_ptr() + p * size
                else:
                    source = self.input.data_ptr() + (0 if gather else p * size)
                    target = shared[p] + me * size
                moves.append((target + begin, source + begin, length))
            out.append(moves)
        return out

    def _exchange(self) -> list[list[Copy]]:
        """Copies of each chunk that bring every rank what it has to add, into its own part of the staging."""
        me, size = self.group.rank, self._bytes
        source, shared = self._source.data_ptr(), self._shared.pointers
        return [
            [(shared[p] + me * size + begin, source + p * size + begin, length) for p in self._flags.peers]
            for begin, length in self._pieces
        ]

    def _second(self) -> list[list[Copy]]:
        """Copies of each chunk that bring the sums to the peers."""
        mine = self.group.rank * self._bytes
        return [self._result.to_peers(self._flags.peers, mine + begin, length) for begin, length in self._pieces]

    def _local(self) -> Copy | None:
        """What stays on this device: only an all-to-all has it in another place."""
        if self.spec.op != "all_to_all":
            return None
        mine = self.group.rank * self._bytes
        return self.output.data_ptr() + mine, self.input.data_ptr() + mine, self._bytes

    def enqueue(self, chunk: int, stream: Any = None) -> None:
        import torch

        stream = stream or torch.cuda.current_stream()
        raw = stream.cuda_stream
        if chunk == 0:
            if self._own is not None and not self._own_last:
                self._own(raw)
            self._tell[_READY](raw)
            self._wait[_READY](raw)
        self._issue(self._copies[chunk], stream)
        last = chunk == self.chunks - 1
        if self.spec.op in REDUCING:
            self._tell[_CHUNKS + chunk](raw)
            # Else, where branches of a graph share a hardware queue, every rank may wait before it tells.
            self._reduction.wait_stream(stream)
            self._add(chunk)
            if last:
                self._finish(stream)
        elif last:
            self._tell[_DONE](raw)
            if self._own is not None and self._own_last:
                self._own(raw)
            self._wait[_DONE](raw)

    def _issue(self, copies: list[Copies], stream: Any) -> None:
        """One chunk's copies, over the streams; ``stream`` goes on when all are through."""
        for side in self._sides:
            side.wait_stream(stream)
        for part, where in zip(copies, [stream, *self._sides], strict=True):
            part(where.cuda_stream)
        for side in self._sides:
            stream.wait_stream(side)

    def _add(self, chunk: int) -> None:
        """Add one chunk of this rank's share once it has come from every peer, on the stream of the additions."""
        from autotune.domains.c3.collectives.launch import launch

        begin, length = self._pieces[chunk]
        stream = self._reduction.cuda_stream
        self._wait[_CHUNKS + chunk](stream)
        if not length:
            return
        me, size = self.group.rank, self._bytes
        own = self._source.data_ptr() + me * size + begin
        staged = self._shared.memory.data_ptr()
        sources = [own if r == me else staged + r * size + begin for r in range(self.group.ranks)]
        target = own if self.spec.op == "all_reduce" else self.output.data_ptr() + begin
        count = length // ITEMSIZE[self.spec.dtype]
        device = self.group.device.index or 0
        launch(self._kernels[0], device, self.strategy.blocks, [*sources, target], count, stream)
        if self._gather and len(self._gather) > 1:
            self._added[chunk].record(self._reduction)

    def _finish(self, stream: Any) -> None:
        """After the last chunk: what is added goes to the peers (all_reduce), and the streams join."""
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
        self._tell[_DONE](raw)
        self._wait[_DONE](raw)

    def close(self) -> None:
        """Give buffers and flags back. A collective call; no call may be under way."""
        import torch

        torch.cuda.synchronize(self.group.device)
        self.group.barrier()
        self._flags.close()
        give(self.group, self._shared)
        if self.spec.op == "all_reduce":
            give(self.group, self._result)
