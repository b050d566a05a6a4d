"""Which outputs of a graph may lie where an input lies: a kernel that reads each element before it writes it."""

from __future__ import annotations

from autotune.ir.graph import Graph, Output, Value


def overwritable(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Pairs of an input slot and an output whose memory may be one.

    Every load of the slot reads what the output writes at the same index, and the output needs all of these loads. So a
    thread that makes an element of the output has read that of the slot, whatever the compiler puts in which order.
    Other threads must not need it: that is for the kernel's scheme to promise.
    """
    reads: dict[int, list[int]] = {}
    for i in graph.live:
        if graph.values[i].op in ("load", "gather"):
            reads.setdefault(graph.values[i].slot, []).append(i)
    places = [_place(graph, o) for o in graph.outputs]
    needed = [set(graph.making([o.value])) for o in graph.outputs]
    return tuple(
        (slot, k)
        for slot, loads in sorted(reads.items())
        for k, output in enumerate(graph.outputs)
        if output.dtype == graph.inputs[slot] and needed[k].issuperset(loads)
        if all(_reads_at(graph, i, places[k]) for i in loads)
    )


_Place = tuple[int, frozenset[tuple[int, int]]]
"""The offset of a tensor, and its axes with their strides. An axis of one element says nothing, but for axis 0, which
has more at other rows."""


def _place(graph: Graph, tensor: Value | Output) -> _Place:
    strides = zip(tensor.axes, tensor.strides, strict=True)
    return tensor.offset, frozenset((a, s) for a, s in strides if a == 0 or graph.extents[a] > 1)


def _reads_at(graph: Graph, i: int, place: _Place) -> bool:
    v = graph.values[i]
    return v.op == "load" and not v.guards and _place(graph, v) == place


__all__ = ["overwritable"]
