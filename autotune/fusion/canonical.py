"""One form for all graphs that mean the same: numbering from structure alone.

Values, axes, input slots and outputs are coloured by what they are and, round after round, by the colours around them
(Weisfeiler-Lehman refinement, up and down), until no class splits any more. Ties are broken by giving one member of the
first tied class a colour of its own; tied members of such a graph are interchangeable, so it does not matter which. The
colours then order everything. They are SHA-256 based and never depend on names, on the order of arguments where the
operator commutes, or on Python's hash seed.

The *row axis* becomes axis 0: of the axes that are never reduced over, the one with the largest stride in the largest
output. The family of a workload is its digest with that axis's extent left open.

A graph of several parts that have nothing to do with each other (``autotune.fusion.components``) is the canonical forms
of its parts one after the other, equal ones and those of one family side by side. It has no row axis: its parts have.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.fusion.components import components, part
from autotune.fusion.graph import Graph, Output, Value
from autotune.fusion.ops import POINTWISE
from autotune.fusion.simplify import remap_output, remap_value
from autotune.workload import Workload, digest

Colour = str


def _mix(*parts: object) -> Colour:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Colours:
    """The colouring of a graph's values, axes, slots and outputs; the extent of ``open_axis`` plays no part in it."""

    def __init__(self, graph: Graph, open_axis: int | None = None) -> None:
        self.graph = graph
        self.users = graph.users
        self.reads: list[list[int]] = [[] for _ in graph.inputs]
        self.walks: list[list[tuple[str, object]]] = [[] for _ in graph.extents]
        for i, v in enumerate(graph.values):
            if v.slot >= 0:
                self.reads[v.slot].append(i)
        self.value = [_mix(_itself(v)) for v in graph.values]
        self.axis = [_mix("axis", None if a == open_axis else e) for a, e in enumerate(graph.extents)]
        self.slot = [_mix("slot", d) for d in graph.inputs]
        self.output = [_mix("output", o.dtype, o.offset) for o in graph.outputs]

    def classes(self) -> int:
        return sum(len(set(c)) for c in (self.value, self.axis, self.slot, self.output))

    def settle(self) -> None:
        """Refine until no class splits."""
        before = -1
        while before != (now := self.classes()):
            before = now
            self._round()

    def _round(self) -> None:
        g, value, axis, slot, output = self.graph, self.value, self.axis, self.slot, self.output
        stores: list[list[Colour]] = [[] for _ in g.values]
        on_axis: list[list[Colour]] = [[] for _ in g.extents]
        new_output = []
        for k, o in enumerate(g.outputs):
            where = sorted((axis[a], s) for a, s in zip(o.axes, o.strides, strict=True))
            new_output.append(_mix(output[k], value[o.value], where))
            stores[o.value].append(_mix(output[k], where))
            for a, s in zip(o.axes, o.strides, strict=True):
                on_axis[a].append(_mix("stored", output[k], s))
        new_value = []
        for i, v in enumerate(g.values):
            args = [value[a] for a in v.args]
            if _commutes(v):
                args.sort()
            new_value.append(
                _mix(
                    value[i],
                    args,
                    sorted(_mix(value[u], _positions(g.values[u], i)) for u in self.users[i]),
                    _walk(v, axis),
                    sorted((axis[a], lo, hi) for a, lo, hi in v.guards),
                    sorted(axis[a] for a in v.over),
                    slot[v.slot] if v.slot >= 0 else "",
                    sorted(stores[i]),
                )
            )
            for k, a in enumerate(v.axes):
                on_axis[a].append(_mix("in", value[i], v.strides[k] if v.strides else 0))
            for a in v.over:
                on_axis[a].append(_mix("over", value[i]))
            for a, lo, hi in v.guards:
                on_axis[a].append(_mix("guard", value[i], lo, hi))
        self.axis = [_mix(axis[a], sorted(on_axis[a])) for a in range(len(axis))]
        self.slot = [_mix(slot[s], sorted(value[i] for i in self.reads[s])) for s in range(len(slot))]
        self.value, self.output = new_value, new_output

    def discrete(self) -> None:
        """Settle, then split ties until every colour is unique."""
        self.settle()
        while True:
            tied = next(
                (t for c in (self.axis, self.slot, self.output, self.value) if (t := _tie(c)) is not None), None
            )
            if tied is None:
                return
            colours, member = tied
            colours[member] = _mix("chosen", colours[member])
            self.settle()


