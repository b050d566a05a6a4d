"""The interface of an engine: one collective on fixed buffers, which runs repeatedly.

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

from autotune.domains.c3.group import Group
from autotune.domains.c3.strategy import ENGINES, KINDS
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
