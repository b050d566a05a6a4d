"""The search of FSDP2's collectives in a program's own steps.

A candidate runs for a block of steps, and its first step is not timed. All ranks try the same candidate at the same
time, and the slowest rank's time counts. Stock FSDP2 is among the candidates, and the best of the others has to win
against it in blocks that take turns.

The search is a generator: it yields the plan of the next block, and receives the block's time. So neither clocks nor
ranks occur here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.domains.c3.fsdp.traffic import Kind
from autotune.domains.c3.scenario import Program, Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize
from autotune.task import Config

WARM, TIMED = 1, 2
"""Steps of a block that are not timed, and that are."""
BLOCK = WARM + TIMED
FINAL = 3
"""Blocks of stock, and of the best plan, in the final comparison."""
LEAST = BLOCK * (2 + 2 * FINAL)
"""Steps of the shortest search: one plan besides stock, and the final comparison."""
MARGIN = 0.005
"""Gain over stock that a plan needs, as a share of the step."""
HEAVY = 0.01
"""Share of a step's bytes from which a kind is searched. Smaller ones stay with torch's own group."""
FAILED = math.inf
"""Time of a plan that cannot run here."""

Plan = Mapping[Kind, Config | None]
"""A strategy for each kind; None for torch's own group. A gather's order "comm_first" prefetches it."""

_CANDIDATES: Mapping[tuple[str, str], tuple[Strategy | HostStrategy, ...]] = {
    ("cuda", "all_gather"): (
        Strategy("gemm_first", "copy", "comm"),
        Strategy("comm_first", "copy", "comm"),
        Strategy("gemm_first", "nccl", ctas=16),
    ),
    ("cuda", "reduce_scatter"): (
        Strategy("gemm_first", "copy", "comm", ctas=128),
        Strategy("gemm_first", "sm", "comm", ctas=24),
        Strategy("gemm_first", "copy", "comm", ctas=32, chunks=4),
        Strategy("gemm_first", "sm", "comm", ctas=8),
        Strategy("gemm_first", "nccl", ctas=16),
    ),
    ("cpu", "all_gather"): (HostStrategy("gemm_first", "copy"), HostStrategy("comm_first", "copy")),
    ("cpu", "reduce_scatter"): (HostStrategy("gemm_first", "copy"),),
}


def candidates(kind: Kind, side: str) -> list[Config]:
    """The strategies of a kind besides torch's own group, those that win most often first."""
    scenario = Scenario(Program("fsdp"), kind.op, kind.nbytes, kind.ranks, kind.dtype)
    return [normalize(strategy.config(), scenario, side) for strategy in _CANDIDATES[side, kind.op]]


@dataclass
class Found:
    """The result of a search.

    Attributes:
        plan: the best one; stock FSDP2 where none is faster by :data:`MARGIN`.
        step_ms, stock_ms: of a step by the plan and by stock, medians of the final comparison.
        tried: plans and the time of a step in the search, milliseconds.
    """

    plan: dict[Kind, Config | None]
    step_ms: float
    stock_ms: float
    tried: list[tuple[dict[Kind, Config | None], float]] = field(default_factory=list)


def search(kinds: Mapping[Kind, int], side: str, steps: int) -> Generator[Plan, float, Found]:
    """Search within ``steps`` steps of the program.

    Args:
        kinds: with the calls in a step.
        side: "cuda" or "cpu".

    Yields:
        the plan of the next block; it is sent milliseconds of a step, or :data:`FAILED`.
    """
    moved = {kind: kind.nbytes * calls for kind, calls in kinds.items()}
    ordered = sorted(kinds, key=lambda kind: (-moved[kind], kind))
    heavy = [kind for kind in ordered if moved[kind] >= HEAVY * sum(moved.values())]
    stock: dict[Kind, Config | None] = dict.fromkeys(ordered)
    tried: list[tuple[dict[Kind, Config | None], float]] = []
    left = steps // BLOCK - 2 * FINAL

    best = stock
    best_ms = yield stock
    tried.append((stock, best_ms))
    for plan in _plans(stock, heavy, side, tried):
        if len(tried) >= left:
            break
        ms = yield plan
        tried.append((plan, ms))
        if ms < best_ms:
            best, best_ms = plan, ms
    if best == stock:
        return Found(stock, best_ms, best_ms, tried)
    ours, theirs = [], []
    for _ in range(FINAL):
        theirs.append((yield stock))
        ours.append((yield best))
    ours_ms, stock_ms = statistics.median(ours), statistics.median(theirs)
    if ours_ms > (1 - MARGIN) * stock_ms:
        return Found(stock, stock_ms, stock_ms, tried)
    return Found(best, ours_ms, stock_ms, tried)


def _plans(
    stock: Plan, heavy: Sequence[Kind], side: str, tried: Sequence[tuple[dict[Kind, Config | None], float]]
) -> Generator[dict[Kind, Config | None], None, None]:
    """Plans in the order of their promise: each from the best so far, by another choice for one kind.

    The first one has the first candidate everywhere, and a kind at a time follows, those with the most bytes first.
    A second pass has what the first one's later choices made worth another try.
    """
    yield {**stock, **{kind: candidates(kind, side)[0] for kind in heavy}}
    for kind in [*heavy, *heavy]:
        for choice in [None, *candidates(kind, side)]:
            best, _ = min(tried, key=lambda entry: entry[1])
            plan = {**best, kind: choice}
            if all(plan != other for other, _ in tried):
                yield plan
