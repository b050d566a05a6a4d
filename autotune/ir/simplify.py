"""Simplification of graphs: without dead values and axes, with guarded loads, with fewer axes, or in parts.

Axes that can be walked as one are merged: contiguous ``[8, 128, 768]`` and ``[1024, 768]`` become the same graph.

Loads whose values are used only on a part of an axis get a guard (:func:`guard_selected`). The tensors of a stack, or
of a sum of ``select_backward``, do not vary over the new axis. A select between them would load all of them for every
element: three loads for each element of a packed QKV projection's gradient. With the guard, such a load has the axis
with stride 0, and a select between it and zeros is removed.

:func:`components` finds the parts of a graph that share nothing, such as the single updates of an optimizer step. Two
values are in the same part if one is computed from the other or if they vary over a common axis. Values that cost
nothing to recompute connect no parts: constants, and scalars made from scalars alone (a learning rate, a step's bias
correction). Each part that needs them has a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from autotune.ir.graph import REDUCTIONS, Graph, Output, Value, at_axis, shared
from autotune.ir.nodes import POINTWISE

Range = tuple[int, int]
Member = TypeVar("Member")


@lru_cache(maxsize=2048)
def simplify(graph: Graph) -> Graph:
    """Apply all simplifications; the result computes the same outputs at the same addresses."""
    return shared(drop_dead(merge_axes(drop_dead(guard_selected(graph)))))


def merge_axes(graph: Graph) -> Graph:
    """Merge every pair of axes that all loads, stores, reductions and indices can walk as one."""
    while True:
        places = _places(graph)
        pair = next(((a, b) for a, b in _neighbours(graph) if _mergeable(graph, a, b, places)), None)
        if pair is None:
            return graph
        outer, inner = pair
        if any(outer in place.coefficients for place in places.values()):
            graph = _placed_by_inner(graph, outer, places)
        graph = _joined(graph, outer, inner)


def _joined(graph: Graph, outer: int, inner: int) -> Graph:
    extents = list(graph.extents)
    extents[inner] *= extents[outer]
    del extents[outer]
    axes = {a: a - (a > outer) for a in range(len(graph.extents)) if a != outer}
    return remap(graph, list(range(len(graph.values))), axes, tuple(extents))


def join_axes(graph: Graph, outer: int, inner: int) -> Graph | None:
    """The graph with two axes as one, and the same values; axes after ``outer`` have the next lower number.

    None if some load, store, reduction or index cannot walk both as one.
    """
    if any(v.op == "index" for v in graph.values) or not _mergeable(graph, outer, inner, {}):
        return None
    return _joined(graph, outer, inner)


def guard_selected(graph: Graph) -> Graph:
    """Add guards to loads that are selected by conditions on an axis which they do not vary over.

    There are no guards along an axis of unit stride: there two loads and a select cover a vector of elements. A load
    that varies over fewer axes than the select's result (a bias) gets none either, as it costs almost nothing.
    """
    tensors: list[Value | Output] = [graph.values[i] for i in graph.live if graph.values[i].op in ("load", "gather")]
    tensors += graph.outputs
    neighbours = {a for t in tensors for a, s in zip(t.axes, t.strides, strict=True) if s == 1}
    bounds = {i: b for i, b in ((i, _bound(graph, i)) for i in graph.live) if b is not None}
    for axis in sorted({a for a, _ in bounds.values()} - neighbours):
        cuts = {i: t for i, (a, t) in bounds.items() if a == axis}
        graph = _guarded(graph, axis, cuts)
    return graph


def components(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The outputs of each connected part of a graph, ordered by first output; () without outputs."""
    free = _numbers(graph)
    sets: Sets[object] = Sets()
    # A result that is a scalar keeps its ancestors.
    wanted = set(graph.making(o.value for o in graph.outputs if free[o.value]))
    for i in graph.live:
        v = graph.values[i]
        if v.op == "const" or (free[i] and i not in wanted):
            continue
        for a in v.args:
            if graph.values[a].op != "const" and free[a] == free[i]:
                sets.union(i, a)
        for axis in (*v.axes, *v.over):
            sets.union(i, ("axis", axis))
    found: dict[object, list[int]] = {}
    for k, o in enumerate(graph.outputs):
        for axis in o.axes:  # a scalar may be stored over an axis
            sets.union(("output", k), ("axis", axis))
        if graph.values[o.value].op != "const" and not (free[o.value] and o.axes):
            sets.union(("output", k), o.value)
    for k in range(len(graph.outputs)):
        found.setdefault(sets.find(("output", k)), []).append(k)
    return tuple(tuple(outputs) for outputs in found.values())