def _tie(colours: list[Colour]) -> tuple[list[Colour], int] | None:
    """A member of the class with the smallest colour among those with more than one member."""
    seen: dict[Colour, int] = {}
    tied: list[tuple[Colour, int]] = []
    for k, c in enumerate(colours):
        if c in seen:
            tied.append((c, seen[c]))
        else:
            seen[c] = k
    return (colours, min(tied)[1]) if tied else None


def _commutes(v: Value) -> bool:
    return v.op in POINTWISE and POINTWISE[v.op].commutative


def _itself(v: Value) -> tuple[object, ...]:
    number = (type(v.number).__name__, repr(v.number)) if v.op == "const" else ""
    return (v.op, v.dtype, v.offset, v.index_stride, v.bound, number, v.scale, v.shift, len(v.axes), len(v.over))


def _positions(user: Value, arg: int) -> tuple[int, ...]:
    """At which places ``user`` takes ``arg``; how often, where the order does not matter."""
    places = tuple(k for k, a in enumerate(user.args) if a == arg)
    return (len(places),) if _commutes(user) else places


def _walk(v: Value, axis: Sequence[Colour]) -> list[tuple[Colour, int]]:
    strides = v.strides or (0,) * len(v.axes)
    return sorted((axis[a], s) for a, s in zip(v.axes, strides, strict=True))


