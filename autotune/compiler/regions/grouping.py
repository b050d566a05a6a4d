"""Grouping of a graph's nodes, such that contracting every group leaves no cycle.

Nodes that could run earlier are delayed if that saves memory traffic. A gradient that collects a contribution from each
step of a recurrence is, node by node, a tensor of zeros with one nonzero slice, added to the sum so far. If it runs as
early as possible, each step's kernel reads and writes the whole sum. After the last contribution, one kernel computes
the sum and reads every contribution once. The same holds for a cast of a matrix product's result that is used after
another product: the cast is free in the kernel that uses it.

Other nodes are computed by every group that reads them, because they read fewer bytes than they make. A graph in half
precision casts a residual to fp32 once, and reads the cast before a matrix product and after it. A backward pass
recomputes a sigmoid from a tensor in half precision, and reads it in two places. Inductor repeats such work in every
kernel that reads it. A region with such a result would store twice the bytes, and keep them until the last reader has
run. (Casts to a narrower type need no rule: they are in the region of their argument.)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import fx

from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.lower.op_names import PRODUCTS
from autotune.ir.simplify import Sets

N = TypeVar("N", bound=Hashable)

MOST_REPEATED = 8
"""Most operators that a region repeats for one tensor. A random number's hash has twice as many and is stored."""


@dataclass(frozen=True)
class Flow(Generic[N]):
    """The nodes of a graph that compute, and their order.

    Attributes:
        order: all nodes, topologically.
        before: the nodes that each node reads.
        members: the nodes that may be grouped; every other node is separate.
        stored: for some members, the nodes that they read from memory only, which are never in their groups.
    """

    order: Sequence[N]
    before: Mapping[N, Sequence[N]]
    members: AbstractSet[N]
    stored: Mapping[N, AbstractSet[N]] = field(default_factory=dict)

    def levels(self, late: Mapping[N, int] | None = None) -> dict[N, int]:
        """For each node, the most non-members and reads from memory only on a path to it.

        Args:
            late: the level at which a node should run, for nodes with a later level than their own.
        """
        level: dict[N, int] = {}
        for n in self.order:
            apart = self.stored.get(n, ())
            least = late.get(n, 0) if late else 0
            level[n] = max([least, *(level[p] + (p not in self.members or p in apart) for p in self.before[n])])
        return level


def delays(flow: Flow[N], movable: AbstractSet[N], size: Mapping[N, int]) -> dict[N, int]:
    """The nodes to delay, and the level of each; a delayed node is never above one of its readers.

    Args:
        movable: nodes that may be delayed, because only their readers need their results.
        size: bytes of each node's result.

    Returns:
        A level above its own for each node whose inputs are together no larger than its result. A delayed input counts
        with the bytes that it reads.
    """
    level = flow.levels()
    users: dict[N, list[N]] = {n: [] for n in flow.order}
    inputs: dict[N, int] = {}  # bytes read where a node is computed from stored tensors
    for n in flow.order:
        for p in flow.before[n]:
            users[p].append(n)
        inputs[n] = sum(min(size[p], inputs[p]) if p in movable else size[p] for p in flow.before[n])
    found: dict[N, int] = {}
    for n in reversed(flow.order):
        if n in movable and users[n] and flow.before[n] and inputs[n] <= size[n]:
            wanted = min(found.get(u, level[u]) - (n in flow.stored.get(u, ())) for u in users[n])
            if wanted > level[n]:
                found[n] = wanted
    return found


