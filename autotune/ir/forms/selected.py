"""Loads whose values are only used on a part of an axis are read there alone.

The tensors of a stack, or of a sum of ``select_backward``, do not vary over the axis that tells them apart, so that a
select between them would load them all for every element: three loads for each element of a packed QKV projection's
gradient. Here such a load gets the axis, with stride 0, and a guard on it; a select between that and zeros is gone.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.ir.graph import REDUCTIONS, Graph, Output, Value
from autotune.ir.ops import POINTWISE

Range = tuple[int, int]


def guard_selected(graph: Graph) -> Graph:
    """The graph with guards on loads that are used under conditions on an axis which they do not vary over.

    Not where neighbours in memory lie along that axis: there two loads and a select are a vector's worth of elements.
    Nor where a load varies over fewer axes than what it is selected for (a bias): it costs next to nothing.
    """
    tensors: list[Value | Output] = [graph.values[i] for i in graph.live if graph.values[i].op in ("load", "gather")]
    tensors += graph.outputs
    neighbours = {a for t in tensors for a, s in zip(t.axes, t.strides, strict=True) if s == 1}
    bounds = {i: b for i, b in ((i, _bound(graph, i)) for i in graph.live) if b is not None}
    for axis in sorted({a for a, _ in bounds.values()} - neighbours):
        cuts = {i: t for i, (a, t) in bounds.items() if a == axis}
        graph = _guarded(graph, axis, cuts)
    return graph


def _bound(graph: Graph, i: int) -> tuple[int, int] | None:
    """(axis, t) if value ``i`` says whether the index along the axis is less than ``t``."""
    v = graph.values[i]
    if v.op != "lt":
        return None
    position, limit = (graph.values[a] for a in v.args)
    if position.op != "index" or position.scale < 1 or limit.op != "const" or position.dtype == "float32":
        return None
    return position.axes[0], -((position.shift - int(limit.number)) // position.scale)


def _guarded(graph: Graph, axis: int, cuts: dict[int, int]) -> Graph:
    """The graph with guards along ``axis``; ``cuts`` has the values that are true below a number on it."""
    needs = _needs(graph, axis, cuts)
    values: list[Value] = []
    same: dict[int, int] = {}  # selects that their guarded argument stands for
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
            if _is_zero(values[other]) and _inside(values[then], axis, 0, cut):
                same[i] = then
            elif _is_zero(values[then]) and _inside(values[other], axis, cut, graph.extents[axis]):
                same[i] = other
    outputs = tuple(replace(o, value=same.get(o.value, o.value)) for o in graph.outputs)
    return replace(graph, values=tuple(values), outputs=outputs)


def _needs(graph: Graph, axis: int, cuts: dict[int, int]) -> dict[int, Range]:
    """The part of ``axis`` on which each load that is to be guarded is used."""
    whole = (0, graph.extents[axis])
    needs: dict[int, Range] = {o.value: whole for o in graph.outputs}
    wide: dict[int, set[int]] = {}  # axes of what a value is selected for

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
    """Whether ``v`` is a load that is zero outside ``[low, high)`` of ``axis``."""
    return v.op == "load" and any(a == axis and low <= lo and hi <= high for a, lo, hi in v.guards)


def _is_zero(v: Value) -> bool:
    return v.op == "const" and repr(v.number) in ("0", "0.0", "False")
