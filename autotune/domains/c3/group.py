"""The ranks that take part, as one rank sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")


@dataclass
class Group:
    """One rank's view of the ranks. Every method is a collective call.

    Attributes:
        rank, ranks: this process's number, and how many there are.
        device: where this rank computes.
        control: a gloo group over all ranks, for what is small and must not touch the devices.
        data: the group that the user's collectives run in: NCCL's on CUDA, gloo's on CPUs.
        kept: what is made once and used by many collectives (communicators, symmetric buffers), by name.
    """

    rank: int
    ranks: int
    device: torch.device
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    kept: dict[Any, Any] = field(default_factory=dict)

    def keep(self, name: Any, make: Callable[[], T]) -> T:
        """What was made under ``name`` before, or else is made now; on every rank alike."""
        if name not in self.kept:
            self.kept[name] = make()
        found: T = self.kept[name]
        return found

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        import torch.distributed as dist

        dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, in the order of ranks."""
        import json

        import torch
        import torch.distributed as dist

        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
        most = max(int(s) for s in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.control)
        return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes, strict=True)]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over ranks of each value."""
        import torch
        import torch.distributed as dist

        data = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=self.control)
        return [float(v) for v in data]
