"""Reductions over all rows and over each row: one group becomes a main kernel and a finish.

Layer norm's backward reduces over a row (for dx) and over all rows (for dgamma, dbeta). A bias gradient is a sum over
all rows of a pointwise kernel's result. To read everything only once, each block of a persistent grid keeps partial
results of its rows, one for each column, and writes them to scratch. A small *finish* kernel reduces these. Such
per-block partials are those of AStitch's global scheme (ASPLOS'22, section 4).

:func:`split_columns` splits a group's graph. The main graph has everything except the values that depend on the column
reductions. The finish graph loads the partials, ``[P, columns]``, and computes the rest. A variance over the rows
depends on the mean over the rows. It is carried as running moments (Welford; Chan et al. for joining), so that it needs
no second pass.

Group norm of a channels-last tensor reduces over the positions of an image and over the adjacent channels of a group.
Such rows are *interleaved*: between the elements of one group, memory has those of all others. Then the positions are
rows, all channels are columns, and images are a *batch*: each block keeps partials for columns of one image. The finish
also reduces over the channels of a group.

Rows are also *batched* if the reductions run over a part of the outer axes. The gradient of a scale for each image is a
sum over its tokens, and the gradient of window attention's bias one over all windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotune.compiler.program.passes import build_program, find_moments
from autotune.compiler.program.program import Column, Program, stride_of
from autotune.errors import Unsupported
from autotune.ir.canonical import canonicalize
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Value, compute_type
from autotune.ir.simplify import join_axes, remap, simplify

SECTOR_BYTES = 32
"""The bytes that a GPU's memory moves at least."""


