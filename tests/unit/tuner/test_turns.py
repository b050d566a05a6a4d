"""The order of a run's turns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.store.records import Effort, Key, Schedule
from autotune.tuner.options import FINAL_SHARE, SearchOptions
from autotune.tuner.turns import Clock, Turns, order
from autotune.workload import Workload


def key(workload: Workload) -> Key:
    return Key(workload.fingerprint, "device", "environment", "baseline")


def names_in_turn(shares: dict[str, float], won: set[str], done: set[str], ended: set[str]) -> str:
    workloads = [Workload("toy", {"name": n}, label=n) for n in shares]
    of = {key(w): w.label for w in workloads}

    def effort_of(names: set[str]) -> Callable[..., Effort | None]:
        return lambda k, *_: Effort(k, "", 1.0, 1.0, True) if of[k] in names else None

    store = SimpleNamespace(
        schedules=lambda device: [Schedule(k, {}, 1.0, {}) for k, n in of.items() if n in won],
        get_effort=effort_of(ended | done),
    )
    context: Any = SimpleNamespace(key=key, store=store, scope=lambda k: "", searched=effort_of(done))
    found = order(context, Turns(workloads, list(shares.values()), SearchOptions(timeout=1.0)))
    return "".join(workloads[i].label for i in found)


def test_workloads_without_an_ended_search_come_before_undecided_ones() -> None:
    """A loss of seconds a candidate took all of the time, in each search again, and the others never had a turn."""
    shares = {"l": 9.0, "a": 1.0, "b": 2.0, "w": 5.0, "d": 1.0}
    assert names_in_turn(shares, won=set(), done=set(), ended=set()) == "lwbad"
    assert names_in_turn(shares, won={"w", "d"}, done={"d"}, ended={"l"}) == "dbalw"
    assert names_in_turn(shares, won={"w"}, done=set(), ended={"l", "b", "a", "d"}) == "lbadw"


def test_the_first_workloads_fixed_cost_is_expected_of_no_other() -> None:
    """It includes the start of the worker, so a share of the time bounds it until another workload has ended."""
    options, clock = SearchOptions(timeout=100.0), Clock(100.0, [1.0] * 4)
    clock.done(60.0, 5.0)
    assert clock.budget(1, options).final == pytest.approx(FINAL_SHARE * 100 / 3, rel=0.05)
    clock.done(10.0, 8.0)
    assert clock.budget(2, options).final == 2.0
