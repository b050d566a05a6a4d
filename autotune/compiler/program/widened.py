"""Rows of an odd length that lie in memory as rows of whole vectors: walked so, with nothing in what is left over.

The logits of GPT-2 have rows of 50257, which Inductor's padded product leaves 50264 apart. No vector divides 50257, and
a thread that takes two bytes at a time reads a third as fast as one that takes sixteen. So the axis gets 50264 places
here, of which the last seven are loaded from nowhere and change no sum and no maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Value

_LEAST = 256
"""Shorter rows are read at once anyway."""
_VECTOR = 16
"""Bytes."""
_IDENTITY = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


@lru_cache(maxsize=512)
def widened(graph: Graph) -> Graph:
    """A group with longer rows, or the graph itself: where vectors divide its rows, or would not help."""
    for axis in sorted({v.over[0] for v in graph.values if v.op in REDUCTIONS and len(v.over) == 1}):
        if lanes := _lanes(graph, axis):
            places = -(-graph.extents[axis] // lanes) * lanes
            graph = _longer(graph, axis, places) if places > graph.extents[axis] else graph
    return graph


def _lanes(graph: Graph, axis: int) -> int:
    """Elements of a vector along the axis; 0 where it may not be longer, or no vectors could be read."""
    if graph.extents[axis] < _LEAST or any(axis in o.axes for o in graph.outputs):
        return 0
    along = [v for v in graph.values if axis in v.axes and v.op in ("load", "gather")]
    if not along or any(v.op == "gather" or any(a == axis for a, _, _ in v.guards) for v in along):
        return 0
    for v in graph.values:
        if axis in v.over and (v.op not in _IDENTITY or v.dtype != "float32" or len(v.over) > 1):
            return 0
    lanes = _VECTOR // min(STORAGE_BYTES[graph.inputs[v.slot]] for v in along)
    return lanes if all(_is_aligned(v, axis, lanes) for v in along) else 0


def _is_aligned(v: Value, axis: int, lanes: int) -> bool:
    strides = dict(zip(v.axes, v.strides, strict=True))
    return strides.pop(axis) == 1 and v.offset % lanes == 0 and all(s % lanes == 0 for s in strides.values())


def _longer(graph: Graph, axis: int, places: int) -> Graph:
    extent = graph.extents[axis]
    values: list[Value] = []
    where: dict[int, int] = {}
    behind: dict[int, float] = {}
    """What values are in the places behind the row, as far as it is one number in all of them."""

    def put(v: Value, number: float | None = None) -> int:
        values.append(v)
        if number is not None:
            behind[len(values) - 1] = number
        return len(values) - 1

    def const(number: float, dtype: str) -> int:
        return put(Value("const", dtype=dtype, number=number))

    def neutral(i: int, number: float) -> int:
        """Value ``i`` with ``number`` in the places behind the row."""
        if behind.get(i) == number:
            return i
        place = put(Value("index", axes=(axis,), dtype="int32"))
        inside = put(Value("lt", (place, const(extent, "int32")), (axis,), "bool"))
        other = const(number, "float32")
        return put(Value("where", (inside, i, other), values[i].axes, "float32"), number)

    # What a maximum is over, others read, too: all take the value that is nothing to the maximum.
    peaks = {v.args[0]: _IDENTITY[v.op] for v in graph.values if v.op in ("max", "min") and axis in v.over}
    for i, v in enumerate(graph.values):
        v = replace(v, args=tuple(where[a] for a in v.args))
        if v.op == "load" and axis in v.axes:
            v = replace(v, guards=tuple(sorted((*v.guards, (axis, 0, extent)))))
        elif axis in v.over:
            v = replace(v, args=(neutral(v.args[0], _IDENTITY[v.op]),))
        shifted = v.op == "sub" and _is_shift(graph, *graph.values[i].args)
        where[i] = put(v, _behind(v, behind, axis, shifted))
        if i in peaks:
            where[i] = neutral(where[i], peaks[i])
    extents = tuple(places if a == axis else e for a, e in enumerate(graph.extents))
    outputs = tuple(replace(o, value=where[o.value]) for o in graph.outputs)
    return replace(graph, extents=extents, values=tuple(values), outputs=outputs)


def _is_shift(graph: Graph, score: int, shift: int) -> bool:
    """Whether ``shift`` is the maximum of ``score`` or, as logsumexp has it, that or a finite constant: it is -inf only
    where every score is, and then the row's own terms are NaN."""
    v = graph.values[shift]
    if v.op == "where":
        return all(
            _is_shift(graph, score, a) or (graph.values[a].op == "const" and math.isfinite(graph.values[a].number))
            for a in v.args[1:]
        )
    return v.op == "max" and v.args == (score,)


def _behind(v: Value, behind: Mapping[int, float], axis: int, shifted: bool) -> float | None:
    """The one number that a value is in the places behind the row, if that is known: of a softmax's terms it is 0.

    Args:
        shifted: it is a difference to :func:`_is_shift`'s, which leaves -inf what it is.
    """
    if v.op == "load" and axis in v.axes:
        return 0.0
    least = bool(v.args) and behind.get(v.args[0]) == -math.inf
    if shifted and least:
        return -math.inf
    return 0.0 if v.op in ("exp", "exp2") and least else None


__all__ = ["widened"]
