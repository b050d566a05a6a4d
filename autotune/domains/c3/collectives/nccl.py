"""NCCL's collectives, with a separate communicator for each limit on thread blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autotune.domains.c3.collectives.base import DTYPES, Spec
from autotune.domains.c3.group import Group
from autotune.domains.c3.strategy import Strategy
from autotune.task import Artifact


def communicator(group: Group, ctas: int) -> dist.ProcessGroup:
    """The NCCL group with at most ``ctas`` thread blocks per collective; 0 is the user's own. A collective call.

    Both the minimum and the maximum are set: with the maximum alone, NCCL would use fewer blocks for small messages,
    and different limits would be the same candidate.
    """
    if not ctas:
        return group.data

    def make() -> dist.ProcessGroup:
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = ctas
        members = dist.get_process_group_ranks(group.data)
        made: dist.ProcessGroup = dist.new_group(
            members, backend="nccl", pg_options=options, use_local_synchronization=True
        )
        warm = torch.zeros(1, device=group.device)
        dist.all_reduce(warm, group=made)  # creates the communicator, which is not allowed during a capture
        torch.cuda.synchronize()
        return made

    return group.keep(("nccl", ctas), make)


class NcclCollective:
    """An NCCL collective on buffers that it allocates. All-gather and all-reduce are in place."""

    engine = "nccl"
    met = None

    def __init__(self, spec: Spec, group: Group, strategy: Strategy, artifact: Artifact | None = None) -> None:
        part, n = spec.part(group.ranks), spec.numel
        self.spec = spec
        self._comm = communicator(group, strategy.ctas)

        def buffer(numel: int) -> torch.Tensor:
            return torch.empty(numel, dtype=DTYPES[spec.dtype], device=group.device)

        self.output = buffer(part if spec.op == "reduce_scatter" else n)
        if spec.op == "all_gather":
            self.input = self.output[group.rank * part :][:part]
        else:
            self.input = self.output if spec.op == "all_reduce" else buffer(n)

    def enqueue(self, stream: Any = None) -> None:
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            if self.spec.op == "all_gather":
                dist.all_gather_into_tensor(self.output, self.input, group=self._comm)
            elif self.spec.op == "all_to_all":
                dist.all_to_all_single(self.output, self.input, group=self._comm)
            elif self.spec.op == "reduce_scatter":
                op = dist.ReduceOp.AVG if self.spec.mean else dist.ReduceOp.SUM
                dist.reduce_scatter_tensor(self.output, self.input, op=op, group=self._comm)
            else:
                dist.all_reduce(self.output, group=self._comm)

    def close(self) -> None:
        """Keep the communicator: creating one takes seconds."""
