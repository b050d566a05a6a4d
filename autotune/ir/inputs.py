"""Random inputs for a graph, with indices in bounds and scaled operands of products.

A sum of K products of standard normal numbers has a size of about sqrt(K). A softmax or tanh of it would be saturated,
and a kernel that omits some of the K products would pass. One NaN in a vector that every result depends on would leave
no result to compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autotune.ir.graph import EIGHT_BIT_FLOATS, FLOATS, Graph, at_axis, is_product

_NARROW = ("uint8", "int8", "int16")
_EXACT = 1 << 24
"""Integers below are exact in float32."""
_WIDE = {"int32": (1 << 31) - 1, "int64": 1 << 40}
"""Bounds on large integers. The least number of a type is none: divided by -1, it traps the processor."""
_SHARE = 8  # At most one in this many results is lost to an operand's odd elements.


@dataclass(frozen=True)
class Operand:
    """Parameters of a slot that only products read.

    Attributes:
        scale: the factor on standard normal numbers.
        odd: the most elements that are special values, such as NaN or infinity.
    """

    scale: float
    odd: int


_PLAIN = Operand(scale=1.0, odd=4096)  # any other input


def make_inputs(
    graph: Graph,
    seed: int,
    device: torch.device | str = "cpu",
    special: bool = False,
    within: Mapping[int, int] | None = None,
) -> list[Tensor]:
    """Random inputs for ``graph``: for each slot a one-dimensional tensor of ``input_numel(slot)`` elements.

    Floats are standard normal. Indices of a gather are within its bound, other integers in ``[-8, 8)`` (unsigned ones
    in ``[0, 8)``), booleans fair coins. An eighth of the terms of a ``sum_at`` has the same index, like padding and the
    most common words: a schedule chosen for evenly distributed terms took three times as long with a model's terms.

    ``special`` makes that a half. Integers of 8 and 16 bits then have any value of their type: a byte read with a sign
    must not pass. Half of the wider ones that never become floats are large, and wrap around. At least one and at most
    one in 500 floats are NaN, infinities, zeros of both signs and outliers. Outliers are 30; larger ones would show
    float32's cancellation, not a kernel's error.
    Operands of matrix products are scaled and have fewer special values (:func:`operands`).

    Args:
        within: bounds on the integers of slots that are no indices in the graph.
    """
    rng = torch.Generator(device=device).manual_seed(seed)
    bounds, multiplied, crowded = {**(within or {}), **index_bounds(graph)}, operands(graph), _places(graph, special)
    whole = _never_floats(graph) if special else set()
    out = []
    for slot, name in enumerate(graph.inputs):
        n = graph.input_numel(slot)
        dtype: torch.dtype = getattr(torch, name)
        if name in FLOATS:
            t = torch.randn(n, generator=rng, device=device, dtype=torch.float32)
            operand = multiplied.get(slot, _PLAIN)
            t = t.mul_(operand.scale).to(dtype)
            if special:
                _sprinkle(t.view(torch.uint8) if name in EIGHT_BIT_FLOATS else t, dtype, rng, operand.odd)
        elif name == "bool":
            t = torch.randint(0, 2, (n,), generator=rng, device=device).bool()
        else:
            lo, hi = 0 if slot in bounds or name == "uint8" else -8, bounds.get(slot, 8)
            if special and slot not in bounds and name in _NARROW:
                lo, hi = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
            t = torch.randint(lo, hi, (n,), generator=rng, device=device).to(dtype)
            if special and slot in whole and slot not in bounds:
                wide = torch.randint(-_WIDE[name], _WIDE[name], (n,), generator=rng, device=device).to(dtype)
                t = torch.where(torch.rand(n, generator=rng, device=device) < 0.5, wide, t)
            if slot in crowded:
                share = n // (2 if special else 8)
                t[torch.randint(0, n, (share,), generator=rng, device=device)] = t[0].clone()
        out.append(t)
    return out


def index_bounds(graph: Graph) -> dict[int, int]:
    """The bound for each slot of indices, which index a gather or a ``sum_at`` or are compared with an index."""
    bounds: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()

    def reach(i: int) -> int:
        u = graph.values[i]
        if u.op == "index":
            return u.shift + max(0, u.scale * (graph.extents[u.axes[0]] - 1))
        return int(u.number) if u.op == "const" else 0

    def limit(i: int, bound: int) -> None:
        u = graph.values[i]
        if (i, bound) in seen or u.dtype not in ("int32", "int64") or u.op in ("index", "const"):
            return
        seen.add((i, bound))
        if u.op in ("load", "gather"):
            bounds[u.slot] = min(bounds.get(u.slot, bound), bound)
            return  # the gather's index has a separate bound
        if u.op == "add":  # the addend reduces the bound, unless it wraps a negative index (``i + n``)
            room = bound - sum(max(0, reach(a)) for a in u.args)
            bound = room if room > 0 else bound
        if u.op == "mul":  # for example of an index and a mask, either of which may be the index
            numbers = [int(graph.values[a].number) for a in u.args if graph.values[a].op == "const"]
            bound = (bound - 1) // max(1, abs(numbers[0])) + 1 if numbers else math.isqrt(bound - 1) + 1
        if u.op == "minimum":
            bound = min([bound, *(int(graph.values[a].number) + 1 for a in u.args if graph.values[a].op == "const")])
        for a in u.args[1:] if u.op == "where" else u.args:
            limit(a, bound)

    for v in graph.values:
        if v.op == "gather":
            limit(v.args[0], v.bound)
        elif v.op == "sum_at":
            limit(v.args[1], graph.extents[at_axis(graph, v)])
        elif v.op == "eq":
            for one, other in (v.args, v.args[::-1]):
                position = graph.values[one]
                if position.op == "index":
                    limit(other, graph.extents[position.axes[0]] * position.scale + position.shift)
    return bounds


def operands(graph: Graph) -> dict[int, Operand]:
    """The floating-point slots that are read by sums of products only."""
    values = graph.values
    sums = {i for i in graph.live if is_product(graph, i)}
    stored = {o.value for o in graph.outputs}
    reached: dict[int, set[int] | None] = {}  # the sums that use a value; None with other users
    for i in reversed(graph.live):
        found: set[int] | None = set()
        for u in graph.users[i]:
            if u in sums:
                more: set[int] | None = {u}
            elif values[u].op in ("mul", "cast"):
                more = reached.get(u)
            else:
                more = None
            found = None if found is None or more is None else found | more
        reached[i] = None if i in stored else found
    slots: dict[int, tuple[set[int], int] | None] = {}
    for i in graph.live:
        v = values[i]
        if v.op not in ("load", "gather"):
            continue
        to, known = reached[i], slots.get(v.slot, (set(), 1 << 62))
        if not to or known is None or v.op == "gather" or v.dtype != "float32":
            slots[v.slot] = None
            continue
        seen = min(graph.size(set(values[s].axes) & set(v.axes)) for s in to)
        slots[v.slot] = (known[0] | to, min(known[1], seen))
    scaled: set[int] = set()  # sums with a scaled operand
    out = {}
    for slot, found_ in sorted(slots.items(), key=lambda item: -graph.input_numel(item[0])):
        if found_ is None:
            continue
        to, seen = found_
        terms = max(graph.size(values[s].over) for s in to)
        scale = 1.0 if to & scaled else terms**-0.5
        scaled |= to
        out[slot] = Operand(scale, max(1, seen // _SHARE) if seen > 1 else 0)
    return out


def _never_floats(graph: Graph) -> set[int]:
    """The slots of int32 and int64 of which no float is made: a float's sine or sum would show its rounding.

    Some bits of an integer are exact as a float: a dropout's seed is such a slot.
    """
    values = graph.values

    def is_cut(i: int) -> bool:
        masks = (values[a] for a in values[i].args) if values[i].op == "and" else ()
        return any(m.op == "const" and 0 <= m.number < _EXACT for m in masks)

    cast = (v.args[0] for v in values if v.op == "cast" and v.dtype == "float32")
    floats = {values[i].slot for i in graph.making(cast, given=is_cut)}
    return {slot for slot, name in enumerate(graph.inputs) if name in _WIDE} - floats


def _places(graph: Graph, special: bool) -> set[int]:
    """The slots of indices of sums; of those along rows only for ``special`` inputs, since each row has few terms."""
    sums = [v for v in graph.values if v.op == "sum_at"]
    made = graph.making(v.args[1] for v in sums if special or set(graph.values[v.args[1]].axes) <= set(v.over))
    values = (graph.values[i] for i in made)
    return {v.slot for v in values if v.op == "load" and v.dtype in ("int32", "int64")}


def _sprinkle(t: Tensor, dtype: torch.dtype, rng: torch.Generator, most: int) -> None:
    """Write special values into ``t``, which holds numbers of ``dtype``, or bytes of 8-bit floats.

    torch cannot assign some types of 8-bit floats at an index.
    """
    odd = torch.tensor([math.nan, math.inf, -math.inf, 30.0, -30.0, 0.0, -0.0], device=t.device).to(dtype).view(t.dtype)
    count = min(max(1, t.numel() // 500), most)  # few enough that most rows of a large input stay finite
    where = torch.randint(0, t.numel(), (count,), generator=rng, device=t.device)
    which = torch.randint(0, len(odd), (count,), generator=rng, device=t.device)
    t[where] = odd[which]
