"""Plans: groups of a region's operators, their launches and packing, and the stored text.

A configuration stores a plan as text (``config["plan"]``), which is all that deployment needs::

    r3,o0 / r5,o1 + v7,o3

``/`` separates launches, ``+`` groups packed side by side in one launch. A group is the list of its *roots*: reductions
(``r`` and the value's number), region outputs (``o`` and the output's number), and values that other groups read from
memory instead of computing them again (``v``). A group computes all other values that it needs. Results that another
group reads are in scratch tensors.

An output with ``b`` instead of ``o`` is read back: other groups use its stored value, rounded to its type, like eager
mode's next operator. They read the output itself if it has unit stride along its last axis, else a copy in scratch that
has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from autotune.compiler.schedules.configurations import one_block, split_config
from autotune.compiler.schedules.cuda import scheme_of
from autotune.ir.canonical import Family, family_of
from autotune.ir.graph import Graph
from autotune.task import Choice, Config

MOST_POINTERS = 500
"""Most tensors of one launch: a kernel's parameters have at most 4 KiB, 8 bytes each, on every driver."""
MOST_BODIES = 8
"""Most different bodies of one launch, which needs the registers of the largest, and the shared memory of all."""
SMALL_BYTES = 4 << 20
"""Bytes that a group moves in about the time of a launch. Larger groups share a launch only with groups of their
family: a block size and register count for different groups would cost more than the launch."""

Source = tuple[str, int]
"""A tensor of a region: ("input" | "output" | "scratch", number)."""
RootKind = Literal["r", "o", "v", "b"]
"""The kinds: a reduction, an output, a value that is kept in memory, an output that is read back."""


class Root(NamedTuple):
    """A result that a group computes and stores.

    ``number`` counts the values of the region's graph for the kinds "r" and "v", and its outputs for "o" and "b".
    """

    kind: RootKind
    number: int

    @classmethod
    def parse(cls, text: str) -> Root:
        """The root that ``r3`` names. Raises ValueError for any other form."""
        kinds = {kind: kind for kind in get_args(RootKind)}
        if text[:1] not in kinds or not re.fullmatch(r"[0-9]+", text[1:]):
            raise ValueError(f"{text!r} is not a root such as r3 or o0")
        return cls(kinds[text[0]], int(text[1:]))

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"

    @property
    def is_output(self) -> bool:
        """True if ``index`` is an output's number."""
        return self.kind in ("o", "b")

    @property
    def in_memory(self) -> bool:
        """True if other groups read the root's value instead of computing it."""
        return self.kind != "o"

    def value(self, graph: Graph) -> int:
        """The number of the root's value."""
        return graph.outputs[self.number].value if self.is_output else self.number


Roots = tuple[Root, ...]
Shape = tuple[tuple[Roots, ...], ...]
"""Launches of groups, each group as its roots."""


@dataclass(frozen=True)
class Group:
    """The operators of one kernel body.

    Attributes:
        graph: the canonical graph.
        inputs: the source of each slot: ("input", slot of the region), ("scratch", number), or ("output", number) for
            an output that another group has written.
        outputs: the destination of each output: ("output", number) or ("scratch", number).
        roots: the roots, numbered as in the region's graph.
    """

    graph: Graph
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]
    roots: Roots = ()


