"""Grouping nodes of a graph so that contracting every group leaves no cycle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def merge_groups(
    order: Sequence[N],
    before: Mapping[N, Sequence[N]],
    members: set[N],
    late: Mapping[N, int] | None = None,
    stored: Mapping[N, AbstractSet[N]] | None = None,
) -> list[list[N]]:
    """Connected sets of ``members``, as large as can be without a cycle.

    Args:
        order: all nodes, topologically.
        before: what each node reads.
        members: the nodes that may be grouped; every other node stays by itself.
        late: the level at which a node should run, where that is above its own (``autotune.compiler.regions.delay``).
        stored: for some members what they read from memory only: these are never of their groups.

    Returns:
        The groups, each in ``order``, by their first node. Deterministic.
    """
    group = _by_level(order, before, members, late or {}, stored or {})
    return _merge_neighbours(order, before, members, group, stored or {})


def levels(
    order: Sequence[N],
    before: Mapping[N, Sequence[N]],
    members: set[N],
    late: Mapping[N, int] | None = None,
    stored: Mapping[N, AbstractSet[N]] | None = None,
) -> dict[N, int]:
    """For each node the most nodes other than ``members`` that lie on a way to it, or its level in ``late``.

    What a node reads from memory only, by ``stored``, counts as well.
    """
    least, apart = late or {}, stored or {}
    level: dict[N, int] = {}
    for n in order:
        level[n] = max([least.get(n, 0), *(level[p] + (p not in members or p in apart.get(n, ())) for p in before[n])])
    return level


def bundle_groups(
    order: Sequence[N],
    before: Mapping[N, Sequence[N]],
    groups: Sequence[Sequence[N]],
    joins: Callable[[Sequence[int], int], bool],
) -> list[list[int]]:
    """Put groups that no path connects side by side: the virtual producer of remote fusion (FusionStitching, 4).

    Each group, in order, joins the first bundle that it may join such that contracting the bundles leaves no cycle.

    Args:
        order, before: as for :func:`merge_groups`.
        groups: disjoint; contracting them makes no cycle.
        joins: whether a bundle (numbers of groups) may take in another group, cycles apart. Asked often.

    Returns:
        The bundles, of one group most of them, by their first group.
    """
    item: dict[N, int] = {n: k for k, nodes in enumerate(groups) for n in nodes}
    for n in order:  # what is in no group is an item of its own
        item.setdefault(n, len(groups) + len(item))
    after: dict[int, set[int]] = {}
    for n in order:
        for p in before[n]:
            if item[p] != item[n]:
                after.setdefault(item[p], set()).add(item[n])
    bundles: dict[int, list[int]] = {}
    bundle_of: dict[int, list[int]] = {}

    def reach(start: Sequence[int], goal: Sequence[int]) -> bool:
        """Whether some item of ``goal`` waits for one of ``start``, through other bundles too."""
        stack, seen = list(start), set(start)
        while stack:
            for s in after.get(stack.pop(), ()):
                for m in bundle_of.get(s, (s,)):  # what waits for one of a bundle waits for all of it
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


def _by_level(
    order: Sequence[N],
    before: Mapping[N, Sequence[N]],
    members: set[N],
    late: Mapping[N, int],
    stored: Mapping[N, AbstractSet[N]],
) -> dict[N, N]:
    """Union nodes that touch and are of one level; the representative of each node."""
    level = levels(order, before, members, late, stored)
    parent: dict[N, N] = {n: n for n in order}

    def find(n: N) -> N:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for n in order:
        if n in members:
            for p in before[n]:
                if p in members and level[p] == level[n]:
                    parent[find(n)] = find(p)
    return {n: find(n) for n in order}


def _merge_neighbours(
    order: Sequence[N],
    before: Mapping[N, Sequence[N]],
    members: set[N],
    group: dict[N, N],
    stored: Mapping[N, AbstractSet[N]],
) -> list[list[N]]:
    content: dict[N, list[N]] = {}
    for n in order:
        content.setdefault(group[n], []).append(n)
    after: dict[N, dict[N, None]] = {g: {} for g in content}
    for n in order:
        for p in before[n]:
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
        """Whether a path of two steps or more leads from ``a`` to ``b``."""
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
        """Whether group ``s`` reads from memory only what group ``g`` makes."""
        return any(now(group[p]) == g for n in content[s] for p in stored.get(n, ()))

    mergeable = {group[n] for n in order if n in members}
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
    place = {n: k for k, n in enumerate(order)}
    groups = [sorted(content[g], key=place.__getitem__) for g in content if g in mergeable and now(g) == g]
    return sorted(groups, key=lambda nodes: place[nodes[0]])
