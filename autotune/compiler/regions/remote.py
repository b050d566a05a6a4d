"""Remote fusion: regions that have nothing to do with each other become one, so that their kernels may share a launch.

Small regions at the same place of a program, such as the masks and scales before a layer; any number of equal
computations on different tensors, such as an optimizer's updates; and regions that read the same tensor, which one
kernel may then read once. FusionStitching (arXiv 2009.10924, section 4) does it by a virtual producer of all vertices.
Which of a region's parts then do share a launch is for its plan (``autotune.compiler.planner.groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.compiler.planner.groups import MOST_POINTERS, SMALL_BYTES
from autotune.compiler.regions.grouping import Flow, N
from autotune.ir.forms.canonical import Family, family_of
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.workload import Workload

MOST_PARTS = 64
"""Regions in one: beyond it a region's plans, its compilation and its host code grow and nothing is won."""

WORTH_SHARING = 4
"""Regions that read a tensor both are worth joining if it is at least a quarter of what one of them moves."""


@dataclass(frozen=True)
class Candidate:
    """A region that others may join.

    Attributes:
        place: regions of different places never meet: device, and how many library calls come before. What lies far
            apart in a program would only keep its inputs alive for longer.
        pointers: tensors it reads and writes.
        reads: bytes of each tensor it reads.
        moved: bytes it moves in all.
        family: of a pointwise region, which may be of any size beside its like; None for others.
    """

    place: tuple[object, ...]
    pointers: int
    reads: Mapping[Any, int]
    moved: int
    family: Family | None

    def shares_with(self, other: Candidate) -> bool:
        """True if what both read is much of what one of them moves."""
        common = sum(n for tensor, n in self.reads.items() if tensor in other.reads)
        return common * WORTH_SHARING >= min(self.moved, other.moved)


def candidate(workload: Workload, place: tuple[object, ...], reads: Mapping[Any, int]) -> Candidate:
    """What remote fusion needs to know of a region at ``place``, which reads tensors of so many bytes."""
    graph = Graph.from_json(workload.spec)
    pointers = len(graph.inputs) + len(graph.outputs)
    pointwise = not any(graph.values[i].op in REDUCTIONS for i in graph.live)
    return Candidate(place, pointers, reads, graph.bytes_moved, family_of(graph) if pointwise else None)


def may_join(found: Sequence[Candidate | None], other: Candidate | None) -> bool:
    """Whether a region may join others in one, cycles apart. None stands for a region that was not translated."""
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
    """Put groups that no path connects side by side.

    Each group, in order, joins the first bundle that it may join such that contracting the bundles leaves no cycle.

    Args:
        groups: disjoint; contracting them makes no cycle.
        joins: whether a bundle (numbers of groups) may take in another group, cycles apart. Asked often.

    Returns:
        The bundles, of one group most of them, by their first group.
    """
    item: dict[N, int] = {n: k for k, nodes in enumerate(groups) for n in nodes}
    for n in flow.order:  # a node outside of groups is an item of its own
        item.setdefault(n, len(groups) + len(item))
    after: dict[int, set[int]] = {}
    for n in flow.order:
        for p in flow.before[n]:
            if item[p] != item[n]:
                after.setdefault(item[p], set()).add(item[n])
    bundles: dict[int, list[int]] = {}
    bundle_of: dict[int, list[int]] = {}

    def reach(start: Sequence[int], goal: Sequence[int]) -> bool:
        """True if some item of ``goal`` waits for one of ``start``, through other bundles too."""
        stack, seen = list(start), set(start)
        while stack:
            for s in after.get(stack.pop(), ()):
                for m in bundle_of.get(s, (s,)):  # a reader of one of a bundle waits for all of it
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
