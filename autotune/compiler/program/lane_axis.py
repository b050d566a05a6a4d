"""The axis that packs of neighbours lie on, where reductions run over outer axes."""

from __future__ import annotations

from dataclasses import replace

from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Value

ACROSS = "across_"
"""Prefix of the operators that reduce over the axis that packs lie on; see :func:`lower`."""


def lower(graph: Graph, axis: int) -> Graph:
    """``graph`` with its reductions over ``axis`` as operators across lanes; those over more axes become two.

    The result is for a program only: no other part of the package knows such operators.
    """
    made: list[Value] = []
    place: dict[int, int] = {}
    for i, v in enumerate(graph.values):
        args = tuple(place[a] for a in v.args)
        if v.op in REDUCTIONS and axis in v.over:
            axes = tuple(a for a in graph.values[v.args[0]].axes if a != axis)
            made.append(Value(ACROSS + v.op, args, axes, v.dtype, over=(axis,)))
            rest = tuple(a for a in v.over if a != axis)
            if rest:
                made.append(replace(v, args=(len(made) - 1,), over=rest))
        else:
            made.append(replace(v, args=args))
        place[i] = len(made) - 1
    outputs = tuple(replace(o, value=place[o.value]) for o in graph.outputs)
    return replace(graph, values=tuple(made), outputs=outputs)


def unit_axis(graph: Graph) -> int:
    """The axis along which neighbours in memory lie, in most of the bytes that reductions run over or that are written
    at their size (a reduced one in case of a tie); -1 if there is none."""
    reduced = {a for i in graph.live for a in graph.values[i].over}
    weight: dict[int, int] = {}
    for axes, strides, storage in graph.walks:
        for a, s in zip(axes, strides, strict=True):
            if s == 1 and graph.extents[a] > 1 and reduced & set(axes):
                weight[a] = weight.get(a, 0) + graph.size(axes) * STORAGE_BYTES[storage]
    return max(weight, key=lambda a: (weight[a], a in reduced, -a)) if weight else -1


def narrowest(graph: Graph, axis: int) -> int:
    """Bytes of the narrowest storage type that has unit stride along ``axis`` and varies over more than it."""
    sizes = [
        STORAGE_BYTES[storage]
        for axes, strides, storage in graph.walks
        if axis in axes and strides[axes.index(axis)] == 1 and len(axes) > 1
    ]
    return min(sizes, default=4)


def vector_length(graph: Graph, axis: int, vector_bytes: int) -> int:
    """Neighbours on ``axis`` that a thread takes at a time; 0 if they do not divide it."""
    n, rest = divmod(vector_bytes, narrowest(graph, axis))
    return 0 if rest or not 1 <= n <= 16 or graph.extents[axis] % n else n
