"""Grouping nodes of a graph so that contracting every group leaves no cycle."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def merge_groups(order: Sequence[N], before: Mapping[N, Sequence[N]], members: set[N]) -> list[list[N]]:
    """Connected sets of ``members``, as large as can be without a cycle.

    Args:
        order: all nodes, topologically.
        before: what each node reads.
        members: the nodes that may be grouped; every other node stays by itself.

    Returns:
        The groups, each in ``order``, by their first node. Deterministic.
    """
    group = _by_level(order, before, members)
    return _merge_neighbours(order, before, members, group)


def _by_level(order: Sequence[N], before: Mapping[N, Sequence[N]], members: set[N]) -> dict[N, N]:
    """Union nodes that touch and have as many opaque nodes before them; the representative of each node."""
    level: dict[N, int] = {}
    parent: dict[N, N] = {n: n for n in order}

    def find(n: N) -> N:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for n in order:
        level[n] = max([level[p] + (p not in members) for p in before[n]], default=0)
        if n in members:
            for p in before[n]:
                if p in members and level[p] == level[n]:
                    parent[find(n)] = find(p)
    return {n: find(n) for n in order}


def _merge_neighbours(
    order: Sequence[N], before: Mapping[N, Sequence[N]], members: set[N], group: dict[N, N]
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

    mergeable = {group[n] for n in order if n in members}
    changed = True
    while changed:
        changed = False
        for g in [g for g in content if g in mergeable]:
            if now(g) != g:
                continue
            for s in successors(g):
                if s in mergeable and not reaches_around(g, s):
                    alias[s] = g
                    after[g].update(after.pop(s))
                    content[g].extend(content[s])
                    changed = True
                    break
    place = {n: k for k, n in enumerate(order)}
    groups = [sorted(content[g], key=place.__getitem__) for g in content if g in mergeable and now(g) == g]
    return sorted(groups, key=lambda nodes: place[nodes[0]])
