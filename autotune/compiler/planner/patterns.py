"""Candidate groups by PatternReduction (FusionStitching, arXiv 2009.10924, section 5.2).

The vertices are a region's roots: reductions and outputs, an output together with the reduction that it stores. Light
operators belong to their users and are no vertices. Candidates of a vertex, which is their *producer*, are made in
post-order (consumers first). The best few groups of its consumers are joined, two consumers at a time, and with the
vertex itself. A large input is a producer too, with its readers as consumers, so that independent reductions of one
tensor become one group. Groups that share nothing are joined by packing launches
(``autotune.compiler.planner.groups``), the paper's remote fusion.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from functools import cached_property

from autotune.compiler.planner.cost import Costs, Figures
from autotune.compiler.planner.groups import Root, Roots
from autotune.compiler.planner.plan import all_roots, cone, sketch
from autotune.compiler.schedules.cuda import legal
from autotune.ir.graph import REDUCTIONS, Graph

TOP = 3
"""Candidates kept for each producer."""
_LARGE = 1 << 14  # Least bytes of an input for joining its readers.

Mask = int
"""A set of vertices, one bit each."""


def union(masks: Iterable[Mask]) -> Mask:
    """The vertices that are in any of the sets."""
    return functools.reduce(operator.or_, masks, 0)


def bits(mask: Mask) -> Iterable[int]:
    """The vertices of a set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Vertices:
    """The graph of a region's roots, and the costs of groups of them.

    Attributes:
        roots: the roots of each vertex, in an order in which they can be computed.
        needs: for each vertex, the vertices whose reductions it reads.
        users: for each vertex, the vertices that read its reductions.
    """

    def __init__(self, graph: Graph, side: str, figures: Figures) -> None:
        self.graph, self.side, self.figures = graph, side, figures
        self.costs = Costs(graph, figures)
        by_value: dict[int, list[Root]] = {}
        for root in all_roots(graph):
            by_value.setdefault(root.value(graph), []).append(root)
        self.roots: tuple[Roots, ...] = tuple(tuple(by_value[i]) for i in sorted(by_value))
        self.reduction = {
            i: n for n, i in enumerate(sorted(by_value)) if graph.values[i].op in REDUCTIONS
        }  # value of a reduction to its vertex
        n = len(self.roots)
        self.needs: list[Mask] = [0] * n
        self.reads: list[frozenset[int]] = []
        self.users: list[Mask] = [0] * n
        self.before: list[Mask] = []
        for k in range(n):
            values = cone(graph, self.roots[k], self._home(1 << k), 0)
            self.needs[k] = union(1 << self.reduction[i] for i in values if self.reduction.get(i, k) != k)
            self.reads.append(frozenset(graph.values[i].slot for i in values if graph.values[i].op == "load"))
            for p in bits(self.needs[k]):
                self.users[p] |= 1 << k
            self.before.append(self.needs[k] | union(self.before[p] for p in bits(self.needs[k])))
        self._us: dict[Mask, float | None] = {}

    def __len__(self) -> int:
        return len(self.roots)

    def _home(self, mask: Mask) -> dict[int, int]:
        return {i: int(not mask >> n & 1) for i, n in self.reduction.items()}

    def names(self, mask: Mask) -> Roots:
        """The roots of a set of vertices."""
        return tuple(r for k in bits(mask) for r in self.roots[k])

    def convex(self, mask: Mask) -> bool:
        """True if no vertex outside the set is on a path between two of the set, which would make a cycle."""
        above = union(self.before[k] for k in bits(mask))
        return not any(self.before[k] & mask for k in bits(above & ~mask))

    def us(self, mask: Mask) -> float | None:
        """Microseconds of the group, with its launch; None if no kernel can run it."""
        if mask not in self._us:
            self._us[mask] = self._evaluate(mask) if self.convex(mask) else None
        return self._us[mask]

    def _evaluate(self, mask: Mask) -> float | None:
        home, roots = self._home(mask), self.names(mask)
        if not legal(sketch(self.graph, roots, home, 0), self.side):
            return None
        values = cone(self.graph, roots, home, 0)
        taken = [i for i in values if home.get(i, 0)]
        left = [i for i, n in self.reduction.items() if mask >> n & 1 and self.users[n] & ~mask]
        outputs = [r.number for r in roots if r.kind == "o"]
        cost = self.costs.group([i for i in values if not home.get(i, 0)], taken, left, outputs)
        kinds = {self.graph.values[i].over for i, n in self.reduction.items() if mask >> n & 1}
        finish = self.figures.next_us if len(kinds) > 1 else 0.0  # partial results need a finish kernel
        return cost.us(self.figures) + self.figures.next_us + finish

    def price(self, mask: Mask) -> float:
        """:meth:`us`, or a high cost if no kernel can run the group."""
        found = self.us(mask)
        return 1e6 if found is None else found

    def gain(self, mask: Mask) -> float:
        """The delta-evaluator's f of a group against its single vertices; minus infinity if the group is illegal."""
        found = self.us(mask)
        return float("-inf") if found is None else sum(self.price(1 << k) for k in bits(mask)) - found

    @cached_property
    def producers(self) -> list[tuple[Mask, Mask]]:
        """(the producer's own vertex or 0, its consumers), consumers before their producers; large inputs last."""
        order = sorted(range(len(self)), key=lambda k: -bin(self.before[k]).count("1"))
        found = [(1 << k, self.users[k]) for k in order]
        for slot in range(len(self.graph.inputs)):
            readers = sum(1 << k for k in range(len(self)) if slot in self.reads[k])
            if readers & (readers - 1) and self.graph.input_numel(slot) * 4 >= _LARGE:
                found.append((0, readers))
        return found


def candidates(v: Vertices) -> list[tuple[Mask, list[Mask]]]:
    """For each producer its candidate groups of two vertices or more, the best first, at most :data:`TOP`."""
    best: dict[int, list[Mask]] = {}
    out: list[tuple[Mask, list[Mask]]] = []
    for own, consumers in v.producers:
        # A producer's choices for a consumer: the consumer's candidates, the consumer alone, or nothing.
        seen = [list(dict.fromkeys([*best.get(c, []), 1 << c, 0])) for c in bits(consumers)]
        found = _reduced(v, own, seen)
        if own:
            best[own.bit_length() - 1] = found
        out.append((own, [m for m in found if m & (m - 1)]))
    return out


def _reduced(v: Vertices, own: Mask, consumers: Sequence[list[Mask]]) -> list[Mask]:
    """PatternReduction: join consumers' candidates two consumers at a time, and keep the best after each step."""
    kept: list[Mask] = [own]
    for at in range(0, len(consumers), 2):
        pair = consumers[at : at + 2]
        joined = {base | a | b for base in kept for a, b in itertools.product(pair[0], pair[1] if pair[1:] else [0])}
        joined.add(own | union(options[0] for options in consumers[: at + 2]))
        ranked = sorted((m for m in joined if m), key=lambda m: (-v.gain(m), m))
        kept = [m for m in ranked if v.gain(m) > float("-inf")][:TOP]
        if own not in kept:
            kept.append(own)
    return [m for m in kept if m]
