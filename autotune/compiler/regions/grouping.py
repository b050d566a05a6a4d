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

Remote fusion (:func:`bundle_groups`) joins independent regions into one, so that their kernels may share a launch:
small regions between the same library calls, such as the masks and scales before a layer; any number of equal
computations on different tensors, such as an optimizer's updates; regions that read the same tensor, which one kernel
may then read once. FusionStitching (arXiv 2009.10924, section 4) does this by a virtual producer of all vertices. The
region's plan decides which of its parts share a launch (``autotune.compiler.planner.groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import fx

from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.lower.op_names import PRODUCTS
from autotune.compiler.planner.groups import MOST_POINTERS, SMALL_BYTES
from autotune.ir.canonical import Family, family_of
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.simplify import Sets
from autotune.workload import Workload

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
        fact = facts[n]
        if not fact.is_pointwise or fact.is_float64 or fact.is_float8 or n in once:
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
        if len(work) <= MOST_REPEATED and sum(facts[p].bytes for p in reads) < fact.bytes:
            inner[n] = work, reads
            copied |= work if others else set()
    return copied


MOST_PARTS = 64
"""Most regions joined into one. Beyond it a region's plans, compilation and host code grow without a gain."""

WORTH_SHARING = 4
"""Inverse of the fraction of a region's bytes that two regions must both read to be joined: a quarter of one's."""


@dataclass(frozen=True)
class Candidate:
    """A region that others may join.

    Attributes:
        place: the device, and the number of library calls before the region. Regions with different places are never
            joined: distant regions of a program would only keep their inputs alive for longer.
        pointers: the number of tensors that the region reads and writes.
        reads: the bytes of each tensor that it reads.
        moved: the bytes that it moves in total.
        family: the family of a pointwise region, which joins regions of its family at any size; None for others.
    """

    place: tuple[object, ...]
    pointers: int
    reads: Mapping[Any, int]
    moved: int
    family: Family | None

    def shares_with(self, other: Candidate) -> bool:
        """True if the tensors that both read are at least a quarter of one region's bytes."""
        common = sum(n for tensor, n in self.reads.items() if tensor in other.reads)
        return common * WORTH_SHARING >= min(self.moved, other.moved)


def candidate(workload: Workload, place: tuple[object, ...], reads: Mapping[Any, int]) -> Candidate:
    """The candidate for a region at ``place``; ``reads`` has the bytes of each tensor that the region reads."""
    graph = Graph.from_json(workload.spec)
    pointers = len(graph.inputs) + len(graph.outputs)
    pointwise = not any(graph.values[i].op in REDUCTIONS for i in graph.live)
    return Candidate(place, pointers, reads, graph.bytes_moved, family_of(graph) if pointwise else None)


def may_join(found: Sequence[Candidate | None], other: Candidate | None) -> bool:
    """True if a region may join others, without regard to cycles; None is a region that was not translated."""
    members = [m for m in found if m is not None]
    if other is None or len(members) < len(found):
        return False
    if any(m.place != other.place for m in members) or len(members) >= MOST_PARTS:
        return False
    if sum(m.pointers for m in members) + other.pointers > MOST_POINTERS:
        return False
    small = all(m.moved <= SMALL_BYTES for m in (*members, other))  # a launch costs about as much as their work
    if small or any(other.shares_with(m) for m in members):
        return True
    return other.family is not None and all(m.family and m.family.has(other.family) for m in members)


def bundle_groups(
    flow: Flow[N], groups: Sequence[Sequence[N]], joins: Callable[[Sequence[int], int], bool]
) -> list[list[int]]:
    """Bundle groups that no path connects.

    Each group, in order, joins the first bundle that accepts it, if contracting the bundles leaves no cycle.

    Args:
        groups: disjoint groups whose contraction makes no cycle.
        joins: returns True if a bundle (numbers of groups) accepts another group, without regard to cycles. It is
            called often.

    Returns:
        The bundles, ordered by their first group; most have one group.
    """
    item: dict[N, int] = {n: k for k, nodes in enumerate(groups) for n in nodes}
    for n in flow.order:  # each node outside the groups is an item
        item.setdefault(n, len(groups) + len(item))
    after: dict[int, set[int]] = {}
    for n in flow.order:
        for p in flow.before[n]:
            if item[p] != item[n]:
                after.setdefault(item[p], set()).add(item[n])
    bundles: dict[int, list[int]] = {}
    bundle_of: dict[int, list[int]] = {}

    def reach(start: Sequence[int], goal: Sequence[int]) -> bool:
        """True if an item of ``goal`` depends on one of ``start``, possibly through other bundles."""
        stack, seen = list(start), set(start)
        while stack:
            for s in after.get(stack.pop(), ()):
                for m in bundle_of.get(s, (s,)):  # a reader of one group depends on its whole bundle
                    if m not in seen:
                        seen.add(m)
                        stack.append(m)
        return not seen.isdisjoint(goal)

    for k in range(len(groups)):
        for members in bundles.values():
            if joins(members, k) and not reach(members, [k]) and not reach([k], members):
                members.append(k)
                bundle_of[k] = members
                break
        else:
            bundles[k] = bundle_of[k] = [k]
    return list(bundles.values())
