"""Options of a search; budgets of parts, and how a run's time is shared among its workloads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autotune import numerics
from autotune.errors import UserError
from autotune.measure.policy import Policy
from autotune.tuner import turns as module
from autotune.tuner.options import Budget, SearchOptions
from autotune.tuner.turns import Clock


class Hand:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_a_part_gets_its_share() -> None:
    part = Budget(trials=40, timeout=60.0).part(0.25, 10.0)
    assert (part.trials, part.timeout) == (10, 10.0)
    assert part.patience == 20  # half of 40, for a quarter of the whole
    assert Budget().part(0.01, None).patience == 12
    assert Budget(patience=0).part(0.5, None).patience == 0
    assert Budget(trials=3).part(0.01, None).trials == 1


def test_time_is_kept_for_the_final_comparison() -> None:
    assert Budget(timeout=40.0).until_s == 30.0
    assert Budget(timeout=600.0).until_s == 570.0
    assert Budget(timeout=40.0, final=4.0).until_s == 36.0
    assert Budget(timeout=2.0, final=4.0).until_s == 0.0


def test_clock_reserves_fixed_time_for_later_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = Clock(100.0, [1.0, 1.0, 3.0, 5.0])
    assert [clock.granted(i) for i in range(4)] == [10.0, 10.0, 30.0, 50.0]
    first = clock.budget(0, SearchOptions())
    assert (first.timeout, first.final) == (10.0, None)
    hand.now += 20.0
    clock.done(20.0, 12.0)  # of which 8 s were not its search, but most of them the start of the worker
    second = clock.budget(1, SearchOptions())
    assert second.final == pytest.approx(80.0 / 9 / 4)
    assert second.until_s == pytest.approx((80.0 - 3 * 80.0 / 9 / 4) / 9)
    hand.now += 7.0
    clock.done(7.0, 4.0)
    assert clock.budget(2, SearchOptions()).until_s == pytest.approx((73.0 - 2 * 3.0) * 3 / 8)
    hand.now += 70.0
    clock.done(70.0, 65.0)
    late = clock.budget(3, SearchOptions())
    assert late.until_s == 1.0  # a moment for everyone, however late
    assert late.final == 4.0


def test_a_first_workload_with_little_time_outside_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = Clock(100.0, [1.0, 1.0])
    hand.now += 20.0
    clock.done(20.0, 18.0)
    assert clock.budget(1, SearchOptions()).final == 2.0


def test_known_results_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Hand(monkeypatch)
    clock = Clock(100.0, [1.0, 1.0])
    clock.done(0.0, 0.0)
    assert clock.budget(1, SearchOptions()).timeout == 100.0


def test_several_devices_have_as_much_time_each(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = Clock(100.0, [5.0, 3.0, 1.0, 1.0], devices=2)
    assert [clock.granted(i) for i in range(4)] == [100.0, 60.0, 20.0, 20.0]
    assert clock.budget(1, SearchOptions(), then=[3]).timeout == 75.0  # of this device, which two of them share
    hand.now += 60.0
    assert clock.budget(3, SearchOptions(), then=[]).timeout == 40.0


def test_clock_begins_no_workload_that_would_exceed_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = Clock(100.0, [1.0, 1.0, 1.0])
    hand.now += 50.0
    clock.done(50.0, 10.0)  # the worker started in it
    assert not clock.up
    hand.now += 40.0
    clock.done(40.0, 28.0)
    assert clock.up, "12 s are what a workload takes beside its search, and 10 are left"


def test_no_limit() -> None:
    clock = Clock(None, [1.0])
    assert clock.granted(0) is None
    assert clock.budget(0, SearchOptions(trials=7, patience=3)) == Budget(7, None, 3)


def test_a_mistake_in_an_option_is_reported_when_the_options_are_made() -> None:
    for wrong, said in (
        ({"trials": 0}, "at least one candidate"),
        ({"timeout": -1.0}, "seconds above 0"),
        ({"patience": -1}, "0 for no limit"),
        ({"sampler": "annealing"}, "unknown sampler 'annealing'; the samplers are tpe, random, brute"),
        ({"weights": {"a": 1.0, "b": 0.0}}, "weights must be above 0"),
    ):
        with pytest.raises(UserError, match=said):
            SearchOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SearchOptions(trails=3)  # type: ignore[call-arg]


def test_options_reach_another_process_as_json() -> None:
    given = SearchOptions(
        trials=3, timeout=2.5, sampler="random", seed=7, method="short", policy=Policy("cpu"),
        weights={"a": 2.0}, seeds={"a": [{"block": 4}]}, numerics={"float32_matmul_precision": "high"}, every=True,
    )  # fmt: skip
    there = SearchOptions(**json.loads(json.dumps(given.to_json())))
    assert there == replace(given, policy=None)
    assert SearchOptions().to_json()["numerics"] == numerics.read()  # this process's, where none are given
    assert there.budget(1.5) == Budget(3, 1.5, None)
