"""The search in a program's steps, with times set by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autotune.domains.c3.fsdp.steps import BLOCK, FAILED, LEAST, MARGIN, Found, candidates, search
from autotune.domains.c3.fsdp.traffic import Kind

BIG = Kind("all_gather", 1 << 20, "bf16", 4)
SMALL = Kind("all_gather", 1 << 10, "bf16", 4)
SUMS = Kind("reduce_scatter", 1 << 20, "f32", 4)
KINDS = {SMALL: 1, BIG: 8, SUMS: 4}


def run(steps: int, cost: Callable[[Any], float], kinds: Any = KINDS, side: str = "cuda") -> tuple[Found, int]:
    """The result, and the steps that it took."""
    trials = search(kinds, side, steps)
    plan, taken = next(trials), 0
    while True:
        ms = cost(plan)
        taken += 0 if ms == FAILED else BLOCK
        try:
            plan = trials.send(ms)
        except StopIteration as end:
            return end.value, taken


def engines(plan: Any) -> dict[Kind, Any]:
    return {kind: None if config is None else config["engine"] for kind, config in plan.items()}


def test_each_kind_gets_its_own_choice() -> None:
    def cost(plan: Any) -> float:
        ms = 100.0
        ms -= {None: 0, "copy": 10, "nccl": 1}.get(engines(plan)[BIG], 0)
        ms -= {None: 0, "copy": 4, "sm": 6, "nccl": 1}.get(engines(plan)[SUMS], 0)
        assert engines(plan)[SMALL] is None, "too few bytes to be searched"
        return ms

    found, taken = run(120, cost)
    assert engines(found.plan) == {BIG: "copy", SUMS: "sm", SMALL: None}
    assert (found.stock_ms, found.step_ms) == (100.0, 84.0)
    assert taken <= 120


def test_an_earlier_choice_is_made_again_among_the_later_ones() -> None:
    """Without "sm" for the sums, "nccl" is the best for the gathers; with it, "copy" is."""
    times = {("nccl", "copy"): 90.0, ("copy", "copy"): 95.0, ("nccl", "sm"): 85.0, ("copy", "sm"): 80.0}

    def cost(plan: Any) -> float:
        return times.get((engines(plan)[BIG], engines(plan)[SUMS]), 100.0)

    found, _ = run(200, cost)
    assert engines(found.plan) == {BIG: "copy", SUMS: "sm", SMALL: None}
    assert found.step_ms == 80.0


@pytest.mark.parametrize("steps", [LEAST, 30, 60, 200])
def test_no_search_takes_more_steps_than_it_was_given(steps: int) -> None:
    assert run(steps, lambda plan: 100.0 - sum(c is not None for c in plan.values()))[1] <= steps


def test_stock_stays_without_a_gain_beyond_the_margin() -> None:
    gain = MARGIN / 2

    def cost(plan: Any) -> float:
        return 100.0 * (1 - gain) if any(plan.values()) else 100.0

    found, _ = run(60, cost)
    assert set(found.plan.values()) == {None}
    assert found.step_ms == found.stock_ms == 100.0


def test_a_gain_that_the_final_comparison_does_not_repeat_is_none() -> None:
    stock = 0

    def cost(plan: Any) -> float:
        nonlocal stock
        stock += not any(plan.values())
        return 80.0 if any(plan.values()) and stock == 1 else 100.0  # the final comparison begins with stock

    found, _ = run(60, cost)
    assert set(found.plan.values()) == {None}


def test_a_block_that_a_busy_host_delays_does_not_decide() -> None:
    seen: list[Any] = []

    def cost(plan: Any) -> float:
        seen.append(dict(plan))
        final = any(plan.values()) and sum(not any(p.values()) for p in seen) == 3  # the second pair of that comparison
        return (95.0 if any(plan.values()) else 100.0) + (30.0 if final else 0.0)

    found, _ = run(60, cost)
    assert any(found.plan.values())
    assert (found.stock_ms, found.step_ms) == (100.0, 95.0)


def test_a_strategy_that_cannot_run_costs_no_step_and_is_not_chosen() -> None:
    def cost(plan: Any) -> float:
        if "copy" in engines(plan).values() or "sm" in engines(plan).values():
            return FAILED
        return 90.0 if engines(plan)[BIG] == "nccl" else 100.0

    found, _ = run(120, cost)
    assert engines(found.plan)[BIG] == "nccl"
    everything_fails, taken = run(60, lambda plan: FAILED if any(plan.values()) else 100.0)
    assert set(everything_fails.plan.values()) == {None}
    assert taken == BLOCK


@pytest.mark.parametrize("side", ["cuda", "cpu"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_candidates_are_strategies_of_their_side(side: str, op: str) -> None:
    from autotune.domains.c3.scenario import Program, Scenario
    from autotune.domains.c3.strategy import improper, reject

    scenario = Scenario(Program("fsdp:0"), op, 1 << 20, 4, "bf16")
    found = candidates(Kind(op, 1 << 19, "bf16", 4), side)
    assert found
    for config in found:
        assert not improper(config, side)
        assert reject(config, scenario, side) is None
