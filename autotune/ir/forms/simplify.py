"""Clean-up after translation: dead values and axes go, loads are guarded, axes that are walked as one become one.

``[8, 128, 768]`` and ``[1024, 768]``, both contiguous, come out as the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.ir.forms.selected import guard_selected
from autotune.ir.graph import Graph, Output, Value, at_axis


def remap(graph: Graph, values: list[int], axes: dict[int, int], extents: tuple[int, ...]) -> Graph:
    """The graph of ``values`` (in this order) with axes renumbered; axes not in ``axes`` are dropped."""
    where = {old: new for new, old in enumerate(values)}
    return Graph(
        extents,
        tuple(remap_value(graph.values[i], where, axes) for i in values),
        graph.inputs,
        tuple(remap_output(o, where, axes) for o in graph.outputs),
        graph.precision,
    )


def remap_value(v: Value, where: dict[int, int], axes: dict[int, int]) -> Value:
    new_axes, strides = v.axes, v.strides
    if v.op in ("load", "gather"):
        pairs = sorted((axes[a], s) for a, s in zip(v.axes, v.strides, strict=True) if a in axes)
        new_axes, strides = tuple(a for a, _ in pairs), tuple(s for _, s in pairs)
    else:
        new_axes = tuple(sorted(axes[a] for a in v.axes if a in axes))
    return replace(
        v,
        args=tuple(where[a] for a in v.args),
        axes=new_axes,
        strides=strides,
        guards=tuple(sorted((axes[a], lo, hi) for a, lo, hi in v.guards)),
        over=tuple(sorted(axes[a] for a in v.over if a in axes)),
    )


def remap_output(o: Output, where: dict[int, int], axes: dict[int, int]) -> Output:
    pairs = sorted((axes[a], s) for a, s in zip(o.axes, o.strides, strict=True) if a in axes)
    return replace(o, value=where[o.value], axes=tuple(a for a, _ in pairs), strides=tuple(s for _, s in pairs))


def drop_dead(graph: Graph) -> Graph:
    """Without the values no output needs and the axes nothing runs over."""
    values = list(graph.live)
    used = {a for i in values for a in (*graph.values[i].axes, *graph.values[i].over)}
    used.update(a for o in graph.outputs for a in o.axes)
    kept = sorted(used)
    return remap(graph, values, {a: k for k, a in enumerate(kept)}, tuple(graph.extents[a] for a in kept))


def drop_slots(graph: Graph) -> tuple[Graph, tuple[int, ...]]:
    """The graph without the slots that nothing reads, and which of the graph's slots each of its slots is."""
    used = sorted({v.slot for v in graph.values if v.slot >= 0})
    where = {old: new for new, old in enumerate(used)}
    values = tuple(replace(v, slot=where[v.slot]) if v.slot >= 0 else v for v in graph.values)
    return replace(graph, values=values, inputs=tuple(graph.inputs[s] for s in used)), tuple(used)


@dataclass(frozen=True)
class _Place:
    """A sum of indices and constants: a position along several axes. ``used``: by something that is no such sum."""

    coefficients: dict[int, int]
    constant: int
    used: bool


def _places(graph: Graph) -> dict[int, _Place]:
    found: dict[int, tuple[dict[int, int], int]] = {}
    for i, v in enumerate(graph.values):
        if v.op == "index":
            found[i] = ({v.axes[0]: v.scale}, v.shift)
        elif v.op == "const" and v.dtype in ("int32", "int64"):
            found[i] = ({}, int(v.number))
        elif v.op == "add" and v.dtype in ("int32", "int64") and all(a in found for a in v.args):
            total: dict[int, int] = {}
            for a in v.args:
                for axis, c in found[a][0].items():
                    total[axis] = total.get(axis, 0) + c
            found[i] = (total, sum(found[a][1] for a in v.args))
    stored = {o.value for o in graph.outputs}
    return {
        i: _Place(terms, constant, i in stored or any(u not in found for u in graph.users[i]))
        for i, (terms, constant) in found.items()
    }


def _mergeable(graph: Graph, outer: int, inner: int, places: Mapping[int, _Place]) -> bool:
    extent = graph.extents[inner]
    for place in places.values():
        c = place.coefficients
        if place.used and (outer in c or inner in c) and c.get(outer) != c.get(inner, 0) * extent:
            return False

    def walked_as_one(axes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        if (outer in axes) != (inner in axes):
            return False
        return outer not in axes or strides[axes.index(outer)] == strides[axes.index(inner)] * extent

    for v in graph.values:
        if v.op in ("load", "gather"):
            if not walked_as_one(v.axes, v.strides) or any(a in (outer, inner) for a, _, _ in v.guards):
                return False
        elif (outer in v.over) != (inner in v.over) or (v.op == "sum_at" and at_axis(graph, v) in (outer, inner)):
            return False
    return all(walked_as_one(o.axes, o.strides) for o in graph.outputs)


def _neighbours(graph: Graph) -> list[tuple[int, int]]:
    """Pairs of axes that something varies over together: only those can be one walk."""
    walks = {v.axes for v in graph.values} | {o.axes for o in graph.outputs}
    return sorted({(a, b) for axes in walks for a in axes for b in axes if a != b})


def merge_axes(graph: Graph) -> Graph:
    """Merge every pair of axes that all loads, stores, reductions and positions walk as one."""
    while True:
        places = _places(graph)
        pair = next(((a, b) for a, b in _neighbours(graph) if _mergeable(graph, a, b, places)), None)
        if pair is None:
            return graph
        outer, inner = pair
        if any(outer in place.coefficients for place in places.values()):
            graph = _placed_by_inner(graph, outer, places)
        extents = list(graph.extents)
        extents[inner] *= extents[outer]
        del extents[outer]
        axes = {a: a - (a > outer) for a in range(len(graph.extents)) if a != outer}
        graph = remap(graph, list(range(len(graph.values))), axes, tuple(extents))


def _placed_by_inner(graph: Graph, outer: int, places: Mapping[int, _Place]) -> Graph:
    """The graph with ``outer`` left out of every position, for the axis inside it to walk both."""
    values: list[Value] = []
    where: dict[int, int] = {}

    def put(v: Value) -> int:
        values.append(v)
        return len(values) - 1

    for i, v in enumerate(graph.values):
        place = places.get(i)
        if place is None or outer not in place.coefficients:
            where[i] = put(replace(v, args=tuple(where[a] for a in v.args)))
        elif place.used:
            shift, total = place.constant, -1
            for a, c in sorted(place.coefficients.items()):
                if a == outer:
                    continue
                one = put(Value("index", axes=(a,), dtype=v.dtype, scale=c, shift=shift))
                axes = tuple(sorted((*(values[total].axes if total >= 0 else ()), a)))
                total = one if total < 0 else put(Value("add", (total, one), axes, v.dtype))
                shift = 0
            where[i] = total
    outputs = tuple(replace(o, value=where[o.value]) for o in graph.outputs)
    return Graph(graph.extents, tuple(values), graph.inputs, outputs, graph.precision)


def simplify(graph: Graph) -> Graph:
    """All of it; the result computes the same outputs at the same addresses."""
    return drop_dead(merge_axes(drop_dead(guard_selected(graph))))
