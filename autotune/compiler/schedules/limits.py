"""What a stored configuration may hold: every value's type and range, whoever wrote the database.

The search space (``search_spaces/fusion.toml``) says what is tried, and bounds what adapting and joining groups may
make of it. Beyond the bounds nothing is emitted or launched: 2**31 rows a block crash a process, and 2**63 - 1 columns
a tile wrap around.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from autotune.compiler.targets.cpu import schedule as cpu
from autotune.space import load_space

Range = tuple[int, int] | tuple[str, ...] | None
"""Smallest and largest number, or the words there are; None for a truth value."""

EARLIER: Mapping[str, Mapping[str, Range]] = {"cuda": {"finish": ("kernel",)}, "cpu": cpu.EARLIER}
"""For each side, parameters that only configurations of earlier versions have."""


@cache
def ranges(side: str) -> dict[str, Range]:
    """What each parameter of a stored configuration may be on "cuda" or "cpu"; from ``search_spaces/fusion.toml``."""
    found: dict[str, Range] = dict(EARLIER[side])
    for p in load_space("fusion", side):
        if isinstance(p.choices[0], bool):
            found[p.name] = None
        elif isinstance(p.choices[0], str):
            found[p.name] = tuple(str(c) for c in p.choices)
        else:
            least, most = p.bounds
            found[p.name] = (least, most)
    return found


_PLAN = "plan"
_LONGEST_PLAN = 1 << 20
_BLOCK = 1024
"""Threads that a block may have."""
_BARRIERS = "grid barriers, which this autotune lacks"


def improper(config: Mapping[str, object], side: str) -> str:
    """Why a configuration cannot be one of ours; "" where it can.

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
        if not _within(value, limits[bare]):
            return f"{name} = {_shown(value)} is out of range"
    if side == "cuda":
        for name, value in config.items():
            if name.endswith("threads_per_row"):
                rows = config.get(name.removesuffix("threads_per_row") + "rows_per_block", 1)
                if int(str(value)) * int(str(rows)) > _BLOCK:
                    return f"blocks of {value} x {rows} threads"
    return ""


def _within(value: object, limits: Range) -> bool:
    if limits is None:
        return type(value) is bool
    if isinstance(limits[0], str):
        return type(value) is str and value in limits
    return type(value) is int and int(limits[0]) <= value <= int(limits[1])


def _shown(value: object) -> str:
    return str(value) if type(value) is int and abs(value) < 1 << 64 else repr(value)[:40]
