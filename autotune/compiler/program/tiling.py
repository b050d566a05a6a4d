"""The two axes of a pointwise group that its tensors disagree on: where neighbours in memory lie along either.

``x + x.t()`` is the pattern, or a tensor read as NCHW and written as NHWC: whichever axis threads lie side by side on,
what has unit stride along the other one is spread over memory. See :mod:`autotune.compiler.targets.cuda.transpose`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.compiler.program.program import Program, build_program, stride_of
from autotune.compiler.program.vectors import narrowest
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Output, Value, Walk

NARROWEST = 16
"""Elements of either axis below which a tile would be mostly empty."""


@dataclass(frozen=True)
class Tiling:
    """Which axes are tiled, and what goes through shared memory.

    Attributes:
        x, y: axes; threads compute side by side on ``x``.
        loads: values that have their neighbours on ``y``; ``stores``: outputs that have (indices).
        program: the group with ``x`` as its only column.
        size: bytes of the narrowest type among the tensors that have their neighbours on either.
        share: of the bytes of those tensors, the part that goes through shared memory.
        mirrored: whether a square tensor is read both ways, ``x`` and ``x.t()``.
    """

    x: int
    y: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    program: Program
    size: int
    share: float
    mirrored: bool

    def vectors(self, vector_bytes: int) -> tuple[int, int]:
        """Elements a thread takes at a time along ``x`` and ``y``: as many as extents, offsets and strides allow."""
        g = self.program.graph
        along_x = along_y = max(1, min(16, vector_bytes // self.size))
        while g.extents[self.x] % along_x:
            along_x //= 2
        parts: list[int] = [g.extents[self.y]]
        tensors: list[Value | Output] = [g.values[i] for i in self.loads]
        tensors += [g.outputs[k] for k in self.stores]
        for t in tensors:
            parts += [t.offset, *(s for a, s in zip(t.axes, t.strides, strict=True) if a != self.y)]
        for i in self.loads:
            parts += [n for a, lo, hi in g.values[i].guards if a == self.y for n in (lo, hi)]
        while any(n % along_y for n in parts):
            along_y //= 2
        return along_x, along_y


def _unit(graph: Graph, t: Value | Output | Walk) -> int:
    """The axis along which a tensor's neighbours lie; -1 if there is none."""
    return next((a for a, s in zip(t.axes, t.strides, strict=True) if s == 1 and graph.extents[a] > 1), -1)


@lru_cache(maxsize=512)
def tiling(graph: Graph) -> Tiling:
    """How a group is tiled: the two axes that the most bytes disagree on.

    Raises:
        Unsupported: it has reductions, or its large tensors agree on one axis.
    """
    if any(graph.values[i].op in REDUCTIONS for i in graph.live):
        raise Unsupported("a group with reductions")
    weight: dict[tuple[int, int], int] = {}  # bytes with unit stride along the first axis that vary over the second
    for t in graph.walks:
        u = _unit(graph, t)
        for a in t.axes:
            if u >= 0 and a != u and stride_of(t, a) and min(graph.extents[a], graph.extents[u]) >= NARROWEST:
                weight[u, a] = (
                    weight.get((u, a), 0) + graph.size(b for b in t.axes if stride_of(t, b)) * STORAGE_BYTES[t.storage]
                )
    pairs = [(x, y) for x, y in weight if (y, x) in weight]
    if not pairs:
        raise Unsupported("no two axes that tensors disagree on")
    stored = [_unit(graph, o) for o in graph.outputs]
    x, y = max(pairs, key=lambda p: (weight[p] + weight[p[::-1]], weight[p], stored.count(p[0]), p))
    used = {a for i in graph.live for a in graph.values[i].axes} | {a for o in graph.outputs for a in o.axes}
    rows = (*sorted(used - {x, y}), y)
    program = build_program(graph, split=(rows, (x,)))
    if program.passes[0].row_stores:
        raise Unsupported("an output that does not vary over the tiled axes")
    if rows[0] == y:  # the extent of a tiled axis is fixed: the tensors across it have it in their strides
        program = replace(program, dynamic=-1)
    loads = tuple(
        i
        for i in graph.live
        if (v := graph.values[i]).op == "load" and _unit(graph, v) == y and stride_of(v, x)
    )  # fmt: skip
    stores = tuple(k for k, o in enumerate(graph.outputs) if stored[k] == y and stride_of(o, x))
    size = min(narrowest(program), *(STORAGE_BYTES[graph.inputs[graph.values[i].slot]] for i in loads), 16)
    share = weight[y, x] / (weight[x, y] + weight[y, x])
    straight = {v.slot for i in graph.live if (v := graph.values[i]).op == "load" and _unit(graph, v) == x}
    mirrored = graph.extents[x] == graph.extents[y] and any(graph.values[i].slot in straight for i in loads)
    return Tiling(x, y, loads, stores, program, size, share, mirrored)
