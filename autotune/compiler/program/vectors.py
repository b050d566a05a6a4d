"""Vector accesses: the axis of adjacent elements in memory, and the number of them that a thread takes at a time.

In a row-wise kernel a thread takes adjacent elements of its row. If reductions run over outer axes, packs of adjacent
elements are along the graph's :func:`unit_axis`. A pointwise group whose tensors have unit stride along different axes
is tiled (:func:`tiling`). Examples are ``x + x.t()``, and a tensor read as NCHW and written as NHWC. For either choice
of the threads' axis, the tensors with unit stride along the other axis would be accessed with large strides. See
:mod:`autotune.compiler.targets.cuda.transpose`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import Program, stride_of
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Output, Value, Walk
from autotune.ir.simplify import rebuild

ACROSS = "across_"
"""Prefix of the operators that reduce over the packs' axis; see :func:`across_lanes`."""
NARROWEST = 16
"""Elements of either axis below which a tile would be mostly empty."""
NARROWEST_KEPT = 8
"""Elements of a kept unit-stride axis below which a warp's accesses are split into sectors of several rows."""
WIDEST_TILE = 512
"""Elements of the unit-stride axis that the lanes of one warp can take."""
LARGEST_TILE = 1 << 15
"""Most elements of a tile if there are few tiles: larger tiles would leave most of the device idle."""
MANY_TILES = 256
"""Number of tiles that is enough work for a device at any tile size."""


@lru_cache(maxsize=2048)
def narrowest(program: Program) -> int:
    """Bytes of the narrowest storage type among the full-size tensors: the unit of ``vector_bytes``."""
    g = program.graph
    sizes = [
        STORAGE_BYTES[g.inputs[v.slot]]
        for i, v in enumerate(g.values)
        if v.op == "load" and program.domain(i) == "full" and stride_of(v, program.cols[-1]) == 1
    ]
    sizes += [STORAGE_BYTES[o.dtype] for o in g.outputs if any(a in program.cols for a in o.axes)]
    return min(sizes, default=4)


def vector_length(program: Program, vector_bytes: int) -> int:
    """Elements a thread takes at a time; 0 if ``vector_bytes`` does not fit this program."""
    size = narrowest(program)
    if vector_bytes % size:
        return 0
    n = vector_bytes // size
    if n == 1:
        return 1
    if not program.cols or n > 16:
        return 0
    # A row of elements of any length is walked in vectors, and its remainder element by element.
    return n if open_row(program) or program.graph.extents[program.cols[-1]] % n == 0 else 0


def open_row(program: Program) -> bool:
    """True if a group is one row of independent elements, their number an argument of the kernel."""
    return program.pointwise and not program.rows and program.dynamic == 0


def across_lanes(graph: Graph, axis: int) -> Graph:
    """``graph`` with its reductions over ``axis`` as operators across lanes; a reduction over more axes becomes two.

    The result is only for a program: no other part of the package supports these operators.
    """

    def make(i: int, v: Value, made: list[Value]) -> None:
        if v.op in REDUCTIONS and axis in v.over:
            axes = tuple(a for a in graph.values[graph.values[i].args[0]].axes if a != axis)
            made.append(Value(ACROSS + v.op, v.args, axes, v.dtype, over=(axis,)))
            if rest := tuple(a for a in v.over if a != axis):
                made.append(replace(v, args=(len(made) - 1,), over=rest))
        else:
            made.append(v)

    return rebuild(graph, make)