def merge_groups(flow: Flow[N], late: Mapping[N, int] | None = None) -> list[list[N]]:
    """Connected sets of members, as large as possible without a cycle.

    Args:
        late: the ``late`` of :meth:`Flow.levels`.

    Returns:
        The groups, each in the flow's order, ordered by their first node. The result is deterministic.
    """
    group = _by_level(flow, flow.levels(late))
    content: dict[N, list[N]] = {}
    for n in flow.order:
        content.setdefault(group[n], []).append(n)
    after: dict[N, dict[N, None]] = {g: {} for g in content}
    for n in flow.order:
        for p in flow.before[n]:
            if group[p] != group[n]:
                after[group[p]][group[n]] = None
    alias: dict[N, N] = {g: g for g in content}

    def now(g: N) -> N:
        while alias[g] != g:
            g = alias[g]
        return g

    def successors(g: N) -> dict[N, None]:
        out = dict.fromkeys(now(s) for s in after[g])
        out.pop(g, None)
        return out

    def reaches_around(a: N, b: N) -> bool:
        """True if a path of two steps or more leads from ``a`` to ``b``."""
        stack = [s for s in successors(a) if s != b]
        seen = set(stack)
        while stack:
            for s in successors(stack.pop()):
                if s == b:
                    return True
                if s not in seen:
                    seen.add(s)
                    stack.append(s)
        return False

    def keeps_apart(g: N, s: N) -> bool:
        """True if group ``s`` must read a result of group ``g`` from memory."""
        return any(now(group[p]) == g for n in content[s] for p in flow.stored.get(n, ()))

    mergeable = {group[n] for n in flow.order if n in flow.members}
    changed = True
    while changed:
        changed = False
        for g in [g for g in content if g in mergeable]:
            if now(g) != g:
                continue
            for s in successors(g):
                if s in mergeable and not keeps_apart(g, s) and not reaches_around(g, s):
                    alias[s] = g
                    after[g].update(after.pop(s))
                    content[g].extend(content[s])
                    changed = True
                    break
    place = {n: k for k, n in enumerate(flow.order)}
    groups = [sorted(content[g], key=place.__getitem__) for g in content if g in mergeable and now(g) == g]
    return sorted(groups, key=lambda nodes: place[nodes[0]])


def _by_level(flow: Flow[N], level: Mapping[N, int]) -> dict[N, N]:
    """Union adjacent members of one level, and return the representative of each node."""
    sets: Sets[N] = Sets()
    for n in flow.order:
        if n in flow.members:
            for p in flow.before[n]:
                if p in flow.members and level[p] == level[n]:
                    sets.union(n, p)
    return {n: sets.find(n) for n in flow.order}


def copied_nodes(
    facts: GraphFacts,
    groups: Sequence[Sequence[fx.Node]],
    stored: Mapping[fx.Node, AbstractSet[fx.Node]],
    once: AbstractSet[fx.Node] = frozenset(),
) -> set[fx.Node]:
    """The pointwise nodes that each region which reads them recomputes; none of them is a region's result.

    Args:
        groups: the nodes of each region, in graph order.
        stored: the nodes that a node reads from memory only. A matrix product would recompute them per multiplication.
        once: the nodes that must not be recomputed.
    """
    home = {n: k for k, nodes in enumerate(groups) for n in nodes}
    copied: set[fx.Node] = set()
    inner: dict[fx.Node, tuple[set[fx.Node], set[fx.Node]]] = {}  # by a node worth repeating, its work and its inputs
    for n in home:
        mine = facts[n]
        if not mine.is_pointwise or mine.is_float64 or mine.is_float8 or n in once:
            continue
        others = {r for r in facts.readers(n) if home.get(r) != home[n]}
        multiplied = any(facts[r].operator in PRODUCTS and n in stored.get(r, ()) for r in others)
        if multiplied or not others <= home.keys():
            continue  # it is stored in any case
        work, reads = {n}, set[fx.Node]()
        for p in facts.producers(n):
            more, theirs = inner.get(p, (set(), {p})) if home.get(p) == home[n] else (set(), {p})
            work |= more
            reads |= theirs
        if len(work) <= MOST_REPEATED and sum(facts[p].bytes for p in reads) < mine.bytes:
            inner[n] = work, reads
            copied |= work if others else set()
    return copied
