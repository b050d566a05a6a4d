"""What a graph multiplies and sums up, as a matrix product does, and what that asks of random inputs.

A sum of K products of standard normal numbers is sqrt(K) large: what follows it (a softmax, a tanh) would be saturated,
and a kernel that leaves out some of the K would pass. And one NaN in a vector that every result reads leaves no result
to compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.ir.graph import Graph

_SHARE = 8  # of the results, one in so many may be lost to what is odd in an operand


@dataclass(frozen=True)
class Operand:
    """Of a slot that is read by products only.

    Attributes:
        scale: what standard normal numbers are multiplied by.
        odd: how many elements may be NaN or infinite.
    """

    scale: float
    odd: int


def operands(graph: Graph) -> dict[int, Operand]:
    """The floating-point slots that go into sums of products and nowhere else."""
    values = graph.values
    sums = {i for i in graph.live if is_product(graph, i)}
    stored = {o.value for o in graph.outputs}
    reached: dict[int, set[int] | None] = {}  # the sums that a value goes to; None where it goes elsewhere too
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
    scaled: set[int] = set()  # sums of which an operand is scaled
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


def is_product(graph: Graph, i: int) -> bool:
    """Whether a value sums up products over axes that both factors have, one of which lacks an axis of the result."""
    v = graph.values[i]
    if v.op != "sum":
        return False
    terms = graph.values[v.args[0]]
    if terms.op != "mul" or math.prod(graph.extents[a] for a in v.over) == 1:
        return False
    factors = [set(graph.values[a].axes) for a in terms.args]
    return all(set(v.over) <= f for f in factors) and any(not set(v.axes) <= f for f in factors)