@lru_cache(maxsize=256)
def tile_program(graph: Graph, keep: bool, online: bool) -> Program:
    """A group with reductions over the unit-stride axis, and over one set of others, arranged into passes.

    Block-wise scaling in two directions is the pattern: ``x`` as [R, 32, C, 32], its largest element over the inner 32
    and over the other 32, and both results used again at full size. A *tile* is the set of elements with one index
    along the axes that nothing reduces over. One read of it serves both directions: a pass computes reductions over the
    unit-stride axis across the lanes of a pack and across adjacent threads (:func:`across_lanes`).

    Args:
        keep, online: those of :func:`autotune.compiler.program.passes.build_program`.

    Raises:
        Unsupported: the group has no such tiles, or few large ones.
    """
    overs = {frozenset(graph.values[i].over) for i in graph.live if graph.values[i].op in REDUCTIONS}
    x = unit_axis(graph)
    outer = {over - {x} for over in overs} - {frozenset()}
    if not any(x in over for over in overs) or len(outer) != 1:
        raise Unsupported("not reductions over the unit-stride axis and over one set of others")
    (cols,) = outer
    wide, deep = graph.extents[x], graph.size(cols)
    if not NARROWEST_KEPT <= wide <= WIDEST_TILE or wide & (wide - 1):
        raise Unsupported(f"tiles of {wide} elements on the unit-stride axis")
    used = {a for i in graph.live for a in (*graph.values[i].axes, *graph.values[i].over)}
    used |= {a for o in graph.outputs for a in o.axes}
    rows = used - cols - {x}
    if wide * deep > LARGEST_TILE and graph.size(rows) < MANY_TILES:
        raise Unsupported("few large tiles")
    loads = [v for v in (graph.values[i] for i in graph.live) if v.op == "load"]
    largest = max(loads, key=lambda v: graph.size(v.axes), default=None)

    def ordered(axes: Iterable[int]) -> tuple[int, ...]:
        """By decreasing stride in the largest tensor read, with the axis of open extent first."""
        return tuple(sorted(axes, key=lambda a: (a != 0, -stride_of(largest, a) if largest else 0, a)))

    program = build_program(across_lanes(graph, x), keep=keep, online=online, split=(ordered(rows), ordered(cols)))
    needed = {a for a in rows if graph.extents[a] > 1}
    for i in program.graph.live:
        v = program.graph.values[i]
        across = v.op.startswith(ACROSS)
        if (across or v.op in REDUCTIONS) and not needed <= set(v.axes):
            raise Unsupported("a reduction that is the same for several tiles")
        if across and x not in program.graph.values[v.args[0]].axes:
            raise Unsupported("a reduction over an axis that its argument does not vary over")
    return program


@lru_cache(maxsize=2048)
def unit_axis(graph: Graph) -> int:
    """The axis with unit stride in most of the bytes that reductions read or that outputs of their size write.

    In a tie, a reduced axis wins; -1 if no axis has unit stride.
    """
    reduced = {a for i in graph.live for a in graph.values[i].over}
    weight: dict[int, int] = {}
    for axes, strides, storage in graph.walks:
        for a, s in zip(axes, strides, strict=True):
            if s == 1 and graph.extents[a] > 1 and reduced & set(axes):
                weight[a] = weight.get(a, 0) + graph.size(axes) * STORAGE_BYTES[storage]
    return max(weight, key=lambda a: (weight[a], a in reduced, -a)) if weight else -1


def narrowest_along(graph: Graph, axis: int) -> int:
    """Bytes of the narrowest storage type that has unit stride along ``axis`` and varies over more than it."""
    sizes = [
        STORAGE_BYTES[storage]
        for axes, strides, storage in graph.walks
        if axis in axes and strides[axes.index(axis)] == 1 and len(axes) > 1
    ]
    return min(sizes, default=4)


def vector_along(graph: Graph, axis: int, vector_bytes: int) -> int:
    """Adjacent elements on ``axis`` that a thread takes at a time; 0 if their number does not divide it."""
    n, rest = divmod(vector_bytes, narrowest_along(graph, axis))
    return 0 if rest or not 1 <= n <= 16 or graph.extents[axis] % n else n


@dataclass(frozen=True)
class Tiling:
    """The axes that are tiled, and the tensors that go through shared memory.

    Attributes:
        x, y: axes; adjacent threads compute adjacent elements along ``x``.
        loads: loads with unit stride along ``y``.
        stores: outputs (indices) with unit stride along ``y``.
        program: the group with ``x`` as its only column.
        size: bytes of the narrowest type among the tensors with unit stride along either axis.
        mirrored: True if a square tensor is read both as ``x`` and as ``x.t()``.
    """

    x: int
    y: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    program: Program
    size: int
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


@lru_cache(maxsize=512)
def tiling(graph: Graph) -> Tiling:
    """The tiling of a group along the two axes that most bytes have as their unit-stride axes.

    Raises Unsupported if the group has reductions, or if its large tensors have one unit-stride axis.
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
    straight = {v.slot for i in graph.live if (v := graph.values[i]).op == "load" and _unit(graph, v) == x}
    mirrored = graph.extents[x] == graph.extents[y] and any(graph.values[i].slot in straight for i in loads)
    return Tiling(x, y, loads, stores, program, size, mirrored)


def _unit(graph: Graph, t: Value | Output | Walk) -> int:
    """The axis along which a tensor has unit stride; -1 if there is none."""
    return next((a for a, s in zip(t.axes, t.strides, strict=True) if s == 1 and graph.extents[a] > 1), -1)
