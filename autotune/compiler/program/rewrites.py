"""Rewrites of groups' graphs for faster kernels: rows of whole vectors, and full reductions in two steps.

Rows of an odd length may have the stride of whole vectors, with unused elements after each row (:func:`widened`). The
logits of GPT-2 have rows of 50257, with a stride of 50264 after Inductor's padded product. No vector divides 50257, and
a thread with 2-byte accesses reads a third as fast as one with 16-byte accesses. So the axis is extended to 50264
elements. The last seven are not loaded and change no sum and no maximum.

A reduction of everything to one number, such as a loss or a norm, is one row in a row-wise kernel, which one thread or
one block would compute. Split into rows (:func:`cut_everything`), it has the form for
``autotune.compiler.program.columns``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from autotune.compiler.program.program import stride_of
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Output, Value
from autotune.ir.simplify import rebuild

FEWEST = 1 << 15
"""Elements below which one thread is as fast."""
_CUT_ROWS = (16, 4096)  # fewest and most rows that one long axis is cut into
_SHORTEST_CUT = 256  # elements of such a row
_LEAST = 256
"""Shorter rows are read at once anyway."""
_VECTOR = 16
"""Bytes."""
_IDENTITY = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


@lru_cache(maxsize=512)
def widened(graph: Graph) -> Graph:
    """A group with longer rows; the same graph if vectors divide its rows already, or would not help."""
    for axis in sorted({v.over[0] for v in graph.values if v.op in REDUCTIONS and len(v.over) == 1}):
        if lanes := _lanes(graph, axis):
            places = -(-graph.extents[axis] // lanes) * lanes
            graph = _longer(graph, axis, places) if places > graph.extents[axis] else graph
    return graph


def cut_everything(graph: Graph) -> Graph | None:
    """``graph`` with every reduction in two steps, and the same inputs and outputs.

    None if a reduction does not run over everything, or if there is no good way to split the elements into rows.
    """
    live = [graph.values[i] for i in graph.live]
    used = {a for v in live for a in (*v.axes, *v.over) if graph.extents[a] > 1}
    overs = [{a for a in v.over if graph.extents[a] > 1} for v in live if v.op in REDUCTIONS]
    if not overs or not used or any(over != used for over in overs) or graph.size(used) < FEWEST:
        return None
    largest = max((v for v in live if v.op == "load"), key=lambda v: graph.size(v.axes), default=None)
    if largest is None or any(v.op in REDUCTIONS and set(graph.values[v.args[0]].axes) < used for v in live):
        return None
    order = sorted(used, key=lambda a: -stride_of(largest, a))
    if len(order) > 1 and graph.extents[order[0]] >= _CUT_ROWS[0]:
        return _in_two_steps(graph, order[0])
    if len(order) > 1:
        return None
    rows = _rows(graph.extents[order[0]])
    unfolded = _unfold(graph, order[0], rows) if rows else None
    return None if unfolded is None else _in_two_steps(unfolded, len(graph.extents))


def _lanes(graph: Graph, axis: int) -> int:
    """Elements of a vector along the axis; 0 if the axis cannot be extended, or no vectors could be read."""
    if graph.extents[axis] < _LEAST or any(axis in o.axes for o in graph.outputs):
        return 0
    along = [v for v in graph.values if axis in v.axes and v.op in ("load", "gather")]
    if not along or any(v.op == "gather" or any(a == axis for a, _, _ in v.guards) for v in along):
        return 0
    for v in graph.values:
        if axis in v.over and (v.op not in _IDENTITY or v.dtype != "float32" or len(v.over) > 1):
            return 0
    lanes = _VECTOR // min(STORAGE_BYTES[graph.inputs[v.slot]] for v in along)
    for v in along:
        strides = dict(zip(v.axes, v.strides, strict=True))
        if strides.pop(axis) != 1 or any(n % lanes for n in (v.offset, *strides.values())):
            return 0
    return lanes


def _longer(graph: Graph, axis: int, places: int) -> Graph:
    extent = graph.extents[axis]
    behind: dict[int, float] = {}
    peaks = {v.args[0]: _IDENTITY[v.op] for v in graph.values if v.op in ("max", "min") and axis in v.over}

    def neutral(i: int, number: float, made: list[Value]) -> int:
        """Value ``i`` with ``number`` in the elements after the row."""
        if behind.get(i) == number:
            return i
        n = len(made)
        made.append(Value("index", axes=(axis,), dtype="int32"))
        made.append(Value("const", dtype="int32", number=extent))
        made.append(Value("lt", (n, n + 1), (axis,), "bool"))
        made.append(Value("const", dtype="float32", number=number))
        made.append(Value("where", (n + 2, i, n + 3), made[i].axes, "float32"))
        behind[n + 4] = number
        return n + 4

    def make(i: int, v: Value, made: list[Value]) -> int:
        if v.op == "load" and axis in v.axes:
            v = replace(v, guards=tuple(sorted((*v.guards, (axis, 0, extent)))))
        elif axis in v.over:
            v = replace(v, args=(neutral(v.args[0], _IDENTITY[v.op], made),))
        shifted = v.op == "sub" and _is_shift(graph, *graph.values[i].args)
        known = _behind(v, behind, axis, shifted)
        made.append(v)
        at = len(made) - 1
        if known is not None:
            behind[at] = known
        return neutral(at, peaks[i], made) if i in peaks else at

    extents = tuple(places if a == axis else e for a, e in enumerate(graph.extents))
    return replace(rebuild(graph, make), extents=extents)


def _is_shift(graph: Graph, score: int, shift: int) -> bool:
    """True if ``shift`` is the maximum of ``score``, or a select of it and a finite constant, as in logsumexp.

    The maximum is -inf only if every score is, and then the row's terms are NaN.
    """
    v = graph.values[shift]
    if v.op == "where":
        return all(
            _is_shift(graph, score, a) or (graph.values[a].op == "const" and math.isfinite(graph.values[a].number))
            for a in v.args[1:]
        )
    return v.op == "max" and v.args == (score,)


def _behind(v: Value, behind: Mapping[int, float], axis: int, shifted: bool) -> float | None:
    """The number that a value has in all elements after the row, if known; for a softmax's terms it is 0.

    Args:
        shifted: True if the value is the difference to a shift of :func:`_is_shift`, which keeps -inf.
    """
    if v.op == "load" and axis in v.axes:
        return 0.0
    least = bool(v.args) and behind.get(v.args[0]) == -math.inf
    if shifted and least:
        return -math.inf
    return 0.0 if v.op in ("exp", "exp2") and least else None


def _rows(n: int) -> int:
    """The divisor of ``n`` for splitting an axis, or 0; many rows of whole vectors are preferred."""
    found = [r for r in range(_CUT_ROWS[0], _CUT_ROWS[1] + 1) if n % r == 0 and n // r >= _SHORTEST_CUT]
    return max(found, key=lambda r: ((n // r) % 16 == 0, r), default=0)


def _unfold(graph: Graph, axis: int, rows: int) -> Graph | None:
    """Split ``axis`` into two: a new last axis of ``rows``, and itself for the rest."""
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
    """Split each reduction into one over all axes except ``row``, and one of its results over ``row``."""

    def make(i: int, v: Value, made: list[Value]) -> None:
        if v.op in REDUCTIONS and row in v.over:
            made.append(replace(v, axes=(row,), over=tuple(a for a in v.over if a != row)))
            v = replace(v, args=(len(made) - 1,), over=(row,))
        made.append(v)

    return rebuild(graph, make)
