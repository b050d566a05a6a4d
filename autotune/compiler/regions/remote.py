"""Remote fusion: independent regions are joined into one, so that their kernels may share a launch.

It joins small regions between the same library calls, such as the masks and scales before a layer. It joins any number
of equal computations on different tensors, such as an optimizer's updates. It also joins regions that read the same
tensor, which one kernel may then read once. FusionStitching (arXiv 2009.10924, section 4) does this by a virtual
producer of all vertices. The region's plan decides which of its parts share a launch
(``autotune.compiler.planner.groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.compiler.planner.groups import MOST_POINTERS, SMALL_BYTES
from autotune.compiler.regions.grouping import Flow, N
from autotune.ir.canonical import Family, family_of
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.workload import Workload

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
