"""Collectives on CPUs by gloo, through process groups of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from autotune.domains.c3.collectives.base import Collective, Spec
from autotune.domains.c3.collectives.buffers import dtype_of, pieces
from autotune.domains.c3.group import Group
from autotune.domains.c3.strategy import HostStrategy

if TYPE_CHECKING:
    from torch import Tensor

# torch 2.13 renamed what 2.11 has.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def open_host(spec: Spec, group: Group, strategy: HostStrategy) -> Collective:
    """The collective by the engine that the strategy names. A collective call.

    Raises:
        Unsupported: the ranks do not share a host's memory (engine "copy").
    """
    if strategy.engine == "copy":
        from autotune.domains.c3.collectives.host_copy import HostCopy

        return HostCopy(spec, group, strategy)
    return GlooCollective(spec, group, strategy)


class GlooCollective:
    """One of gloo's collectives on buffers of its own.

    Operators of one gloo group are matched by their order. So each collective has a group to itself while it is open:
    two of them may then be under way in different threads.
    """

    engine = "gloo"
    met = None

    def __init__(self, spec: Spec, group: Group, strategy: HostStrategy) -> None:
        dtype, ranks = dtype_of(spec.dtype), group.ranks
        part, n = spec.part(ranks), spec.numel
        self.spec, self.group, self.chunks = spec, group, strategy.chunks
        self._free: list[dist.ProcessGroup] = group.keep("gloo", list)
        self._comm: dist.ProcessGroup | None = self._free.pop() if self._free else _new_group(group)
        group.keep("gloo open", WeakSet[GlooCollective]).add(self)
        self._pieces = pieces(n if spec.op == "all_reduce" else part, self.chunks)

        def buffer(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=dtype)

        self.input = buffer(part if spec.op == "all_gather" else n)
        self.output = buffer(part if spec.op == "reduce_scatter" else n)
        # A piece of every rank's share is not contiguous: it is collected here before or after gloo moves it.
        wide = ranks * max(end - begin for begin, end in self._pieces)
        staged = self.chunks > 1 and spec.op != "all_reduce"
        self._give = buffer(wide) if staged and spec.op != "all_gather" else None
        self._take = buffer(wide) if staged and spec.op != "reduce_scatter" else None

    def enqueue(self, chunk: int, stream: Any = None) -> None:
        begin, end = self._pieces[chunk]
        if begin == end:
            return
        if self._comm is None:
            raise RuntimeError("the collective was closed")
        if self.spec.op == "all_reduce":
            target = self.output[begin:end]
            target.copy_(self.input[begin:end])
            dist.all_reduce(target, group=self._comm)
            return
        ranks, length = self.group.ranks, end - begin
        source = self.input
        if self._give is not None:
            source = self._give[: ranks * length]
            source.view(ranks, length).copy_(self.input.view(ranks, -1)[:, begin:end])
        elif self.spec.op == "all_gather":
            source = self.input[begin:end]
        if self._take is None:
            target = self.output[begin:end] if self.spec.op == "reduce_scatter" else self.output
        else:
            target = self._take[: ranks * length]
        move = {"all_gather": _all_gather, "all_to_all": dist.all_to_all_single, "reduce_scatter": _reduce_scatter}
        move[self.spec.op](target, source, group=self._comm)
        if self._take is not None:
            self.output.view(ranks, -1)[:, begin:end].copy_(target.view(ranks, length))

    def close(self) -> None:
        """Leave the process group to the next one. A collective call."""
        if self._comm is not None:
            self._free.append(self._comm)
            self._comm = None


def open_groups(group: Group) -> list[dist.ProcessGroup]:
    """Take away the process groups that collectives of ``group`` have, or have left; they work no more."""
    free: list[dist.ProcessGroup] = group.kept.pop("gloo", [])
    found, free[:] = free[:], []
    for collective in group.kept.pop("gloo open", ()):
        if collective._comm is not None:
            found.append(collective._comm)
            collective._comm = None
    return found


def _new_group(group: Group) -> dist.ProcessGroup:
    members = dist.get_process_group_ranks(group.data)
    some = len(members) < dist.get_world_size()  # then the other processes take no part in making it
    made: dist.ProcessGroup = dist.new_group(members, backend="gloo", use_local_synchronization=some)
    return made
