"""Which nodes run later than they could, so that what they make need not be stored.

A gradient that collects a contribution from each step of a recurrence is, node by node, a tensor of zeros but for one
slice, added to the sum so far. Run as early as possible, each step's kernel reads and writes the whole sum. Run when
the last contribution is there, all of it is one kernel that reads every contribution once. The same holds for a cast of
a matrix product's result that is used after another product: the cast is free where it is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def delays(
    order: Sequence[N],
    before: Mapping[N, Sequence[N]],
    level: Mapping[N, int],
    movable: set[N],
    size: Mapping[N, int],
    stored: Mapping[N, AbstractSet[N]] | None = None,
) -> dict[N, int]:
    """The nodes that should wait, and for which level.

    Args:
        order: all nodes, topologically.
        before: what each node reads.
        level: how many opaque nodes must run before each node; a node that waits stays below none of its readers.
        movable: nodes that may wait: their results need not be there before their readers run.
        size: bytes of each node's result.
        stored: what a node reads from memory only: it runs after these, not with them.

    Returns:
        A level above its own for each node whose inputs are together no larger than its result, counting for an input
        that waits as well what that one reads.
    """
    apart = stored or {}
    users: dict[N, list[N]] = {n: [] for n in order}
    for n in order:
        for p in before[n]:
            users[p].append(n)
    inputs: dict[N, int] = {}  # bytes read where a node is computed from what is stored
    for n in order:
        inputs[n] = sum(min(size[p], inputs[p]) if p in movable else size[p] for p in before[n])
    found: dict[N, int] = {}
    for n in reversed(order):
        if n in movable and users[n] and before[n] and inputs[n] <= size[n]:
            wanted = min(found.get(u, level[u]) - (n in apart.get(u, ())) for u in users[n])
            if wanted > level[n]:
                found[n] = wanted
    return found