def _topological(graph: Graph, colour: Sequence[Colour]) -> list[int]:
    """Arguments before users; among those that are ready, by colour."""
    waiting = [len(set(v.args)) for v in graph.values]
    ready = [(colour[i], i) for i, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for u in graph.users[i]:
            waiting[u] -= 1
            if waiting[u] == 0:
                heapq.heappush(ready, (colour[u], u))
    return order


def _axis_order(graph: Graph, colour: Sequence[Colour], outputs: Iterable[int], reads: Iterable[int]) -> list[int]:
    """The row axis, then the others by falling stride in the largest output, or load where no output has them."""
    reduced = {a for v in graph.values for a in v.over}
    strides: list[Mapping[int, int]] = []
    for k in sorted(outputs, key=lambda k: -graph.size(graph.outputs[k].axes)):
        o = graph.outputs[k]
        strides.append(dict(zip(o.axes, o.strides, strict=True)))
    for i in sorted(reads, key=lambda i: -graph.size(graph.values[i].axes)):
        v = graph.values[i]
        strides.append(dict(zip(v.axes, v.strides, strict=True)))

    def place(a: int) -> tuple[bool, int, int, Colour]:
        where = next((n for n, s in enumerate(strides) if a in s), len(strides))
        return (a in reduced, where, -strides[where][a] if where < len(strides) else 0, colour[a])

    return sorted(range(len(graph.extents)), key=place)


def _order(graph: Graph, colours: _Colours) -> tuple[list[int], list[int], list[int]]:
    """Values, outputs and axes in their order."""
    colours.discrete()
    order = _topological(graph, colours.value)
    where = {old: new for new, old in enumerate(order)}
    outputs = sorted(range(len(graph.outputs)), key=lambda k: (where[graph.outputs[k].value], colours.output[k]))
    reads = [i for i in order if graph.values[i].op in ("load", "gather")]
    return order, outputs, _axis_order(graph, colours.axis, outputs, reads)


def canonicalize(graph: Graph) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """The canonical form of a simplified graph.

    Returns:
        The canonical graph, the slot order (canonical input slot ``k`` is the given graph's slot ``order[k]``) and the
        output order (likewise).
    """
    parts = components(graph)
    return _connected(graph) if len(parts) < 2 else _side_by_side(graph, parts)


def _side_by_side(graph: Graph, parts: Sequence[Sequence[int]]) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """The canonical forms of the parts with these outputs, concatenated in an order of what they are."""
    made: list[tuple[Graph, tuple[int, ...], tuple[int, ...]]] = []
    for outputs in parts:
        own, used = part(graph, outputs)
        form, slots, order = _connected(own)
        made.append((form, tuple(used[s] for s in slots), tuple(outputs[k] for k in order)))
    works = [to_workload(form) for form, _, _ in made]
    # A slot that several parts read tells equal parts apart by who else reads it.
    readers: dict[int, list[tuple[str, int]]] = {}
    for (_, slots, _), work in zip(made, works, strict=True):
        for k, s in enumerate(slots):
            readers.setdefault(s, []).append((work.fingerprint, k))

    def place(n: int) -> tuple[object, ...]:
        work, (_, slots, _) = works[n], made[n]
        return (work.family or work.fingerprint, -work.extent, work.fingerprint, [sorted(readers[s]) for s in slots])

    extents: list[int] = []
    values: list[Value] = []
    inputs: dict[int, str] = {}
    stores: list[Output] = []
    sinks: list[int] = []
    for n in sorted(range(len(made)), key=place):
        form, slots, outputs = made[n]
        for k, s in enumerate(slots):
            inputs.setdefault(s, form.inputs[k])
        number = {s: k for k, s in enumerate(inputs)}
        where = {i: i + len(values) for i in range(len(form.values))}
        axes = {a: a + len(extents) for a in range(len(form.extents))}
        stores += [remap_output(o, where, axes) for o in form.outputs]
        moved = [remap_value(v, where, axes) for v in form.values]
        values += [replace(v, slot=number[slots[v.slot]]) if v.slot >= 0 else v for v in moved]
        extents += form.extents
        sinks += outputs
    result = Graph(tuple(extents), tuple(values), tuple(inputs.values()), tuple(stores), graph.meta)
    result.check()
    return result, tuple(inputs), tuple(sinks)


def _connected(graph: Graph) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """The canonical form of a graph of one part."""
    rows = _order(graph, _Colours(graph))[2][:1]
    # Once more without the rows' extent, so that the members of a family are numbered alike.
    order, outputs, by_place = _order(graph, _Colours(graph, *rows))
    by_place = [*rows, *(a for a in by_place if a not in rows)]
    where = {old: new for new, old in enumerate(order)}
    reads = [i for i in order if graph.values[i].op in ("load", "gather")]
    axes = {a: k for k, a in enumerate(by_place)}
    slots: list[int] = []
    for i in reads:
        if graph.values[i].slot not in slots:
            slots.append(graph.values[i].slot)
    slot_of = {old: new for new, old in enumerate(slots)}
    values = []
    for i in order:
        v = remap_value(graph.values[i], where, axes)
        if _commutes(v):
            v = replace(v, args=tuple(sorted(v.args)))
        values.append(replace(v, slot=slot_of[v.slot]) if v.slot >= 0 else v)
    result = Graph(
        tuple(graph.extents[a] for a in sorted(axes, key=lambda a: axes[a])),
        tuple(values),
        tuple(graph.inputs[s] for s in slots),
        tuple(remap_output(graph.outputs[k], where, axes) for k in outputs),
        graph.meta,
    )
    result.check()
    return result, tuple(slots), tuple(outputs)


def row_extent(graph: Graph) -> int:
    """The extent of the row axis of a canonical graph; 0 where it has none (every axis is reduced over, or the graph is
    of several parts, each with rows of its own)."""
    if not graph.extents or any(0 in v.over for v in graph.values) or len(components(graph)) > 1:
        return 0
    return graph.extents[0]


def to_workload(graph: Graph, label: str = "", source: Mapping[str, Any] | None = None) -> Workload:
    """The workload of a canonical graph.

    ``label`` and ``source`` are carried along and are not part of the identity.
    """
    spec = graph.to_json()
    rows = row_extent(graph)
    family = digest({"kind": "fusion", "spec": {**spec, "extents": [None, *graph.extents[1:]]}}) if rows else ""
    return Workload(kind="fusion", spec=spec, family=family, extent=rows, label=label, source=dict(source or {}))
