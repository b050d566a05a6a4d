"""Reductions of everything to one number, as reductions of rows and then of their results.

A loss or a norm is one row to a row-wise kernel, and one thread's or one block's work. Cut into rows, it is what
``autotune.compiler.program.columns`` takes apart.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.compiler.program.program import stride_of
from autotune.ir.graph import REDUCTIONS, Graph, Output, Value

FEWEST = 1 << 15
"""Elements below which one thread is as fast."""
_ROWS = (16, 4096)  # fewest and most rows that one long axis is cut into
_SHORTEST = 256  # elements of such a row


def cut_everything(graph: Graph) -> Graph | None:
    """``graph`` with every reduction done in two steps, the same inputs and outputs; None where not all of its
    reductions run over everything, or there is no good way to cut the elements into rows."""
    live = [graph.values[i] for i in graph.live]
    used = {a for v in live for a in (*v.axes, *v.over) if graph.extents[a] > 1}
    overs = [{a for a in v.over if graph.extents[a] > 1} for v in live if v.op in REDUCTIONS]
    if not overs or not used or any(over != used for over in overs) or graph.size(used) < FEWEST:
        return None
    largest = max((v for v in live if v.op == "load"), key=lambda v: graph.size(v.axes), default=None)
    if largest is None or any(v.op in REDUCTIONS and set(graph.values[v.args[0]].axes) < used for v in live):
        return None
    order = sorted(used, key=lambda a: -stride_of(largest, a))
    if len(order) > 1 and graph.extents[order[0]] >= _ROWS[0]:
        return _in_two_steps(graph, order[0])
    if len(order) > 1:
        return None
    rows = _rows(graph.extents[order[0]])
    unfolded = _unfold(graph, order[0], rows) if rows else None
    return None if unfolded is None else _in_two_steps(unfolded, len(graph.extents))


def _rows(n: int) -> int:
    """The divisor of ``n`` to cut an axis by, 0 if there is none: rows of whole vectors first, and many of them."""
    found = [r for r in range(_ROWS[0], _ROWS[1] + 1) if n % r == 0 and n // r >= _SHORTEST]
    return max(found, key=lambda r: ((n // r) % 16 == 0, r), default=0)


def _unfold(graph: Graph, axis: int, rows: int) -> Graph | None:
    """``axis`` as two: a new last one of ``rows``, and itself for what is left."""
    new, length = len(graph.extents), graph.extents[axis] // rows

    def split(axes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if axis not in axes:
            return axes, strides
        return (*axes, new), (*strides, strides[axes.index(axis)] * length)

    values: list[Value] = []
    for v in graph.values:
        if axis in v.axes and (v.op == "index" or any(a == axis for a, _, _ in v.guards)):
            return None
        if v.op in ("load", "gather"):
            axes, strides = split(v.axes, v.strides)
            v = replace(v, axes=axes, strides=strides)
        elif axis in v.axes:
            v = replace(v, axes=(*v.axes, new))
        if axis in v.over:
            v = replace(v, over=(*v.over, new))
        values.append(v)
    outputs = []
    for o in graph.outputs:
        axes, strides = split(o.axes, o.strides)
        outputs.append(Output(o.value, axes, strides, o.dtype, o.offset))
    extents = (*(length if a == axis else e for a, e in enumerate(graph.extents)), rows)
    return Graph(extents, tuple(values), graph.inputs, tuple(outputs), graph.precision)


def _in_two_steps(graph: Graph, row: int) -> Graph:
    """Each reduction over all axes but ``row``, and its results over ``row``."""
    values: list[Value] = []
    place: dict[int, int] = {}
    for i, v in enumerate(graph.values):
        v = replace(v, args=tuple(place[a] for a in v.args))
        if v.op in REDUCTIONS and row in v.over:
            values.append(replace(v, axes=(row,), over=tuple(a for a in v.over if a != row)))
            v = replace(v, args=(len(values) - 1,), over=(row,))
        place[i] = len(values)
        values.append(v)
    outputs = tuple(replace(o, value=place[o.value]) for o in graph.outputs)
    return Graph(graph.extents, tuple(values), graph.inputs, outputs, graph.precision)
