"""The search for FSDP2's collectives in a program's own training steps.

A candidate runs for a block of steps, of which the first is not timed. All ranks try the same candidate at the same
time, and the slowest rank's time counts. Stock FSDP2 is one of the candidates. The best other candidate must also win
against it in alternating blocks.

The search is a generator: it yields the plan of the next block, and receives the block's time. It therefore uses
neither clocks nor ranks.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.device import environment
from autotune.domain import identity_of
from autotune.domains.c3.fsdp.traffic import Kind
from autotune.domains.c3.scenario import Program, Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, form_of, kernel_of, normalize
from autotune.errors import first_line
from autotune.runtime.deployment import deployment
from autotune.task import Artifact, Config

log = logging.getLogger("autotune")
WARM, TIMED = 1, 2
"""Untimed and timed steps of a block."""
BLOCK = WARM + TIMED
FINAL = 3
"""Blocks of stock FSDP2, and of the best plan, in the final comparison."""
LEAST = BLOCK * (2 + 2 * FINAL)
"""Steps of the shortest search: one plan in addition to stock, and the final comparison."""
MARGIN = 0.005
"""Minimum gain of a plan over stock, as a fraction of the step."""
HEAVY = 0.01
"""Minimum share of a step's bytes for a kind to be searched; smaller ones stay with torch's own group."""
POLICY = "steps of the program"
"""The policy in a stored strategy's key: it was timed in the program."""
FAILED = math.inf
"""Time of a plan that cannot run here."""

Plan = Mapping[Any, Config | None]
"""A strategy for each kind; None for torch's own group. A gather's order "comm_first" prefetches it."""
Tried = Sequence[tuple[dict[Any, Config | None], float]]
Plans = Callable[[Plan, Sequence[Any], str, Tried], Iterator[dict[Any, Config | None]]]
"""Makes plans from stock, the kinds to search, the device type, and the plans tried so far."""

_CANDIDATES: Mapping[tuple[str, str], tuple[Strategy | HostStrategy, ...]] = {
    ("cuda", "all_gather"): (
        Strategy("gemm_first", "copy", "comm"),
        Strategy("comm_first", "copy", "comm"),
        Strategy("comm_first", "nccl"),
    ),
    ("cuda", "reduce_scatter"): (
        Strategy("gemm_first", "copy", "comm", ctas=128),
        Strategy("gemm_first", "sm", "comm", ctas=24),
        Strategy("gemm_first", "copy", "comm", ctas=32, chunks=4),
        Strategy("gemm_first", "nccl", ctas=16),
    ),
    ("cpu", "all_gather"): (
        HostStrategy("gemm_first", "copy"),
        HostStrategy("comm_first", "copy"),
        HostStrategy("comm_first"),
    ),
    ("cpu", "reduce_scatter"): (HostStrategy("gemm_first", "copy"),),
}


def candidates(kind: Kind, side: str) -> list[Config]:
    """The strategies of a kind other than torch's own group, most frequent winners first."""
    scenario = Scenario(Program("fsdp"), kind.op, kind.nbytes, kind.ranks, kind.dtype)
    return [normalize(strategy.config(), scenario, side) for strategy in _CANDIDATES[side, kind.op]]


@dataclass
class Found:
    """The result of a search.

    Attributes:
        plan: the best plan; stock FSDP2 if none is faster by :data:`MARGIN`.
        step_ms, stock_ms: milliseconds per step of the plan and of stock in the final comparison, in the faster half of
            its blocks.
        tried: plans and their milliseconds per step in the search.
    """

    plan: dict[Any, Config | None]
    step_ms: float
    stock_ms: float
    tried: list[tuple[dict[Any, Config | None], float]] = field(default_factory=list)


