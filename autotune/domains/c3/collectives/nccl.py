"""The interface of an engine, and NCCL's collectives, with a separate communicator for each limit on thread blocks.

An engine has one collective on fixed buffers, which runs repeatedly.

Buffers, with ``n`` elements in the larger one (see :mod:`autotune.domains.c3.scenario`) and ``W`` ranks:

=============== ========= ========== ==========================================================================
collective      input     output     meaning
=============== ========= ========== ==========================================================================
all_gather      ``n/W``   ``n``      ``output[r*n/W : (r+1)*n/W]`` is rank r's input
all_to_all      ``n``     ``n``      ``output[r*n/W : ...]`` is rank r's ``input[me*n/W : ...]``
reduce_scatter  ``n``     ``n/W``    sum over ranks of ``input[me*n/W : ...]``
all_reduce      ``n``     ``n``      sum over ranks of ``input``
=============== ========= ========== ==========================================================================

The buffers are one-dimensional, contiguous and owned by the collective, which allocates them as its engine requires
(symmetric memory, for example). For all_gather the input may be a slice of the output (in-place gather), and for
all_reduce it may be the output. A caller copies its tensors to these buffers, or writes to :attr:`Collective.input`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autotune.domains.c3.group import Group
from autotune.domains.c3.strategy import ENGINES, KINDS, Strategy
from autotune.task import Artifact, Choice

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""torch dtypes by their names in scenarios."""


@dataclass(frozen=True)
class Spec:
    """A collective without its computation.

    Attributes:
        op: one of :data:`autotune.domains.c3.scenario.COLLECTIVES`.
        numel: elements of the larger buffer; divisible by the number of ranks, except for all_reduce.
        dtype: "bf16", "f16" or "f32".
        mean: a reduce_scatter makes means over ranks in place of sums.
    """

    op: str
    numel: int
    dtype: str
    mean: bool = False

    def part(self, ranks: int) -> int:
        """Elements of one rank's shard (all_reduce: rounded up)."""
        return -(-self.numel // ranks)


class Collective(Protocol):
    """One collective on fixed buffers.

    The constructor is a collective call: every rank makes the same collectives in the same order.

    Calls may follow each other back to back, and with ranks that arrive late: a call waits until its peers' memory may
    be written. Calls of one collective never overlap each other; calls of two collectives may.

    Attributes:
        input, output: see the module's table. Only :meth:`enqueue` reads the input and writes the output. A
            reduce_scatter by copies or a kernel takes another tensor as its output for one call.
        engine: name of the engine that moves the data; see :class:`autotune.domains.c3.strategy.Strategy`.
        met: an event between the handshake and the kernel; None if no kernel follows the handshake. A persistent GEMM
            that starts before that kernel keeps it from every SM until the GEMM ends.
    """

    input: torch.Tensor
    output: torch.Tensor
    engine: str
    met: Any

    def enqueue(self, stream: Any = None) -> None:
        """Enqueue a call on ``stream`` (CUDA; default: the current stream), or run it (CPU)."""
        ...

    def close(self) -> None:
        """Free the buffers. A collective call."""
        ...


def open_collective(
    spec: Spec, group: Group, config: Mapping[str, Choice], artifact: Artifact | None = None
) -> Collective:
    """Make the collective ``spec`` with the engine that ``config`` names. A collective call.

    Args:
        config: a strategy for the type of ``group.device``.
        artifact: result of the task's ``build`` for the strategy, with the reduction kernel; None without one.

    Raises:
        Unsupported: the devices do not support it (no peer access, for example); a one-line message.
    """
    side = group.device.type
    strategy = KINDS[side].of(config)
    module, _, name = ENGINES[side][strategy.engine].partition(":")
    made: Collective = getattr(importlib.import_module(module), name)(spec, group, strategy, artifact)
    return made


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
