"""Clean-up after translation: dead values and axes go, axes that are walked as one become one.

``[8, 128, 768]`` and ``[1024, 768]``, both contiguous, come out as the same graph.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.fusion.graph import Graph, Output, Value


def remap(graph: Graph, values: list[int], axes: dict[int, int], extents: tuple[int, ...]) -> Graph:
    """The graph of ``values`` (in this order) with axes renumbered; axes not in ``axes`` are dropped."""
    where = {old: new for new, old in enumerate(values)}
    return Graph(
        extents,
        tuple(remap_value(graph.values[i], where, axes) for i in values),
        graph.inputs,
        tuple(remap_output(o, where, axes) for o in graph.outputs),
        graph.meta,
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


def _mergeable(graph: Graph, outer: int, inner: int) -> bool:
    extent = graph.extents[inner]

    def walked_as_one(axes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        if (outer in axes) != (inner in axes):
            return False
        return outer not in axes or strides[axes.index(outer)] == strides[axes.index(inner)] * extent

    for v in graph.values:
        if v.op in ("load", "gather"):
            if not walked_as_one(v.axes, v.strides) or any(a in (outer, inner) for a, _, _ in v.guards):
                return False
        elif (v.op == "index" and v.axes[0] in (outer, inner)) or (outer in v.over) != (inner in v.over):
            return False
    return all(walked_as_one(o.axes, o.strides) for o in graph.outputs)


def merge_axes(graph: Graph) -> Graph:
    """Merge every pair of axes that all loads, stores and reductions walk as one."""
    while True:
        pair = next(
            (
                (a, b)
                for a in range(len(graph.extents))
                for b in range(len(graph.extents))
                if a != b and _mergeable(graph, a, b)
            ),
            None,
        )
        if pair is None:
            return graph
        outer, inner = pair
        extents = list(graph.extents)
        extents[inner] *= extents[outer]
        del extents[outer]
        axes = {a: a - (a > outer) for a in range(len(graph.extents)) if a != outer}
        graph = remap(graph, list(range(len(graph.values))), axes, tuple(extents))


def simplify(graph: Graph) -> Graph:
    """All of it; the result computes the same outputs at the same addresses."""
    return merge_axes(drop_dead(graph))