def search(
    kinds: Mapping[Any, int], side: str, steps: int, plans: Plans | None = None
) -> Generator[Plan, float, Found]:
    """Search within ``steps`` steps of the program.

    Args:
        kinds: kinds and their calls per step; :class:`Kind`, or others with ``nbytes`` and an order.
        side: "cuda" or "cpu".
        plans: makes the plans; None for those of FSDP2.

    Yields:
        the plan of the next block; the caller sends milliseconds per step, or :data:`FAILED`.
    """
    moved = {kind: kind.nbytes * calls for kind, calls in kinds.items()}
    ordered = sorted(kinds, key=lambda kind: (-moved[kind], kind))
    heavy = [kind for kind in ordered if moved[kind] >= HEAVY * sum(moved.values())]
    stock: dict[Any, Config | None] = dict.fromkeys(ordered)
    tried: list[tuple[dict[Any, Config | None], float]] = []
    left = steps // BLOCK - 2 * FINAL

    best = stock
    best_ms = yield stock
    tried.append((stock, best_ms))
    for plan in (plans or _plans)(stock, heavy, side, tried):
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
    ours_ms, stock_ms = _typical(ours), _typical(theirs)
    if ours_ms > (1 - MARGIN) * stock_ms:
        return Found(stock, stock_ms, stock_ms, tried)
    return Found(best, ours_ms, stock_ms, tried)


_built: dict[tuple[Any, ...], Artifact | None] = {}
"""Artifacts of :func:`kernels_of` in this process."""


def kernels_of(scenario: Scenario, configs: Sequence[Config], device: str, mean: bool = False) -> Artifact | None:
    """Compile the kernels of all configurations, once for a device, an operation, a dtype and a number of ranks.

    Returns:
        None if there is no kernel, or one does not compile here. Its candidates are then unsupported.
    """
    from autotune.domains.c3.task import build

    needed = {form_of(config): config for config in configs if kernel_of(config, scenario.collective)}
    key = (device, scenario.collective, scenario.dtype, scenario.ranks, mean, *needed)
    if needed and key not in _built:
        try:
            parts = [build(scenario, config, device, mean=mean) for config in needed.values()]
            kernels = {kernel.launch["op"]: kernel for part in parts for kernel in part.kernels}
            _built[key] = replace(parts[0], kernels=tuple(kernels.values()))
        except Exception as error:
            log.debug("no kernel adds for %s: %s", scenario.label, first_line(error))
            _built[key] = None
    return _built[key] if needed else None


def keep(
    found: Found,
    scenarios: Mapping[Any, Scenario],
    artifacts: Mapping[Any, Artifact],
    device: str,
    db: str | None,
    what: str,
) -> None:
    """Store the strategies of a search, with the kernels that they need, for one rank of all.

    Args:
        scenarios: what the strategy of each kind is stored for.
        artifacts: kernels by kind.
        what: begins the warning where they cannot be stored. Training continues.
    """
    try:
        from autotune.store import Store
        from autotune.store.records import Key, Schedule

        with Store.open(db) as store:
            env = store.put_environment(environment(device))
            for kind, config in found.plan.items():
                workload = scenarios[kind].workload()
                where = store.put_device(identity_of(workload, device))
                schedule = Schedule(
                    Key(store.put_workload(workload), where, env, POLICY),
                    config, found.step_ms * 1e3, {"sequential": found.stock_ms * 1e3},
                    artifacts.get(kind) if config is not None and kernel_of(config, kind.op) else None,
                    "sequential" if config is None else "autotune", workload.family, workload.extent,
                )  # fmt: skip
                store.put_schedule(schedule)
    except Exception as error:
        deployment().warn_once(f"{what} store", f"autotune: {what} is not stored: {first_line(error)}")


def _typical(times: Sequence[float]) -> float:
    """The mean of the faster half of some times: a host that is busy elsewhere delays single steps."""
    return statistics.mean(sorted(times)[: -(-len(times) // 2)])


def _plans(
    stock: Plan, heavy: Sequence[Kind], side: str, tried: Tried
) -> Generator[dict[Any, Config | None], None, None]:
    """Plans, most promising first: each changes the choice for one kind in the best plan so far.

    The first plan has the first candidate for all kinds. Changes to one kind at a time follow, kinds with the most
    bytes first. A second pass repeats them, since later choices may have changed which candidates are best.
    """
    yield {**stock, **{kind: candidates(kind, side)[0] for kind in heavy}}
    for kind in [*heavy, *heavy]:
        for choice in [None, *candidates(kind, side)]:
            best, _ = min(tried, key=lambda entry: entry[1])
            plan = {**best, kind: choice}
            if all(plan != other for other, _ in tried):
                yield plan
