"""The interface of an engine: one collective on fixed buffers, which runs again and again.

Buffers, with ``n`` elements in the larger one (see :mod:`autotune.domains.c3.scenario`) and ``W`` ranks:

=============== ========= ========== ==========================================================================
collective      input     output     meaning
=============== ========= ========== ==========================================================================
all_gather      ``n/W``   ``n``      ``output[r*n/W : (r+1)*n/W]`` is rank r's input
all_to_all      ``n``     ``n``      ``output[r*n/W : ...]`` is what rank r has at ``input[me*n/W : ...]``
reduce_scatter  ``n``     ``n/W``    sum over ranks of ``input[me*n/W : ...]``
all_reduce      ``n``     ``n``      sum over ranks of ``input``
=============== ========= ========== ==========================================================================

The buffers are one-dimensional, contiguous and owned by the collective, which allocates them as its engine needs
(symmetric memory, say). For all_gather the input may be a part of the output (gather in place), and for all_reduce it
may be the output. A caller copies its tensors there, or writes to :attr:`Collective.input`.
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
"""torch's types by the names that scenarios have for them."""


@dataclass(frozen=True)
class Spec:
    """A collective without a computation beside it.

    Attributes:
        op: one of :data:`autotune.domains.c3.scenario.COLLECTIVES`.
        numel: elements of the larger buffer; a multiple of the ranks, except for all_reduce.
        dtype: "bf16", "f16" or "f32".
    """

    op: str
    numel: int
    dtype: str

    def part(self, ranks: int) -> int:
        """Elements of one rank's share (all_reduce: rounded up)."""
        return -(-self.numel // ranks)


class Collective(Protocol):
    """One collective on fixed buffers. Making one is itself a collective call: every rank makes the same, in the same
    order.

    Calls follow each other safely, back to back and with ranks that come late: a call waits until its peers may be
    written to. Calls of one collective never overlap each other; those of two different ones may.

    Attributes:
        input, output: see the module's table. The input is read, and the output written, by :meth:`enqueue` only.
        engine: who moves the data; see :class:`autotune.domains.c3.strategy.Strategy`.
        met: an event behind the handshake, before the kernel; None where none launches a kernel then. A persistent
            GEMM that begins before that kernel keeps it from every SM until it ends.
    """

    input: torch.Tensor
    output: torch.Tensor
    engine: str
    met: Any

    def enqueue(self, stream: Any = None) -> None:
        """Enqueue a call on ``stream`` (CUDA; the current one unless given), or run it (CPU)."""
        ...

    def close(self) -> None:
        """Give the buffers back. A collective call."""
        ...


def open_collective(
    spec: Spec, group: Group, config: Mapping[str, Choice], artifact: Artifact | None = None
) -> Collective:
    """The collective ``spec`` by the engine that ``config`` names. A collective call.

    Args:
        config: a strategy of the side that ``group.device`` is on.
        artifact: what the task's ``build`` made of the strategy: the kernel that adds. None where it needs none.

    Raises:
        Unsupported: the devices cannot do it (no peer access, say); one line.
    """
    side = group.device.type
    strategy = KINDS[side].of(config)
    module, _, name = ENGINES[side][strategy.engine].partition(":")
    made: Collective = getattr(importlib.import_module(module), name)(spec, group, strategy, artifact)
    return made
