"""Canonical form of graphs: a numbering that depends on the structure alone, so that isomorphic graphs are equal.

Values, axes, input slots and outputs start with a colour for their own properties. Each round refines the colours by
those of the neighbours (Weisfeiler-Lehman refinement, up and down), until no class splits any more. To break a tie, one
member of the first tied class gets a unique colour. Tied members of such a graph are interchangeable, so any member
will do. The colours then order everything. They are based on SHA-256 and never depend on names, on the order of a
commutative operator's arguments, or on Python's hash seed.

The *row axis* becomes axis 0. It is the axis with the largest stride in the largest output, among the axes that are
never reduced over. If every axis is reduced over, as in the backward of a layer norm, it is chosen among all axes. The
family of a workload is its digest with that axis's extent left open.

The form of a graph with several unconnected parts (``simplify.components``) is the concatenation of the parts'
canonical forms. Equal parts, and parts of one family, are adjacent. Such a graph has no row axis; its parts have.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autotune.ir.graph import REDUCTIONS, Graph, Output, Value, shared
from autotune.ir.nodes import POINTWISE
from autotune.ir.simplify import components, part, remap, remap_output, remap_value
from autotune.workload import Workload, digest

Colour = str
Form = tuple[Graph, tuple[int, ...], tuple[int, ...]]
"""A canonical graph, and the orders of slots and outputs that :func:`canonicalize` returns."""

_OPEN = 0.5
"""Stands for each constant that is left open."""
_MOST_OPEN = 400
"""Values of a graph whose constants are left open: trees of 1000 terms took 5 s."""
_WORK = 1 << 17
"""Limit of values times rounds, about a second; beyond it :meth:`_Colours.deepen` runs first.

