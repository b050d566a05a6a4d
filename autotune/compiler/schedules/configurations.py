"""Configurations of a region's plan: useful choices for its parameters, and the permitted values of a stored one.

A region of one group uses the names of ``search_spaces/fusion.toml``. With several groups each has its own copy,
``g0.threads_per_row`` and so on; parameters of the machine (``threads``) also have a copy per group. Groups that differ
in the number of rows only share one copy, that of their leader (``Plan.leaders``): an optimizer step over 37 tensors
has the parameters of one kernel.

The search space (``search_spaces/fusion.toml``) lists the choices to try, and bounds the results of adapting and
joining groups. A stored configuration must have these types and ranges, whatever the source of the database. Values
outside them are never emitted or launched: 2**31 rows a block crash a process, and 2**63 - 1 columns a tile wrap
around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, Protocol

from autotune.compiler.program.passes import find_online
from autotune.compiler.program.program import Program
from autotune.compiler.targets.cpu import schedule as cpu
from autotune.ir.graph import Graph
from autotune.space import Range, Space, load_space, within
from autotune.task import Choice, Config


class Choices(Protocol):
    """The schedules of groups: a CUDA scheme, or the module ``autotune.compiler.schedules.cpu``."""

    def space_of(self, graph: Graph, space: Space) -> Space:
        """``space`` restricted to choices with an effect for the group."""
        ...

    def default(self, graph: Graph) -> Config:
        """A schedule from rules of thumb."""
        ...

    def seeds(self, graph: Graph) -> list[Config]:
        """Variations of the default in the parameters that usually matter most."""
        ...

    def normalize(self, graph: Graph, config: Config) -> Config:
        """The equivalent configuration in normal form, with a fixed value for each parameter without effect."""
        ...

    def reject(self, graph: Graph, config: Config) -> str | None:
        """The reason why ``config`` cannot work, found in milliseconds, or None."""
        ...


PLAIN_CUDA: Config = {
    "threads_per_row": 1,
    "rows_per_block": 1,
    "vector_bytes": 4,
    "keep": "registers",
    "online": False,
    "unroll": 1,
    "max_registers": 0,
    "load_hint": "default",
    "store_hint": "default",
    "blocks_per_sm": 0,
    "cluster": 1,
    "prefetch": False,
}
"""Every CUDA parameter at its neutral value, from which the schemes' defaults start."""
EARLIER: Mapping[str, Mapping[str, Range]] = {"cuda": {"finish": ("kernel",)}, "cpu": cpu.EARLIER}
"""For each side, parameters that only configurations of earlier versions have: all that they may be happens anyway."""
REMOVED: Mapping[str, Range] = {"by_row": None}
"""Parameters of earlier CUDA configurations whose kernels this version no longer makes (``Superseded``)."""
_PLAN = "plan"
_LONGEST_PLAN = 1 << 20
_BLOCK = 1024
"""Most threads of a block."""
_BARRIERS = "grid barriers, which this autotune lacks"


def split_config(config: Mapping[str, Choice], leaders: Sequence[int]) -> list[Config]:
    """The parts of a region's configuration for its groups, under plain names; the inverse of :func:`join_configs`.

    Groups with one leader (``Plan.leaders``) have one part, the same object. If the configuration has none for the
    leader, a group's own part counts.
    """
    if len(leaders) == 1:
        return [{k: v for k, v in config.items() if k != _PLAN and k not in EARLIER["cuda"]}]
    parts: dict[str, Config] = {}
    for name, value in config.items():
        group, dot, own = name.partition(".")
        if dot and own not in EARLIER["cuda"]:
            parts.setdefault(group, {})[own] = value
    return [parts.get(f"g{leader}") or parts.get(f"g{k}", {}) for k, leader in enumerate(leaders)]


def join_configs(parts: Sequence[Mapping[str, Choice]], leaders: Sequence[int] | None = None) -> Config:
    """The region's configuration from those of its groups; with ``Plan.leaders``, from those of the leaders alone."""
    if len(parts) == 1:
        return dict(parts[0])
    kept = range(len(parts)) if leaders is None else sorted(set(leaders))
    return {f"g{k}.{name}": value for k in kept for name, value in parts[k].items()}


def join_spaces(spaces: Sequence[Space], leaders: Sequence[int] | None = None) -> Space:
    """The region's space from those of its groups, or from those of its leaders alone."""
    if len(spaces) == 1:
        return spaces[0]
    kept = range(len(spaces)) if leaders is None else sorted(set(leaders))
    parameters = tuple(replace(p, name=f"g{k}.{p.name}") for k in kept for p in spaces[k].parameters)
    return replace(spaces[0], parameters=parameters)


