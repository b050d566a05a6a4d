"""The tile scheme: reductions over the unit-stride axis, and others over outer axes, both inside small tiles.

Block-wise scaling in two directions is the pattern: ``x`` as [R, 32, C, 32], its largest element over the inner 32 and
over the other 32, and both results used again at full size. A tile is the set of elements with one index along the axes
that nothing reduces over. The scheme extends the outer scheme. A pass computes reductions over the unit-stride axis
across the lanes of a pack and across adjacent threads of a warp in the same tile
(``autotune.compiler.program.vectors.across_lanes``). So one read of ``x`` serves both directions.
"""

from __future__ import annotations

from functools import lru_cache

from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import Program, stride_of
from autotune.compiler.program.vectors import ACROSS, across_lanes, unit_axis
from autotune.compiler.schedules.cuda.outer import NARROWEST, OuterScheme, vectors
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, Graph

WIDEST = 512
"""Elements of the unit-stride axis that the lanes of one warp can take."""
LARGEST = 1 << 15
"""Most elements of a tile if there are few tiles: larger tiles would leave most of the device idle."""
MANY = 256
"""Number of tiles that is enough work for a device at any tile size."""


def _ordered(graph: Graph, axes: set[int]) -> tuple[int, ...]:
    """Axes by decreasing stride in the largest tensor read, with the axis of open extent first."""
    loads = [v for v in (graph.values[i] for i in graph.live) if v.op == "load"]
    largest = max(loads, key=lambda v: graph.size(v.axes), default=None)
    return tuple(sorted(axes, key=lambda a: (a != 0, -stride_of(largest, a) if largest else 0, a)))


@lru_cache(maxsize=256)
def _program(graph: Graph, keep: bool = True, online: bool = False) -> Program:
    overs = {frozenset(graph.values[i].over) for i in graph.live if graph.values[i].op in REDUCTIONS}
    x = unit_axis(graph)
    outer = {over - {x} for over in overs} - {frozenset()}
    if not any(x in over for over in overs) or len(outer) != 1:
        raise Unsupported("not reductions over the unit-stride axis and over one set of others")
    (cols,) = outer
    wide, deep = graph.extents[x], graph.size(cols)
    if not NARROWEST <= wide <= WIDEST or wide & (wide - 1):
        raise Unsupported(f"tiles of {wide} elements on the unit-stride axis")
    used = {a for i in graph.live for a in (*graph.values[i].axes, *graph.values[i].over)}
    used |= {a for o in graph.outputs for a in o.axes}
    rows = used - cols - {x}
    if wide * deep > LARGEST and graph.size(rows) < MANY:
        raise Unsupported("few large tiles")
    split = _ordered(graph, set(rows)), _ordered(graph, set(cols))
    program = build_program(across_lanes(graph, x), keep=keep, online=online, split=split)
    if not vectors(program):
        raise Unsupported(f"tiles of {wide} elements on the unit-stride axis")
    needed = {a for a in rows if graph.extents[a] > 1}
    for i in program.graph.live:
        v = program.graph.values[i]
        if v.op not in REDUCTIONS and not v.op.startswith(ACROSS):
            continue
        if not needed <= set(v.axes):
            raise Unsupported("a reduction that is the same for several tiles")
        if v.op.startswith(ACROSS) and x not in program.graph.values[v.args[0]].axes:
            raise Unsupported("a reduction over an axis that its argument does not vary over")
    return program


class TileScheme(OuterScheme):
    """Reductions over the unit-stride axis, and over one set of others."""

    name, rank, packs = "tile", 60, False

    def program(self, graph: Graph, keep: bool = True, online: bool = False) -> Program:
        return _program(graph, keep, online)


SCHEME = TileScheme()