No region of fewer than 360 values reaches it.
"""


@lru_cache(maxsize=2048)
def canonicalize(graph: Graph) -> Form:
    """The canonical form of a simplified graph, cached.

    Returns:
        The canonical graph, the slot order (canonical input slot ``k`` is the given graph's slot ``order[k]``) and the
        output order (likewise).
    """
    parts = components(graph)
    form, slots, outputs = _connected(graph) if len(parts) < 2 else _side_by_side(graph, parts)
    return shared(form), slots, outputs


def row_extent(graph: Graph) -> int:
    """The extent of the row axis of a canonical graph with independent rows; 0 for other graphs.

    Those are graphs whose row axis is reduced over, and graphs of several parts, each of which has its own rows.
    """
    if not graph.extents or any(0 in v.over for v in graph.values) or len(components(graph)) > 1:
        return 0
    return graph.extents[0]


def open_extent(graph: Graph) -> int:
    """The extent that the family of a canonical graph leaves open; 0 without a family.

    This is :func:`row_extent`. If every axis is reduced over, it is the extent of the rows, provided an output has the
    row axis: the input's gradient in a backward that also sums the weights' gradient. A look-up finds out if kernels
    accept another number of rows.
    """
    if row := row_extent(graph):
        return row
    if len(graph.extents) < 2 or not any(0 in o.axes for o in graph.outputs) or len(components(graph)) > 1:
        return 0
    return graph.extents[0]


def one_body(graph: Graph) -> str:
    """The digest, with the rows' extent left open, of a canonical graph with independent rows; "" for other graphs.

    Graphs that can run side by side in one kernel body have the same digest. It determines the order of parts in
    composite graphs, and so their fingerprints, and the parameters that groups of a stored plan share. It is not the
    family, because the definition of a family may widen.
    """
    return _with_open_rows(graph) if row_extent(graph) else ""


@lru_cache(maxsize=4096)
def without_constants(graph: Graph) -> str:
    """The digest of a canonical graph with its floating constants left open.

    Closed are 0, 1, -1, infinities, and the factor of a mean, which lets some schemes read their input once. Layers of
    a network often differ in a constant alone, such as the probability of stochastic depth. Their kernels have equal
    times. The numbering of such graphs differs. A graph of many values is like no other: equal terms with different
    constants take long to number.
    """
    means = {_rounded(1.0 / graph.size(v.over)) for v in graph.values if v.over}
    closed = {0.0, 1.0, -1.0} | means
    values = tuple(v.but(number=_OPEN) if _is_open(v, closed) else v for v in graph.values)
    if values != graph.values and len(values) <= _MOST_OPEN:
        graph = canonicalize(Graph(graph.extents, values, graph.inputs, graph.outputs, graph.precision))[0]
    return digest({"kind": "fusion", "spec": graph.to_json()})


def _rounded(number: float) -> float:
    """The nearest float32."""
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)


def _is_open(v: Value, closed: Container[float]) -> bool:
    return v.op == "const" and v.dtype == "float32" and math.isfinite(v.number) and v.number not in closed


def to_workload(graph: Graph, label: str = "", source: Mapping[str, Any] | None = None) -> Workload:
    """The workload of a canonical graph.

    ``label`` and ``source`` are carried along and are not part of the identity.
    """
    rows = open_extent(graph)
    label = f"{label} {graph.precision}" if label and graph.precision else label
    family = _with_open_rows(graph) if rows else ""
    return Workload("fusion", graph.to_json(), family=family, extent=rows, label=label, source=dict(source or {}))


@dataclass(frozen=True)
class Family:
    """The key that canonical graphs have in common if they differ in the number of rows only.

    It is narrower than a workload's family: sums over the rows need separate kernels.

    Attributes:
        key: the digest with the rows left open; the fingerprint of a graph without open rows.
        unit: for a row of elements, the fingerprint of the graph with one element, which has no axes; for a graph
            without axes, its fingerprint; "" for others.
    """

    key: str
    unit: str = ""

    def has(self, other: Family) -> bool:
        """True if one kernel with the number of rows as a variable runs graphs of both."""
        return self.key == other.key or (self.unit != "" and self.unit == other.unit and self._one() != other._one())

    def _one(self) -> bool:
        return self.key == self.unit


@lru_cache(maxsize=4096)
def family_of(graph: Graph) -> Family:
    """The family of a canonical graph."""
    name, body = to_workload(graph).fingerprint, one_body(graph)
    if not graph.extents:
        return Family(name, name)
    at_one = single(graph) if body else None
    return Family(body or name, to_workload(at_one[0]).fingerprint if at_one else "")


def single(graph: Graph) -> Form | None:
    """The canonical form of a row of elements reduced to one element, with the order of its slots and outputs.

    None if the graph is not one row of independent elements, or if an element depends on its index.
    """
    if len(graph.extents) != 1 or any(v.op in (*REDUCTIONS, "index") or v.guards for v in graph.values):
        return None
    return canonicalize(remap(graph, list(range(len(graph.values))), {}, ()))


def _side_by_side(graph: Graph, parts: Sequence[Sequence[int]]) -> Form:
    """The canonical forms of the parts with these outputs, concatenated in an order that depends on structure alone."""
    made: list[Form] = []
    for outputs in parts:
        own, used = part(graph, outputs)
        form, slots, order = _connected(own)
        made.append((form, tuple(used[s] for s in slots), tuple(outputs[k] for k in order)))
    names = [to_workload(form).fingerprint for form, _, _ in made]
    # The readers of a shared slot distinguish parts that are equal in themselves.
    readers: dict[int, list[tuple[str, int]]] = {}
    for (_, slots, _), name in zip(made, names, strict=True):
        for k, s in enumerate(slots):
            readers.setdefault(s, []).append((name, k))

    def place(n: int) -> tuple[object, ...]:
        form, slots, _ = made[n]
        return (one_body(form) or names[n], -row_extent(form), names[n], [sorted(readers[s]) for s in slots])

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
        values += [v.but(slot=number[slots[v.slot]]) if v.slot >= 0 else v for v in moved]
        extents += form.extents
        sinks += outputs
    result = Graph(tuple(extents), tuple(values), tuple(inputs.values()), tuple(stores), graph.precision)
    result.check()
    return result, tuple(inputs), tuple(sinks)


def _connected(graph: Graph) -> Form:
    """The canonical form of a graph of one part."""
    rows, deep = list(range(len(graph.extents))), False
    if len(rows) > 1:
        colours = _Colours(graph)
        deep = colours.discrete()
        rows = _order(graph, colours)[2][:1]
    # Without the rows' extent, so that the members of a family have the same numbering.
    colours = _Colours(graph, *rows)
    colours.discrete(deep)
    order, outputs, by_place = _order(graph, colours)
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
            v = v.but(args=tuple(sorted(v.args)))
        values.append(v.but(slot=slot_of[v.slot]) if v.slot >= 0 else v)
    result = Graph(
        tuple(graph.extents[a] for a in sorted(axes, key=lambda a: axes[a])),
        tuple(values),
        tuple(graph.inputs[s] for s in slots),
        tuple(remap_output(graph.outputs[k], where, axes) for k in outputs),
        graph.precision,
    )
    result.check()
    return result, tuple(slots), tuple(outputs)


def _with_open_rows(graph: Graph) -> str:
    return digest({"kind": "fusion", "spec": {**graph.to_json(), "extents": [None, *graph.extents[1:]]}})


def _mix(*parts: object) -> Colour:
    return _hash(repr(parts))


def _hash(text: str) -> Colour:
    """:func:`_mix` for a given ``repr`` of the parts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Colours:
    """The colouring of a graph's values, axes, slots and outputs; the extent of ``open_axis`` does not affect it.

    Every stored fingerprint depends on the colours: the hashed text must never change by a character. A round is that
    of ``tests/support/plain_colours.py``, with everything that is the same in all rounds computed before the first, and
    equal values computed once.
    """

    def __init__(self, graph: Graph, open_axis: int | None = None) -> None:
        self.graph = graph
        self.users = graph.users
        self.reads: list[list[int]] = [[] for _ in graph.inputs]
        for i, v in enumerate(graph.values):
            if v.slot >= 0:
                self.reads[v.slot].append(i)
        self.value: list[Colour] = []
        for v in graph.values:
            number = (type(v.number).__name__, repr(v.number)) if v.op == "const" else ""
            own = (v.op, v.dtype, v.offset, v.index_stride, v.bound, number, v.scale, v.shift, len(v.axes), len(v.over))
            self.value.append(_mix(own))
        self.axis = [_mix("axis", None if a == open_axis else e) for a, e in enumerate(graph.extents)]
        self.slot = [_mix("slot", d) for d in graph.inputs]
        self.output = [_mix("output", o.dtype, o.offset) for o in graph.outputs]
        self._commutes = [_commutes(v) for v in graph.values]
        self._places = [[(u, repr(_positions(graph.values[u], i))) for u in us] for i, us in enumerate(self.users)]
        self._strides = [v.strides or (0,) * len(v.axes) for v in graph.values]
        stored: dict[int, list[int]] = {}
        for k, o in enumerate(graph.outputs):
            stored.setdefault(o.value, []).append(k)
        kinds: dict[tuple[object, ...], int] = {}
        self._kinds = [kinds.setdefault(self._kind(i, stored.get(i, ())), i) for i in range(len(graph.values))]

    def _kind(self, i: int, stored: Sequence[int]) -> tuple[object, ...]:
        """All that a round reads of a value, except for the colours of itself, its arguments and its users.

        Args:
            stored: the outputs of the value.
        """
        v, places = self.graph.values[i], [place for _, place in self._places[i]]
        return (v.axes, self._strides[i], v.guards, v.over, v.slot, self._commutes[i], len(v.args), *places, *stored)

    def classes(self) -> int:
        return sum(len(set(c)) for c in (self.value, self.axis, self.slot, self.output))

    def settle(self, most: int | None = None) -> bool:
        """Refine until no class splits; return False if ``most`` rounds are not enough."""
        before, rounds = -1, 0
        while before != (now := self.classes()):
            if most is not None and rounds >= most:
                return False
            before, rounds = now, rounds + 1
            self._round()
        return True

    def deepen(self) -> None:
        """Colour values by all their ancestors and all their descendants.

        A round propagates a difference by one step. In a long chain of values this takes as many rounds as the chain
        has values, each over all values. The two walks here propagate it from end to end.
        """
        g = self.graph
        made: list[Colour] = []
        for i, v in enumerate(g.values):
            args = [made[a] for a in v.args]
            made.append(_mix("made of", self.value[i], sorted(args) if self._commutes[i] else args))
        stores: list[list[Colour]] = [[] for _ in g.values]
        for k, o in enumerate(g.outputs):
            stores[o.value].append(self.output[k])
        read: list[Colour] = [""] * len(g.values)
        for i in reversed(range(len(g.values))):
            users = sorted((read[u], place) for u, place in self._places[i])
            read[i] = _mix("read by", made[i], users, sorted(stores[i]))
        self.value = read

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
        quoted = [f"'{c}'" for c in value]
        walks: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}
        equal: dict[tuple[object, ...], tuple[Colour, list[tuple[int, Colour]]]] = {}
        new_value = []
        for i, v in enumerate(g.values):
            own_colour, places = quoted[i], self._places[i]
            args = [quoted[a] for a in v.args]
            key = (self._kinds[i], own_colour, *args, *[quoted[u] for u, _ in places])
            if (found := equal.get(key)) is None:
                strides = self._strides[i]
                if len(args) > 1 and self._commutes[i]:
                    args.sort()
                walk = walks.get((v.axes, strides))
                if walk is None:
                    pairs = sorted((axis[a], s) for a, s in zip(v.axes, strides, strict=True))
                    walk = walks[v.axes, strides] = repr(pairs)
                users = [f"'{_hash(f'({quoted[u]}, {place})')}'" for u, place in places]
                if len(users) > 1:
                    users.sort()
                guards = repr(sorted((axis[a], lo, hi) for a, lo, hi in v.guards)) if v.guards else "[]"
                over = repr(sorted(axis[a] for a in v.over)) if v.over else "[]"
                read = repr(slot[v.slot]) if v.slot >= 0 else "''"
                stored = repr(sorted(stores[i])) if stores[i] else "[]"
                made, used = f"[{', '.join(args)}]", f"[{', '.join(users)}]"
                new = _hash(f"({own_colour}, {made}, {used}, {walk}, {guards}, {over}, {read}, {stored})")
                said = {s: _hash(f"('in', {own_colour}, {s})") for s in set(strides)}
                to_axes = [(a, said[s]) for a, s in zip(v.axes, strides, strict=True)]
                if v.over:
                    to_axes += [(a, _hash(f"('over', {own_colour})")) for a in v.over]
                if v.guards:
                    to_axes += [(a, _hash(f"('guard', {own_colour}, {lo}, {hi})")) for a, lo, hi in v.guards]
                found = equal[key] = new, to_axes
            new_value.append(found[0])
            for a, colour in found[1]:
                on_axis[a].append(colour)
        self.axis = [_mix(axis[a], sorted(on_axis[a])) for a in range(len(axis))]
        self.slot = [_mix(slot[s], sorted(value[i] for i in self.reads[s])) for s in range(len(slot))]
        self.value, self.output = new_value, new_output

    def discrete(self, deep: bool = False) -> bool:
        """Settle, then split ties until every colour is unique; return True if :meth:`deepen` ran.

        Args:
            deep: run :meth:`deepen` without trying rounds first.
        """
        fresh = self.value, self.axis, self.slot, self.output
        if deep or not self.settle(_WORK // max(1, len(self.value))):
            self.value, self.axis, self.slot, self.output = fresh
            self.deepen()
            self.settle()
            deep = True
        while True:
            ties = ((c, _tie(c)) for c in (self.axis, self.slot, self.output, self.value))
            colours, member = next(((c, k) for c, k in ties if k >= 0), ([], -1))
            if member < 0:
                return deep
            colours[member] = _mix("chosen", colours[member])
            self.settle()


def _tie(colours: list[Colour]) -> int:
    """The first member of the class with the smallest colour among classes of several members; -1 without any."""
    tied = min((c for c, n in Counter(colours).items() if n > 1), default=None)
    return -1 if tied is None else colours.index(tied)


def _commutes(v: Value) -> bool:
    return v.op in POINTWISE and POINTWISE[v.op].commutative


def _positions(user: Value, arg: int) -> tuple[int, ...]:
    """The argument positions at which ``user`` takes ``arg``; for a commutative ``user``, their number."""
    places = tuple(k for k, a in enumerate(user.args) if a == arg)
    return (len(places),) if _commutes(user) else places


def _topological(graph: Graph, colour: Sequence[Colour]) -> list[int]:
    """The values in topological order; among those that are ready, by colour."""
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
    """The row axis, then the others by decreasing stride in the largest output that has them, else the largest load."""
    reduced = {a for v in graph.values for a in v.over}
    stored: list[Output | Value] = [graph.outputs[k] for k in outputs]
    tensors = sorted(stored, key=lambda o: -graph.size(o.axes))
    tensors += sorted((graph.values[i] for i in reads), key=lambda v: -graph.size(v.axes))
    strides = [dict(zip(t.axes, t.strides, strict=True)) for t in tensors]

    def place(a: int) -> tuple[bool, int, int, Colour]:
        where = next((n for n, s in enumerate(strides) if a in s), len(strides))
        return (a in reduced, where, -strides[where][a] if where < len(strides) else 0, colour[a])

    return sorted(range(len(graph.extents)), key=place)


def _order(graph: Graph, colours: _Colours) -> tuple[list[int], list[int], list[int]]:
    order = _topological(graph, colours.value)
    where = {old: new for new, old in enumerate(order)}
    outputs = sorted(range(len(graph.outputs)), key=lambda k: (where[graph.outputs[k].value], colours.output[k]))
    reads = [i for i in order if graph.values[i].op in ("load", "gather")]
    return order, outputs, _axis_order(graph, colours.axis, outputs, reads)
