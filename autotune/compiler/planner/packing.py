"""Packing: groups of a plan side by side in one launch.

A launch costs one to three microseconds whatever it does, and its last blocks leave the device half empty. Groups that
do not wait for each other may share one: each gets blocks of its own in proportion to its work. Groups of one family
(the updates of an optimizer, one for each tensor) share the code of one body too; see
``autotune.compiler.targets.cuda.pack``.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.compiler.planner.groups import Group, Plan, Shape
from autotune.compiler.schedules.configurations import one_block
from autotune.compiler.schedules.cuda import scheme_of
from autotune.ir.forms.families import Family, family_of
from autotune.ir.graph import Graph

MOST_POINTERS = 500
"""Tensors of one launch: a kernel's parameters take at most 4 KiB, 8 bytes each, on every driver."""
MOST_BODIES = 8
"""Different bodies of one launch: it takes the registers of the largest, and the shared memory of all."""
SMALL_BYTES = 4 << 20
"""Bytes that a group moves in about the time of a launch. Larger ones share a launch with their like only: a block size
and register count that suit all of them would cost more than the launch."""


def packable(group: Group) -> bool:
    """Whether a group may share a launch at all."""
    return scheme_of(group.graph).packs


def pack(plan: Plan) -> Shape:
    """Join launches that do not wait for each other, as many as is legal and worth it.

    Launches come out in the order in which they can run. A plan of one launch comes back unchanged, and so does one
    that is packed already.

    Args:
        plan: for CUDA.
    """
    shape = tuple(tuple(plan.groups[k].roots for k in launch) for launch in plan.launches)
    if len(shape) < 2:
        return shape
    level = _levels(plan)
    families = [family_of(g.graph) for g in plan.groups]
    joined: list[list[int]] = []
    for n in sorted(range(len(shape)), key=lambda n: level[n]):
        for bin_ in joined:
            if level[bin_[0]] == level[n] and _may_share(plan, families, [*bin_, n]):
                bin_.append(n)
                break
        else:
            joined.append([n])
    return tuple(tuple(group for n in launches for group in shape[n]) for launches in joined)


def unpack(shape: Shape) -> Shape:
    """The inverse of :func:`pack`: every group gets a launch of its own."""
    return tuple((group,) for launch in shape for group in launch)


def _levels(plan: Plan) -> list[int]:
    """For each launch how many launches must run before it, one after the other."""
    made = {s: n for n, launch in enumerate(plan.launches) for k in launch for s in plan.groups[k].outputs}
    level: list[int] = []
    for n, launch in enumerate(plan.launches):
        waits = {made[s] for k in launch for s in plan.groups[k].inputs if s[0] != "input"} - {n}
        level.append(max((level[w] + 1 for w in waits), default=0))
    return level


def _may_share(plan: Plan, families: Sequence[Family], launches: Sequence[int]) -> bool:
    numbers = [k for n in launches for k in plan.launches[n]]
    groups = [plan.groups[k] for k in numbers]
    if sum(len(g.inputs) + len(g.outputs) for g in groups) > MOST_POINTERS or not all(map(packable, groups)):
        return False
    bodies: list[int] = []
    for k in numbers:
        if not any(families[k].has(families[b]) for b in bodies):
            bodies.append(k)
    if len(bodies) == 1:
        return True
    if len(bodies) > MOST_BODIES or any(g.graph.bytes_moved > SMALL_BYTES for g in groups):
        return False
    return _agree([plan.groups[k].graph for k in bodies])


def _agree(graphs: Sequence[Graph]) -> bool:
    """Whether there is a block size that suits the groups' default schedules."""
    schemes = [scheme_of(g) for g in graphs]
    parts = one_block(graphs, [s.default(g) for s, g in zip(schemes, graphs, strict=True)])
    return all(s.reject(g, c) is None for s, g, c in zip(schemes, graphs, parts, strict=True))