def one_block(graphs: Sequence[Graph], parts: Sequence[Config]) -> list[Config]:
    """Configurations of groups that share a launch, with one block size: the largest among groups with reductions.

    If threads share a row, their number stays the same if it divides the block, else it becomes the next smaller
    divisor. There are no clusters, which would apply to the whole launch. Groups with one configuration object get one
    object.
    """
    whole = [g.pointwise for g in graphs]
    sizes = [int(c["threads_per_row"]) * int(c["rows_per_block"]) for c in parts]
    block = max((n for n, w in zip(sizes, whole, strict=True) if not w), default=sizes[0])
    made: dict[tuple[int, bool], Config] = {}
    for c, w in zip(parts, whole, strict=True):
        if (id(c), w) not in made:
            made[id(c), w] = _with_block(c, block, w)
    return [made[id(c), w] for c, w in zip(parts, whole, strict=True)]


def has_online(program: Program) -> bool:
    return bool(find_online(program.graph))


def narrow(space: Space, **allowed: Iterable[Choice]) -> Space:
    """``space.restrict`` for each parameter; the user's restriction wins if it has none of the ``allowed`` choices."""
    for name, choices in allowed.items():
        legal = list(choices)
        if any(c in legal for c in space[name].choices):
            space = space.restrict(name, legal)
    return space


def most_kept(program: Program, words: Callable[[int], float]) -> float:
    """The most 32-bit words of kept values between two passes; value ``i`` needs ``words(i)``.

    A pass reads and writes kept values pack by pack, so a value that it reads for the last time makes room for one that
    it writes.
    """
    last = {i: q for q, pas in enumerate(program.passes) for i in pas.kept_in}
    live: set[int] = set()
    most = 0.0
    for q, pas in enumerate(program.passes):
        live = {i for i in live | set(pas.kept_out) if last.get(i, q) > q}
        most = max(most, sum(map(words, live), 0.0))
    return most


def having(space: Space, schedule: type[Any]) -> Space:
    """The space with only the parameters that are fields of a scheme's schedule."""
    names = {f.name for f in fields(schedule)}
    return replace(space, parameters=tuple(p for p in space if p.name in names))


@cache
def ranges(side: str) -> dict[str, Range]:
    """The values of each parameter of a stored configuration on "cuda" or "cpu"; from ``search_spaces/fusion.toml``."""
    removed = REMOVED if side == "cuda" else {}
    return {**EARLIER[side], **removed, **{p.name: p.range for p in load_space("fusion", side)}}


def improper(config: Mapping[str, object], side: str) -> str:
    """The reason why a stored configuration is invalid; "" if it is valid.

    Args:
        side: "cuda" or "cpu".
    """
    limits = ranges(side)
    for name, value in config.items():
        if name == _PLAN:
            if not isinstance(value, str) or len(value) > _LONGEST_PLAN:
                return "its plan is no text"
            if side == "cuda" and ">" in value:
                return f"its plan has {_BARRIERS}"
            continue
        of_group = re.fullmatch(r"g(0|[1-9]\d{0,5})\.(\w+)", name)
        bare = of_group[2] if of_group else name
        if bare not in limits:
            return f"it has a parameter {name[:40]!r}, which this autotune lacks"
        if bare == "finish" and value == "barrier":
            return f"{name} asks for {_BARRIERS}"
        if not within(value, limits[bare]):
            shown = str(value) if type(value) is int and abs(value) < 1 << 64 else repr(value)[:40]
            return f"{name} = {shown} is out of range"
    if side == "cuda":
        for name, value in config.items():
            if name.endswith("threads_per_row"):
                rows = config.get(name.removesuffix("threads_per_row") + "rows_per_block", 1)
                if int(str(value)) * int(str(rows)) > _BLOCK:
                    return f"blocks of {value} x {rows} threads"
    return ""


def _with_block(config: Config, block: int, whole: bool) -> Config:
    alone: Config = {"cluster": 1} if "cluster" in config else {}
    if whole:
        return config | alone | {"threads_per_row": block, "rows_per_block": 1}
    most = min(int(config["threads_per_row"]), block)
    even = most & (most - 1) == 0
    fits = [t for t in range(1, most + 1) if block % t == 0 and (t & (t - 1) == 0 or (t % 32 == 0 and not even))]
    return config | alone | {"threads_per_row": fits[-1], "rows_per_block": block // fits[-1]}
