"""Collectives by Numba kernels that write to, or read from, the peers' memory directly, with a chosen number of blocks.

The protocol is that of :mod:`autotune.domains.c3.collectives.dma`, with kernels in the place of the copies.
Reductions read their peers' inputs and add as they go: nothing is staged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.domains.c3.collectives.base import Spec
from autotune.domains.c3.collectives.buffers import cuts, dtype_of
from autotune.domains.c3.collectives.driver import Copies
from autotune.domains.c3.collectives.streams import new_event
from autotune.domains.c3.collectives.symmetric import Flags, give, take
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import ITEMSIZE, REDUCING
from autotune.domains.c3.strategy import Strategy, kernel_of
from autotune.errors import Unsupported

if TYPE_CHECKING:
    from autotune.task import Artifact, Kernel

_READY, _DONE = 0, 1


class SmCollective:
    """A collective by Numba kernels. All-gather is in place.

    Args:
        artifact: holds the kernel that copies parts ("op" in its ``launch`` is "copy"), or for reductions the one that
            adds ("reduce").

    Raises:
        Unsupported: some device cannot reach the memory of another; the kernels are missing.
    """

    engine = "sm"

    def __init__(self, spec: Spec, group: Group, strategy: Strategy, artifact: Artifact | None = None) -> None:
        import torch

        kernels: dict[str, Kernel] = {str(k.launch.get("op")): k for k in (artifact.kernels if artifact else ())}
        if (needed := kernel_of(strategy.config(), spec.op)) not in kernels:
            raise Unsupported(f"the kernels of {spec.op} are not there: {needed}")
        self.spec, self.group, self.strategy, self._kernels = spec, group, strategy, kernels
        self.chunks = strategy.chunks
        self.met = new_event()
        dtype = dtype_of(spec.dtype)
        ranks, me = group.ranks, group.rank
        self._part = spec.part(ranks)
        self._bytes = self._part * ITEMSIZE[spec.dtype]
        self._pieces = cuts(self._bytes, self.chunks)
        self._flags = Flags(group, 2)
        self._tell = [self._flags.tell(k) for k in range(2)]
        self._wait = [self._flags.wait(k) for k in range(2)]
        self._shared = take(group, self._bytes * ranks)
        shared = self._shared.view(dtype, self._part * ranks)
        self._result = take(group, self._bytes * ranks) if spec.op == "all_reduce" else None
        # The sums of an all-reduce go out by copy engines: the computation would have taken a second kernel's SMs.
        own = me * self._bytes
        sums = [] if self._result is None else self._result.to_peers(self._flags.peers, own, self._bytes)
        self._spread = Copies(sums)
        pulled = strategy.direction == "pull" or spec.op in REDUCING
        if spec.op == "all_gather":
            self.output = shared[: spec.numel]
            self.input = self.output[me * self._part :][: self._part]
        elif self._result is not None:
            self.input = shared[: spec.numel]
            self.output = self._result.view(dtype, spec.numel)
        else:
            size = self._part if spec.op == "reduce_scatter" else spec.numel
            plain = torch.empty(size, dtype=dtype, device=group.device)
            self.input, self.output = (shared, plain) if pulled else (plain, shared)

    def enqueue(self, chunk: int, stream: Any = None) -> None:
        import torch

        stream = stream or torch.cuda.current_stream()
        raw = stream.cuda_stream
        if chunk == 0:
            self._tell[_READY](raw)
            self._wait[_READY](raw)
            self.met.record(stream)
        begin, length = self._pieces[chunk]
        if length:
            if self.spec.op in REDUCING:
                self._add(begin, length, raw)
            else:
                sources, targets = self._ends(begin)
                self._copy(sources, targets, length, raw)
        if chunk == self.chunks - 1:
            self._spread(raw)  # every rank's sums have a part of the output to themselves
            self._tell[_DONE](raw)
            self._wait[_DONE](raw)

    def _ends(self, begin: int) -> tuple[list[int], list[int]]:
        """Where each peer's part is read and written; 0 for what is in its place already."""
        me, size, shared = self.group.rank, self._bytes, self._shared.pointers
        gather, pulled = self.spec.op == "all_gather", self.strategy.direction == "pull"
        sources, targets = [], []
        for p in range(self.group.ranks):
            if pulled:
                sources.append(shared[p] + (p if gather else me) * size + begin)
                targets.append(self.output.data_ptr() + p * size + begin)
            else:
                sources.append(self.input.data_ptr() + (0 if gather else p * size) + begin)
                targets.append(shared[p] + me * size + begin)
        if gather:
            sources[me] = targets[me] = 0
        return sources, targets

    def _add(self, begin: int, length: int, raw: int) -> None:
        from autotune.domains.c3.collectives.launch import launch

        mine = self.group.rank * self._bytes + begin
        sources = [pointer + mine for pointer in self._shared.pointers]
        own = 0 if self._result is None else self.group.rank * self._bytes
        target = self.output.data_ptr() + own + begin
        count = length // ITEMSIZE[self.spec.dtype]
        launch(
            self._kernels["reduce"], self.group.device.index or 0, self.strategy.blocks, [*sources, target], count, raw
        )

    def _copy(self, sources: list[int], targets: list[int], nbytes: int, raw: int) -> None:
        from autotune.domains.c3.collectives.launch import launch

        # Rotated, so that the first blocks of different ranks turn to different peers.
        turn = self.group.rank
        pointers = [*sources[turn:], *sources[:turn], *targets[turn:], *targets[:turn]]
        launch(self._kernels["copy"], self.group.device.index or 0, self.strategy.blocks, pointers, nbytes, raw)

    def close(self) -> None:
        """Give buffers and flags back. A collective call; no call may be under way."""
        import torch

        torch.cuda.synchronize(self.group.device)
        self.group.barrier()
        self._flags.close()
        give(self.group, self._shared)
        if self._result is not None:
            give(self.group, self._result)
