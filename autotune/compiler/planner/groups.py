"""What a plan is: groups of a region's operators, how they are launched, and the text that says so.

A plan is written as text, which is what a configuration stores (``config["plan"]``) and all that deployment needs::

    r3,o0 / r5,o1 + v7,o3

``/`` separates launches, ``+`` groups packed side by side in one launch. A group is the list of its *roots*: reductions
(``r`` and the value's number), region outputs (``o`` and the output's number), and values that other groups read from
memory instead of computing them again (``v``). Everything else a group needs it computes for itself. Results that
another group reads travel through scratch tensors. An output that is written ``b`` instead of ``o`` is read back: other
groups take its value as it was stored, rounded to its type, as eager mode's next operator does. They read the output
itself where neighbours along its last axis are neighbours in memory, else a copy in scratch where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from autotune.ir.forms.families import family_of
from autotune.ir.graph import Graph

Source = tuple[str, int]
"""A tensor of a region: ("input" | "output" | "scratch", number)."""
RootKind = Literal["r", "o", "v", "b"]
"""A reduction, an output, a value that is kept in memory, an output that is read back."""


class Root(NamedTuple):
    """What a group computes and leaves for others.

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
"""Launches of groups, each group its roots."""


@dataclass(frozen=True)
class Group:
    """The operators of one body of a kernel.

    ``inputs`` says for each slot of ``graph`` where it comes from: ("input", slot of the region), ("scratch", number)
    or ("output", number), which another group has written. ``outputs`` says likewise "output" or "scratch". ``roots``
    are numbered as in the region's graph, ``graph``
    is canonical.
    """

    graph: Graph
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]
    roots: Roots = ()


@dataclass(frozen=True)
class Plan:
    """Groups in order, and how they are launched.

    Attributes:
        groups: every group, each after those whose scratch it reads.
        scratch: (storage type, axes) of each global intermediate, dense in that axis order.
        launches: for each launch the numbers of its groups.
        text: the plan as stored.
    """

    groups: tuple[Group, ...]
    scratch: tuple[tuple[str, tuple[int, ...]], ...]
    launches: tuple[tuple[int, ...], ...]
    text: str

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """For each group the one whose parameters it takes: the largest of those that one kernel can run."""
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


def read_text(text: str) -> Shape:
    """The launches and groups of a plan's text.

    Raises:
        ValueError: it is not of the form.
    """
    out = []
    for launch in text.split("/"):
        groups = []
        for group in launch.split("+"):
            groups.append(tuple(Root.parse(r.strip()) for r in group.split(",")))
        out.append(tuple(groups))
    return tuple(out)


def write_text(shape: Shape) -> str:
    """The text of a plan; the inverse of :func:`read_text`."""
    return " / ".join(" + ".join(names(group) for group in launch) for launch in shape)


def names(roots: Iterable[Root]) -> str:
    """A group as a plan's text has it."""
    return ",".join(map(str, roots))


def groups_of(shape: Shape) -> list[Roots]:
    """The groups of all launches, in order."""
    return [group for launch in shape for group in launch]