@dataclass(frozen=True)
class Split:
    """A split group; see :func:`split_columns`.

    Attributes:
        main: graph of the main kernel; its inputs are those of the group, its outputs some of the group's.
        outputs: for each output of ``main``, the index of the group's output.
        columns: accumulators of the main kernel.
        rows, cols: axes of ``main``, outermost first.
        batch: the first of ``rows``, over which nothing is reduced.
        interleaved: the reductions over the rows also run over some of ``cols``.
        whole: the group's graph.
        reduced: for each of ``columns``, the reduction of ``whole`` that it replaces.
    """

    main: Graph
    outputs: tuple[int, ...]
    columns: tuple[Column, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    whole: Graph
    reduced: tuple[int, ...]
    batch: tuple[int, ...] = ()
    interleaved: bool = False

    @property
    def kind(self) -> str:
        """ "contiguous", "interleaved" or "batched": the rows of both latter are in separate sets."""
        return "interleaved" if self.interleaved else "batched" if self.batch else "contiguous"

    @property
    def width(self) -> int:
        return self.main.size(self.cols)

    @property
    def batches(self) -> int:
        """Number of separate sets of rows."""
        return self.main.size(self.batch)

    @property
    def reordered(self) -> bool:
        """True if kernels that were stored before 0.3.0 have the columns in the order of the graph's axes."""
        return not self.main.walks and self.cols != tuple(sorted(self.cols))

    def spans(self, c: Column) -> tuple[int, ...]:
        """The column axes that accumulator ``c`` varies over (none for a sum of one number a row)."""
        return tuple(a for a in self.cols if a in self.main.values[c.value].axes)

    @property
    def counts(self) -> bool:
        """True if the finish needs the number of rows of each part."""
        return any(c.kind == "moments" for c in self.columns)

    def planes(self, parts: int) -> list[tuple[str, int]]:
        """(storage type, elements) of each array of the results of ``parts`` parts of the rows."""
        planes = [("float32", parts)] if self.counts else []
        for c in self.columns:
            planes += [(c.storage, parts * (self.width if self.spans(c) else 1))] * c.planes
        return planes


def _unit_axis(graph: Graph) -> int:
    best, found = 0, -1
    for axes, strides, _ in graph.walks:
        n = graph.size(axes)
        for a, s in zip(axes, strides, strict=True):
            if s == 1 and graph.extents[a] > 1 and n > best:
                best, found = n, a
    return found


def _order(graph: Graph, axes: Iterable[int]) -> tuple[int, ...]:
    """Axes by decreasing stride in the largest tensor; the axis of unit stride is innermost."""
    walks = sorted(graph.walks, key=lambda walk: -graph.size(walk.axes))
    unit = _unit_axis(graph)

    def place(a: int) -> tuple[bool, int, int, int]:
        strides = ((n, stride_of(walk, a)) for n, walk in enumerate(walks))
        n, stride = next((found for found in strides if found[1]), (-1, 0))  # no tensor varies over it
        return a == unit, n, -stride, a

    return tuple(sorted(axes, key=place))


class _Axes(NamedTuple):
    """The axes of a group: column reductions run over ``rows`` and ``across``, row reductions over ``cols``.

    Attributes:
        batch: axes outside of ``rows``, ``cols`` and all reductions.
        across: those of ``cols`` that column reductions run over.
    """

    rows: frozenset[int]
    cols: frozenset[int]
    batch: frozenset[int] = frozenset()
    across: frozenset[int] = frozenset()


def _axes(graph: Graph) -> _Axes:
    used = {a for i in graph.live for a in (*graph.values[i].axes, *graph.values[i].over)}
    used |= {a for o in graph.outputs for a in o.axes}
    overs = {frozenset(graph.values[i].over) for i in graph.live if graph.values[i].op in REDUCTIONS}
    unit = _unit_axis(graph)
    if not overs or unit < 0:
        raise Unsupported("no reduction over all rows")
    partial = overs - {frozenset(used)}
    if len(partial) > 2:
        raise Unsupported("reductions over three sets of axes")
    if not partial:
        raise Unsupported("a reduction of everything")
    batch = frozenset[int]()
    if len(partial) == 2:
        one, two = partial
        if one & two:
            raise Unsupported("reductions over axes that are neither all rows nor all columns")
        cols = one if unit in one else two
        batch = frozenset(used - one - two)
    else:
        (one,) = partial
        cols = one if unit in one else frozenset(used - one)
    rows = used - cols - batch
    if len(overs) == 1 and unit in one and (interleaved := _interleaved(graph, one, frozenset(used))):
        return interleaved
    if unit not in cols or not rows or not overs & {frozenset(rows), frozenset(used)}:
        raise Unsupported("no reduction over all rows")
    if batch and overs != partial:
        raise Unsupported("a reduction of everything, and reductions over some of the rows")
    return _Axes(frozenset(rows), cols, batch)


def _interleaved(graph: Graph, over: frozenset[int], used: frozenset[int]) -> _Axes | None:
    """The axes if reductions over ``over`` have interleaved rows; None if their rows are contiguous."""
    walks = [walk for walk in graph.walks if used <= {a for a in walk.axes if stride_of(walk, a)}]
    if not walks:
        return None
    stride = {a: stride_of(walks[0], a) for a in used}
    outermost = max(stride[a] for a in over)
    kept = {a for a in used - over if stride[a] < outermost}
    if not kept:
        return None
    cols = frozenset(kept | {a for a in over if stride[a] < max(stride[b] for b in kept)})
    rows = over - cols
    if over.isdisjoint(cols) or any(stride[a] < stride[b] for a in rows for b in cols):
        return None
    return _Axes(rows, cols, used - rows - cols, over & cols)


def piece_bytes(graph: Graph, i: int) -> int:
    """Bytes of the contiguous pieces of a reduction's rows, if they are interleaved with other rows; else 0."""
    v = graph.values[i]
    used = frozenset([*v.axes, *v.over])
    axes = _interleaved(graph, frozenset(v.over), used)
    if axes is None:
        return 0
    sizes = [STORAGE_BYTES[walk.storage] for walk in graph.walks if used <= set(walk.axes)]
    return graph.size(axes.across) * max(sizes)


def split_columns(graph: Graph) -> Split:
    """Split a group.

    Raises Unsupported if it has no reductions over all rows, or if their results are used at full size.
    """
    axes = _axes(graph)
    rows, cols = axes.rows, axes.cols
    moments = {m.square: m.score for m in find_moments(graph, rows | axes.across)}
    whole, columns, reduced = _accumulators(graph, axes, moments)
    inside, follows = (
        _deviations(graph, moments),
        set[int](),
    )  # follows: made from results over all rows
    for i in graph.live:
        if i not in inside and (i in reduced or not follows.isdisjoint(graph.values[i].args)):
            follows.add(i)
    for i, v in ((i, graph.values[i]) for i in follows):
        if not rows.isdisjoint(v.axes):
            raise Unsupported("a result over all rows is used again at full size")
        if v.op in REDUCTIONS and i not in reduced:
            raise Unsupported("a reduction of reductions over all rows")
        if i in reduced and i not in moments and not follows.isdisjoint(v.args):
            raise Unsupported("a reduction over all rows needs another one first")
    for c in columns:
        if c.value < len(graph.values) and c.value in follows:
            raise Unsupported("a reduction over all rows needs another one first")
        if not rows | axes.batch <= set(whole.values[c.value].axes):
            raise Unsupported("a reduction over rows of what is the same in several")
    outputs = tuple(k for k, o in enumerate(graph.outputs) if o.value not in follows)
    if any(not rows & set(graph.outputs[k].axes) for k in outputs):
        raise Unsupported("an output that does not vary over the group's rows")
    stored = tuple(graph.outputs[k] for k in outputs)
    # Split reductions have the last numbers, but only roots need them.
    kept = whole.making([*(o.value for o in stored), *(c.value for c in columns)])
    same = {a: a for a in range(len(whole.extents))}
    main = remap(replace(whole, outputs=stored), kept, same, whole.extents)
    columns = tuple(replace(c, value=kept.index(c.value)) for c in columns)
    # The open extent must be the outermost. A main graph without outputs has no walks of its own.
    walked = main if main.walks else graph
    batch = _order(walked, axes.batch)
    ordered = (*batch, *sorted(_order(walked, rows), key=lambda a: a != 0))
    inner = _order(walked, cols)
    split = Split(main, outputs, columns, ordered, inner, graph, tuple(reduced), batch, bool(axes.across))
    if any(set(spans) != cols for spans in map(split.spans, columns) if spans or split.kind != "contiguous"):
        raise Unsupported("an accumulator that varies over some of the columns")
    return split


def _accumulators(graph: Graph, axes: _Axes, moments: Mapping[int, int]) -> tuple[Graph, tuple[Column, ...], list[int]]:
    """The accumulators over the rows, and the reduction that each of them replaces.

    In the returned graph, a reduction over everything is split into one over the row, after all other values, and one
    over the rows.
    """
    rows, cols = axes.rows, axes.cols
    values = list(graph.values)
    columns: list[Column] = []
    reduced: list[int] = []
    for i in graph.live:
        v = graph.values[i]
        if v.op not in REDUCTIONS:
            continue
        if i in moments:
            columns.append(Column("moments", moments[i], "float32"))
        elif set(v.over) == rows | axes.across:
            columns.append(Column(v.op, v.args[0], v.dtype))
        elif set(v.over) == rows | cols:
            if set(graph.values[v.args[0]].axes) != rows | cols:
                raise Unsupported("a reduction of everything of what does not vary over everything")
            values.append(Value(v.op, v.args, tuple(sorted(rows)), v.dtype, over=tuple(sorted(cols))))
            columns.append(Column(v.op, len(values) - 1, v.dtype))
        else:
            continue
        reduced.append(i)
    return replace(graph, values=tuple(values)), tuple(columns), reduced


def _deviations(graph: Graph, moments: Iterable[int]) -> set[int]:
    """Deviations from means over the rows, and their squares, which running moments make unnecessary."""
    live = set(graph.live)
    stored = {o.value for o in graph.outputs}
    found: set[int] = set()
    for i in moments:
        square = graph.values[i].args[0]
        d = graph.values[square].args[0]
        if live.intersection(graph.users[square]) - set(moments) or live.intersection(graph.users[d]) - {square}:
            raise Unsupported("deviations from a mean over the rows are used again at full size")
        if square in stored or d in stored:
            raise Unsupported("deviations from a mean over the rows are stored")
        found |= {square, d}
    return found


def main_program(split: Split, *, keep: bool = True, online: bool = False, unit_rows: bool = False) -> Program:
    """The program of the kernel that walks the rows.

    Args:
        unit_rows: True if a reduction over the columns may lack a row axis of extent 1.

    Raises:
        Unsupported: a reduction over the columns is the same for several rows.
    """
    graph, rows, cols = split.main, split.rows, split.cols
    while split.interleaved and len(cols) > 1 and (joined := join_axes(graph, *cols[-2:])) is not None:
        outer = cols[-2]
        graph = joined
        rows, cols = (tuple(a - (a > outer) for a in axes if a != outer) for axes in (rows, cols))
    program = build_program(graph, keep=keep, online=online, split=(rows, cols), columns=split.columns)
    if split.kind != "contiguous":
        program = replace(program, dynamic=-1, batches=split.batches)
    needed = {a for a in rows if not unit_rows or graph.extents[a] > 1}
    if any(not needed <= set(graph.values[i].axes) for i in program.reductions):
        raise Unsupported("a reduction that is the same for several rows")
    return program


def finish_graph(split: Split, parts: int) -> tuple[Graph, list[tuple[str, int]], list[int]]:
    """The canonical graph that reduces ``parts`` partial results, as many of each batch.

    Returns:
        The graph, the source of each slot (a "partial" plane or an "input" of the group), and the indices of the
        group's outputs that it writes.
    """
    raw, slots, outputs = _Finish(split, parts).graph()
    graph, order, at = canonicalize(simplify(raw))
    return graph, [slots[s] for s in order], [outputs[k] for k in at]


class _Finish:
    """Builder of the finish graph, which has the axes of the group's graph and one more for the parts."""

    def __init__(self, split: Split, parts: int) -> None:
        self.split, self.whole = split, split.whole
        self.extents = (*self.whole.extents, parts // split.batches)
        self.part = len(self.whole.extents)
        self.values: list[Value] = []
        self.types: list[str] = []
        self.slots: list[tuple[str, int]] = []
        self.made: dict[int, int] = {}

    def add(self, v: Value) -> int:
        self.values.append(v)
        return len(self.values) - 1

    def slot(self, ref: tuple[str, int], storage: str) -> int:
        if ref not in self.slots:
            self.slots.append(ref)
            self.types.append(storage)
        return self.slots.index(ref)

    def binary(self, op: str, a: int, b: int) -> int:
        axes = tuple(sorted({*self.values[a].axes, *self.values[b].axes}))
        return self.add(Value(op, (a, b), axes, self.values[a].dtype))

    def total(self, op: str, a: int, across: Iterable[int]) -> int:
        v = self.values[a]
        over = (*across, self.part)
        axes = tuple(x for x in v.axes if x not in over)
        return self.add(Value(op, (a,), axes, v.dtype, over=over))

    def plane(self, number: int, storage: str, spans: tuple[int, ...]) -> int:
        """A load of one plane of partials: [batch, part] or [batch, part, columns], dense."""
        strides = {}
        n = 1
        for a in reversed((*self.split.batch, self.part, *spans)):
            strides[a] = n
            n *= self.extents[a]
        axes, slot = tuple(sorted(strides)), self.slot(("partial", number), storage)
        along = tuple(strides[a] for a in axes)
        return self.add(Value("load", axes=axes, dtype=compute_type(storage), slot=slot, strides=along))

    def graph(self) -> tuple[Graph, tuple[tuple[str, int], ...], tuple[int, ...]]:
        """The graph, neither simplified nor canonical; its slots as in :func:`finish_graph`; the group's outputs."""
        split = self.split
        plane = 1 if split.counts else 0  # plane 0 holds the number of rows of each part
        for c, r in zip(split.columns, split.reduced, strict=True):
            spans, over = split.spans(c), self.whole.values[r].over
            across = sorted(set(spans).intersection(over))
            if c.kind == "moments":
                count = self.plane(0, "float32", ())
                mean, square = self.plane(plane, "float32", spans), self.plane(plane + 1, "float32", spans)
                total = self.total("sum", self.binary("mul", count, mean), across)
                centre = self.binary("mul", total, self.add(Value("const", number=1 / self.whole.size(over))))
                d = self.binary("sub", mean, centre)
                spread = self.binary("mul", count, self.binary("mul", d, d))
                self.made[r] = self.total("sum", self.binary("add", square, spread), across)
            else:
                done = self.total(c.kind, self.plane(plane, c.storage, spans), across)
                if c.dtype == "bool":
                    done = self.add(Value("cast", (done,), self.values[done].axes, "bool"))
                self.made[r] = done
            plane += c.planes
        outputs = [k for k in range(len(self.whole.outputs)) if k not in split.outputs]
        made = [replace(self.whole.outputs[k], value=self.value(self.whole.outputs[k].value)) for k in outputs]
        graph = Graph(self.extents, tuple(self.values), tuple(self.types), tuple(made), self.whole.precision)
        return graph, tuple(self.slots), tuple(outputs)

    def value(self, i: int) -> int:
        """Value ``i`` of the group, computed from the partials."""
        if i not in self.made:
            v = self.whole.values[i]
            args = tuple(self.value(a) for a in v.args)
            if v.slot >= 0:
                v = replace(v, slot=self.slot(("input", v.slot), self.whole.inputs[v.slot]))
            self.made[i] = self.add(replace(v, args=args))
        return self.made[i]