def part(graph: Graph, outputs: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """The graph of some outputs alone, and for each of its slots the index of the original slot."""
    return drop_slots(drop_dead(replace(graph, outputs=tuple(graph.outputs[k] for k in outputs))))


Make = Callable[[int, Value, list[Value]], int | None]
"""Takes a value's number, the value with its new arguments, and the list of new values, to which it appends.

It returns the new number; None is that of the last new value.
"""


def rebuild(graph: Graph, make: Make) -> Graph:
    """``graph`` with each value replaced by the values that ``make`` appends for it."""
    made: list[Value] = []
    where: dict[int, int] = {}
    for i, v in enumerate(graph.values):
        number = make(i, v.but(args=tuple(where[a] for a in v.args)), made)
        where[i] = len(made) - 1 if number is None else number
    outputs = tuple(replace(o, value=where[o.value]) for o in graph.outputs)
    return replace(graph, values=tuple(made), outputs=outputs)


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
    return v.but(
        args=tuple(where[a] for a in v.args),
        axes=new_axes,
        strides=strides,
        guards=tuple(sorted((axes[a], lo, hi) for a, lo, hi in v.guards)) if v.guards else (),
        over=tuple(sorted(axes[a] for a in v.over if a in axes)) if v.over else (),
    )


def remap_output(o: Output, where: dict[int, int], axes: dict[int, int]) -> Output:
    pairs = sorted((axes[a], s) for a, s in zip(o.axes, o.strides, strict=True) if a in axes)
    return replace(o, value=where[o.value], axes=tuple(a for a, _ in pairs), strides=tuple(s for _, s in pairs))


def drop_dead(graph: Graph) -> Graph:
    """The graph without values that no output needs, and without axes that nothing varies over."""
    values = list(graph.live)
    used = {a for i in values for a in (*graph.values[i].axes, *graph.values[i].over)}
    used.update(a for o in graph.outputs for a in o.axes)
    kept = sorted(used)
    return remap(graph, values, {a: k for k, a in enumerate(kept)}, tuple(graph.extents[a] for a in kept))


def drop_slots(graph: Graph) -> tuple[Graph, tuple[int, ...]]:
    """The graph without unread slots, and for each of its slots the index of the original slot."""
    used = sorted({v.slot for v in graph.values if v.slot >= 0})
    where = {old: new for new, old in enumerate(used)}
    values = tuple(v.but(slot=where[v.slot]) if v.slot >= 0 else v for v in graph.values)
    return replace(graph, values=values, inputs=tuple(graph.inputs[s] for s in used)), tuple(used)


@dataclass(frozen=True)
class _Place:
    """A sum of indices and constants; ``used`` is True if it is stored or has a user that is no such sum."""

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
    """Pairs of axes that some value or output has together: only these can be merged."""
    walks = {v.axes for v in graph.values} | {o.axes for o in graph.outputs}
    return sorted({(a, b) for axes in walks for a in axes for b in axes if a != b})


def _placed_by_inner(graph: Graph, outer: int, places: Mapping[int, _Place]) -> Graph:
    """The graph without ``outer`` in index sums, so that the inner axis can walk both."""

    def make(i: int, v: Value, made: list[Value]) -> int | None:
        place = places.get(i)
        if place is None or outer not in place.coefficients:
            made.append(v)
        elif place.used:
            shift, total = place.constant, -1
            for a, c in sorted(place.coefficients.items()):
                if a == outer:
                    continue
                made.append(Value("index", axes=(a,), dtype=v.dtype, scale=c, shift=shift))
                one, shift = len(made) - 1, 0
                if total >= 0:
                    axes = tuple(sorted((*made[total].axes, a)))
                    made.append(Value("add", (total, one), axes, v.dtype))
                total = len(made) - 1
            return total
        return None

    return rebuild(graph, make)


def _bound(graph: Graph, i: int) -> tuple[int, int] | None:
    """(axis, t) if value ``i`` is true where the index along the axis is less than ``t``."""
    v = graph.values[i]
    if v.op != "lt":
        return None
    position, limit = (graph.values[a] for a in v.args)
    if position.op != "index" or position.scale < 1 or limit.op != "const" or position.dtype == "float32":
        return None
    return position.axes[0], -((position.shift - int(limit.number)) // position.scale)


def _guarded(graph: Graph, axis: int, cuts: dict[int, int]) -> Graph:
    """The graph with guards along ``axis``; ``cuts`` maps each condition ``index < t`` on it to ``t``."""
    needs = _needs(graph, axis, cuts)
    values: list[Value] = []
    same: dict[int, int] = {}  # selects replaced by their guarded argument
    for i, v in enumerate(graph.values):
        args = tuple(same.get(a, a) for a in v.args)
        if i in needs:
            at = sorted([*zip(v.axes, v.strides, strict=True), (axis, 0)])
            guards = tuple(sorted((*v.guards, (axis, *needs[i]))))
            v = replace(v, axes=tuple(a for a, _ in at), strides=tuple(s for _, s in at), guards=guards)
        elif v.op in POINTWISE:
            v = replace(v, args=args, axes=tuple(sorted({a for k in args for a in values[k].axes})))
        else:
            v = replace(v, args=args)
        values.append(v)
        if v.op == "where" and v.args[0] in cuts:
            cut, (then, other) = cuts[v.args[0]], v.args[1:]
            if values[other].is_zero and _inside(values[then], axis, 0, cut):
                same[i] = then
            elif values[then].is_zero and _inside(values[other], axis, cut, graph.extents[axis]):
                same[i] = other
    outputs = tuple(replace(o, value=same.get(o.value, o.value)) for o in graph.outputs)
    return replace(graph, values=tuple(values), outputs=outputs)


def _needs(graph: Graph, axis: int, cuts: dict[int, int]) -> dict[int, Range]:
    """For each load that gets a guard, the range of ``axis`` on which it is used."""
    whole = (0, graph.extents[axis])
    needs: dict[int, Range] = {o.value: whole for o in graph.outputs}
    wide: dict[int, set[int]] = {}  # axes of the selects that use a value

    def use(i: int, part: Range, over: set[int]) -> None:
        low, high = part if part[0] < part[1] else whole
        have = needs.get(i, (low, high))
        needs[i] = min(low, have[0]), max(high, have[1])
        wide.setdefault(i, set()).update(over)

    for i in reversed(graph.live):
        v = graph.values[i]
        (low, high), over = needs[i], wide.get(i, set())
        if v.op == "where" and v.args[0] in cuts:
            cut = cuts[v.args[0]]
            use(v.args[0], (low, high), over)
            use(v.args[1], (low, min(high, cut)), over | set(v.axes))
            use(v.args[2], (max(low, cut), high), over | set(v.axes))
            continue
        passes = v.op in POINTWISE
        assert passes or v.op in (*REDUCTIONS, "gather") or not v.args
        for a in v.args:
            use(a, (low, high) if passes else whole, over)
    return {
        i: part
        for i, part in needs.items()
        if graph.values[i].op == "load"
        and axis not in graph.values[i].axes
        and part != whole
        and wide[i] - {axis} <= set(graph.values[i].axes)
    }


def _inside(v: Value, axis: int, low: int, high: int) -> bool:
    """True if ``v`` is a load that is zero outside ``[low, high)`` of ``axis``."""
    return v.op == "load" and any(a == axis and low <= lo and hi <= high for a, lo, hi in v.guards)


class Sets(Generic[Member]):
    """Union-find over hashable members."""

    def __init__(self) -> None:
        self.parent: dict[Member, Member] = {}

    def find(self, x: Member) -> Member:
        self.parent.setdefault(x, x)
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def union(self, x: Member, y: Member) -> None:
        self.parent[self.find(x)] = self.find(y)


def _numbers(graph: Graph) -> list[bool]:
    """For each value, True if it is a scalar that no reduction contributes to."""
    out: list[bool] = []
    for v in graph.values:
        out.append(not v.axes and v.op not in REDUCTIONS and all(out[a] for a in v.args))
    return out
