"""What a scheme makes of one group: kernel sources in launch order, and the scratch that is the group's own."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.compiler.targets.cuda.source import CudaSource
from autotune.ir.graph import Graph

Ref = tuple[str, int]
"""A tensor of a group: ("input", slot), ("output", k) or ("private", number)."""


@dataclass(frozen=True)
class Private:
    """Global memory between the kernels of one group.

    Attributes:
        storage: storage type.
        numel: elements, whatever the extent of the open axis.
    """

    storage: str
    numel: int


@dataclass(frozen=True)
class GroupKernels:
    """The kernels of one group under one configuration.

    Attributes:
        sources: in launch order.
        args: for each source, what each of its pointers is.
        private: the group's own scratch.
    """

    sources: tuple[CudaSource, ...]
    args: tuple[tuple[Ref, ...], ...]
    private: tuple[Private, ...] = ()

    @classmethod
    def single(cls, source: CudaSource, graph: Graph) -> GroupKernels:
        """One kernel that takes the group's inputs, then its outputs."""
        refs = [("input", k) for k in range(len(graph.inputs))] + [("output", k) for k in range(len(graph.outputs))]
        return cls((source,), (tuple(refs),))
