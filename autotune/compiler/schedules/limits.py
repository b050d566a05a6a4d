"""What a stored configuration may hold: every value's type and range, whoever wrote the database.

The search space (``search_spaces/fusion.toml``) says what is tried; a stored configuration may also hold what adapting
and joining groups made of it. Numbers are therefore bounded by what any kernel can mean, and beyond that nothing is
emitted or launched: 2**31 rows a block crash a process, and 2**63 - 1 columns a tile wrap around.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.compiler.targets.cpu.schedule import MOST

Range = tuple[int, int] | tuple[str, ...] | None
"""Smallest and largest number, or the words there are; None for a truth value."""

LIMITS: Mapping[str, Mapping[str, Range]] = {
    "cuda": {
        "threads_per_row": (1, 1024),
        "rows_per_block": (1, 1024),
        "vector_bytes": (1, 64),
        "keep": ("registers", "shared", "reload"),
        "online": None,
        "unroll": (1, 64),
        "max_registers": (0, 255),
        "load_hint": ("default", "streaming", "no_allocate", "prefetch", "evict_first"),
        "store_hint": ("default", "streaming", "evict_first", "evict_last"),
        "blocks_per_sm": (0, 32),
        "cluster": (1, 16),
        "finish": ("kernel",),  # of earlier versions
        "prefetch": None,
        "held": (0, 64),
        "tile": (0, 256),
        "owned": (1, 4096),
    },
    "cpu": {
        "row_block": (1, MOST["row_block"]),
        "column_tile": (0, MOST["column_tile"]),
        "keep": ("scratch", "reload"),
        "online": None,
        "parts": (0, MOST["parts"]),
        "stream": None,
        "prefetch": None,
        "wide": None,
        "threads": (1, MOST["threads"]),
    },
}
"""For each side, its parameters."""

_PLAN = "plan"
_LONGEST_PLAN = 1 << 20
_GROUP = re.compile(r"g(0|[1-9]\d{0,5})\.(\w+)")
_BLOCK = 1024
"""Threads that a block may have."""
_BARRIERS = "grid barriers, which this autotune lacks"


def improper(config: Mapping[str, object], side: str) -> str:
    """Why a configuration cannot be one of ours; "" where it can.

    Args:
        side: "cuda" or "cpu".
    """
    limits = LIMITS[side]
    for name, value in config.items():
        if name == _PLAN:
            if not isinstance(value, str) or len(value) > _LONGEST_PLAN:
                return "its plan is no text"
            if side == "cuda" and ">" in value:
                return f"its plan has {_BARRIERS}"
            continue
        of_group = _GROUP.fullmatch(name)
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
