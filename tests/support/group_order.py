"""Check that groups of nodes can run one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def can_be_ordered(needs: Mapping[object, set[object]]) -> bool:
    """Return True if some order of the keys has each after all that it needs."""
    done: set[object] = set()
    while ready := {me for me, them in needs.items() if me not in done and them <= done}:
        done |= ready
    return len(done) == len(needs)


def acyclic(order: Sequence[int], before: Mapping[int, Sequence[int]], groups: Sequence[Sequence[int]]) -> bool:
    """Return True if the nodes of ``order``, each after those ``before`` it, can run with each group as one."""
    owner: dict[int, object] = {i: ("group", k) for k, group in enumerate(groups) for i in group}
    needs: dict[object, set[object]] = {}
    for i in order:
        me = owner.get(i, i)
        needs.setdefault(me, set()).update(x for p in before[i] if (x := owner.get(p, p)) != me)
    return can_be_ordered(needs)