@dataclass(frozen=True)
class Plan:
    """Groups in order, and their launches.

    Attributes:
        groups: every group, each after the groups whose scratch it reads.
        scratch: (storage type, axes) of each global intermediate, dense in that axis order.
        launches: for each launch the numbers of its groups.
    """

    groups: tuple[Group, ...]
    scratch: tuple[tuple[str, tuple[int, ...]], ...]
    launches: tuple[tuple[int, ...], ...]

    @cached_property
    def shape(self) -> Shape:
        """The roots of each launch's groups."""
        return tuple(tuple(self.groups[k].roots for k in launch) for launch in self.launches)

    @cached_property
    def text(self) -> str:
        """The plan as stored."""
        return write_text(self.shape)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """For each group, the group whose parameters it uses: the largest of those that one kernel can run."""
        families = [family_of(g.graph) for g in self.groups]
        order = sorted(range(len(self.groups)), key=lambda k: (-self.groups[k].graph.bytes_moved, k))
        found: list[int] = []
        for k in order:
            if not any(families[n].has(families[k]) for n in found):
                found.append(k)
        return tuple(next(n for n in found if families[n].has(f)) for f in families)

    def scratch_numel(self, graph: Graph) -> tuple[tuple[str, int], ...]:
        """(storage type, elements) of each scratch tensor for the region ``graph``."""
        return tuple((dtype, graph.size(axes)) for dtype, axes in self.scratch)


def group_configs(plan: Plan, config: Mapping[str, Choice]) -> list[Config]:
    """The configuration of each group of a plan, the same object for groups of one family."""
    return split_config(config, plan.leaders)


def agree(plan: Plan, parts: Sequence[Config]) -> list[Config]:
    """The configurations with one block size within each launch of several groups."""
    out = list(parts)
    for launch in plan.launches:
        if len(launch) > 1:
            agreed = one_block([plan.groups[k].graph for k in launch], [out[k] for k in launch])
            for k, config in zip(launch, agreed, strict=True):
                out[k] = config
    return out


def read_text(text: str) -> Shape:
    """The launches and groups of a plan's text. Raises ValueError for text of another form."""
    launches = (launch.split("+") for launch in text.split("/"))
    return tuple(tuple(tuple(Root.parse(r.strip()) for r in g.split(",")) for g in groups) for groups in launches)


def write_text(shape: Shape) -> str:
    """The text of a plan; the inverse of :func:`read_text`."""
    return " / ".join(" + ".join(names(group) for group in launch) for launch in shape)


def names(roots: Iterable[Root]) -> str:
    """The text of a group in a plan."""
    return ",".join(map(str, roots))


def groups_of(shape: Shape) -> list[Roots]:
    """The groups of all launches, in order."""
    return [group for launch in shape for group in launch]


def pack(plan: Plan) -> Shape:
    """Join launches that do not depend on each other, as far as that is legal and gains time.

    The launches of the result are in an order in which they can run. A plan with one launch, or with packed launches,
    does not change.

    Args:
        plan: a plan for CUDA.
    """
    shape = plan.shape
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


def _levels(plan: Plan) -> list[int]:
    """For each launch, the number of launches in the longest chain that must run before it."""
    made = {s: n for n, launch in enumerate(plan.launches) for k in launch for s in plan.groups[k].outputs}
    level: list[int] = []
    for n, launch in enumerate(plan.launches):
        waits = {made[s] for k in launch for s in plan.groups[k].inputs if s[0] != "input"} - {n}
        level.append(max((level[w] + 1 for w in waits), default=0))
    return level


def _may_share(plan: Plan, families: Sequence[Family], launches: Sequence[int]) -> bool:
    numbers = [k for n in launches for k in plan.launches[n]]
    groups = [plan.groups[k] for k in numbers]
    pointers = sum(len(g.inputs) + len(g.outputs) for g in groups)
    if pointers > MOST_POINTERS or not all(scheme_of(g.graph).packs for g in groups):
        return False
    bodies: list[int] = []
    for k in numbers:
        if not any(families[k].has(families[b]) for b in bodies):
            bodies.append(k)
    if len(bodies) == 1:
        return True
    if len(bodies) > MOST_BODIES or any(g.graph.bytes_moved > SMALL_BYTES for g in groups):
        return False
    # The groups' default schedules must have a common block size.
    graphs = [plan.groups[k].graph for k in bodies]
    schemes = [scheme_of(g) for g in graphs]
    parts = one_block(graphs, [s.default(g) for s, g in zip(schemes, graphs, strict=True)])
    return all(s.reject(g, c) is None for s, g, c in zip(schemes, graphs, parts, strict=True))
