"""The extents that schedules of the outer scheme divide among threads, and what a thread has to hold."""

from __future__ import annotations

from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import unit_axis, vector_along
from autotune.compiler.schedules.configurations import most_kept
from autotune.compiler.targets.cuda.cubin import SmLimits
from autotune.compiler.targets.cuda.outer.lanes import Lanes
from autotune.compiler.targets.cuda.source import OuterSchedule
from autotune.errors import Unsupported
from autotune.task import Config

SMS = 132
"""Multiprocessors that a default schedule wants to give work to; a search finds out for others."""
HELD = (0, 1, 2, 3, 4, 6, 8)
"""Places of a strip that a thread may have in registers beside those in shared memory."""


def kept_words(program: Program, vec: int) -> float:
    """32-bit registers a place of the reduced axes takes in values that wait for a later pass, where they are most."""
    x = unit_axis(program.graph)

    def words(i: int) -> float:
        v = program.graph.values[i]
        half = v.op == "load" and vec > 1 and program.graph.inputs[v.slot] in ("float16", "bfloat16")
        return (vec if x in v.axes else 1) * (0.5 if half else 1.0)

    return most_kept(program, words)


def lanes(program: Program, vector_bytes: int) -> int:
    """Neighbours that a thread takes at a time; 0 if they do not divide the axis that they lie on."""
    return vector_along(program.graph, unit_axis(program.graph), vector_bytes)


def lines(program: Program, vec: int) -> int:
    """Packs along the axes that packs cover, all of them together."""
    return kept(program) // vec


def kept(program: Program) -> int:
    """Elements along the axes that packs cover: the kept ones, and in a tile the one they lie on."""
    x = unit_axis(program.graph)
    return program.n_rows * (1 if x in program.rows else program.graph.extents[x])


def across(program: Program, vector_bytes: int) -> int:
    """Threads that must lie side by side: those of one tile."""
    x, vec = unit_axis(program.graph), lanes(program, vector_bytes)
    return 1 if x in program.rows or not vec else program.graph.extents[x] // vec


def clusters(program: Program) -> list[int]:
    """Blocks that may share a strip: each has 32 places of the reduced axes or more."""
    return [c for c in (2, 4, 8) if c * 32 <= program.n_cols]


def vectors(program: Program) -> list[int]:
    """Vector sizes in bytes that divide the axis that packs lie on, widest first, at most four.

    A tile is at most a warp wide.
    """
    return [b for b in (32, 16, 8, 4, 2, 1) if lanes(program, b) and across(program, b) <= 32][:4]


def crowded(program: Program) -> bool:
    """Whether what waits for later passes takes most of a large device's shared memory, or more than it has."""
    return 4 * kept_words(program, 1) * kept(program) * program.n_cols > SmLimits().shared * SMS / 2


def may_copy(program: Program, config: Config) -> bool:
    """Whether there are loads that can be copied to shared memory ahead, with vectors of this size."""
    try:
        return bool(Lanes(program, OuterSchedule.from_config(config)).copyable())
    except Unsupported:
        return False
