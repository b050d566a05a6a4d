"""Which region a search in a program takes next, by a clock that the tests set."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.in_program import turns
from autotune.in_program.search import is_decided
from autotune.in_program.turns import RegionQueue
from autotune.tuner.result import Result
from autotune.workload import PRODUCT, Workload
from tests.support.clock import Clock
from tests.support.zoo import Case, T, workloads_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "time", made)
    monkeypatch.setattr(turns, "shares", lambda counted: {w.fingerprint: n * w.spec["mib"] for w, n in counted})
    monkeypatch.setattr("autotune.domain.alike_of", lambda workload: workload.spec.get("alike", workload.fingerprint))
    return made


def region(name: str, mib: float = 1.0) -> Workload:
    return Workload("toy", {"name": name, "mib": mib}, label=name)


def replace_spec(of: Workload, **more: Any) -> Workload:
    return Workload(of.kind, {**of.spec, **more}, label=of.label)


def result(of: Workload, us: float = 10.0, seconds: float = 2.0, **more: Any) -> Result:
    return Result(of.fingerprint, of.label, of.kind, "cpu", "", best_us=us, bytes_moved=1000, seconds=seconds, **more)


def label(turns: RegionQueue) -> str:
    turn = turns.next()
    return "" if turn is None else turns.workloads[turn.number].label


def test_the_region_that_may_save_most_goes_first_and_later_graphs_take_part(clock: Clock) -> None:
    turns = RegionQueue(80.0)
    turns.add([(region("small", 1), 2), (region("large", 5), 1), (region("often", 1), 4)])
    assert label(turns) == "large"
    turns.add([(region("small", 1), 9), (region("late", 4.5), 1)])
    assert [label(turns) for _ in range(3)] == ["small", "late", "often"]


def test_the_program_s_counts_replace_those_of_its_graphs(clock: Clock) -> None:
    turns = RegionQueue(80.0)
    turns.add([(region("a", 2), 1), (region("b", 1), 1)])
    turns.add([(region("a", 2), 1), (region("b", 1), 5), (region("c", 1), 4)], whole=True)
    assert [label(turns) for _ in range(3)] == ["b", "c", "a"]


def test_a_region_with_much_to_gain_has_a_second_turn(clock: Clock) -> None:
    slow, fast = region("slow"), region("fast")
    turns = RegionQueue(80.0)
    turns.add([(slow, 1), (fast, 1)])
    first = [turns.next(), turns.next()]
    assert [t.budget.trials for t in first if t is not None] == [8, 8]
    assert [t.granted for t in first if t is not None] == [0.0, 0.0], "a few candidates are no finished search"
    turns.done(result(slow, 100.0))
    turns.done(result(fast, 10.0))
    again = turns.next()
    assert again is not None
    assert (turns.workloads[again.number], again.budget.trials, again.budget.timeout) == (slow, None, 4.0)
    assert turns.next() is None, "nothing is left to gain"
    turns.add([(region("late"), 1)])
    assert label(turns) == "late"


def test_regions_that_differ_in_constants_follow_their_leader(clock: Clock) -> None:
    """Swin's regions with stochastic depth: nine of one kind, of which each had its own search."""
    one, two, other = (replace_spec(region(name, 3), alike="layers") for name in ("one", "two", "other"))
    rest = [region(f"rest{i}", 2 - i / 10) for i in range(4)]
    turns = RegionQueue(80.0)
    turns.add([(w, 1) for w in (one, two, other, *rest)])
    assert label(turns) == "one"
    turns.done(result(one, 100.0, winner="inductor", best={"block": 1}))
    for i in range(3):  # meanwhile the others' candidate is compiled
        assert label(turns) == f"rest{i}"
        turns.done(result(rest[i], 10.0, winner="autotune", best={"block": 1}))
    assert [label(turns) for _ in range(3)] == ["two", "other", "rest3"]
    turns.done(result(two, 100.0, winner="inductor", best={"block": 1}))
    turns.done(result(other, 100.0, winner="inductor", best={"block": 1}))
    turns.done(result(rest[3], 10.0, winner="autotune", best={"block": 1}))
    second = turns.next()
    assert second is not None
    assert (turns.workloads[second.number], second.budget.trials) == (one, None), "one second turn for all three"
    turns.done(result(one, 50.0, winner="autotune", best={"block": 2}))
    assert [label(turns) for _ in range(2)] == ["two", "other"], "they take the better configuration"
    turns.done(result(two, 50.0, winner="autotune", best={"block": 2}))
    turns.done(result(other, 50.0, winner="autotune", best={"block": 2}))
    assert turns.next() is None


def test_a_region_that_could_not_follow_has_its_own_second_turn(clock: Clock) -> None:
    """A leader without a gain had 199 s, and the slow region none."""
    one, two = (replace_spec(region(name), alike="layers") for name in ("one", "two"))
    turns = RegionQueue(80.0)
    turns.add([(one, 1), (two, 1)])
    assert [label(turns) for _ in range(2)] == ["one", "two"]
    turns.done(result(one, 10.0, winner="autotune", best={"block": 1}))
    turns.done(result(two, 100.0, winner="autotune", best={"block": 2}))
    assert label(turns) == "two"
    assert turns.next() is None


def test_the_fastest_of_few_large_regions_is_no_limit_of_the_others(clock: Clock) -> None:
    one, two = region("one"), region("two")
    results = [
        replace(result(one, 900.0), device="cuda:0", bytes_moved=3 * 10**8),
        replace(result(two, 1000.0), device="cuda:0", bytes_moved=3 * 10**9),
    ]
    assert turns.gains_left([(one, 1), (two, 1)], results) == [(one, pytest.approx(800.0))]


def test_second_turns_leave_time_to_the_graphs_that_follow(clock: Clock) -> None:
    """Llama with low-rank updates: second turns took the time of the loss, whose graph came after the budget's end."""
    slow, fast = region("slow"), region("fast")
    turns = RegionQueue(80.0, more=True)
    turns.add([(slow, 1), (fast, 1)])
    assert [label(turns) for _ in range(2)] == ["slow", "fast"]
    turns.done(result(slow, 100.0, winner="inductor"))
    turns.done(result(fast, 10.0, winner="inductor"))
    again = turns.next()
    assert again is not None
    assert again.granted == 4.0, "while Inductor compiles there is nothing else to do"
    turns.end_in(60.0)
    assert turns.next() is None


def test_a_launch_is_no_possible_gain(clock: Clock) -> None:
    """Casts of 32 768 weights in 64 places: each takes the 2 us of a launch, and had a second turn of nine seconds."""
    large, tiny = region("large"), region("tiny")
    results = [result(large, 100.0), replace(result(tiny, 2.0), bytes_moved=1)]
    assert turns.gains_left([(large, 1), (tiny, 64)], results) == []
    results[0] = replace(results[0], bytes_moved=100)
    slower = region("slower")
    results.append(result(slower, 12.0))
    assert turns.gains_left([(large, 1), (tiny, 64), (slower, 2)], results) == [(large, 98.0)]


def test_a_leader_with_the_same_configuration_after_its_second_turn_ends_it(clock: Clock) -> None:
    one, two = (replace_spec(region(name), alike="layers") for name in ("one", "two"))
    turns = RegionQueue(80.0)
    turns.add([(one, 1), (two, 1), (region("fast"), 1)])
    for w in (one, region("fast"), two):
        assert label(turns) == w.label
        turns.done(result(w, 10.0 if w.label == "fast" else 100.0, winner="autotune", best={"block": 1}))
    assert label(turns) == "one"
    turns.done(result(one, 100.0, winner="autotune", best={"block": 1}))
    assert turns.next() is None


@pytest.mark.parametrize(("earlier_us", "again"), [(0.0, "slow"), (3000.0, "slow"), (5000.0, "")])
def test_a_region_that_hardly_matters_to_the_step_has_no_second_turn(
    clock: Clock, earlier_us: float, again: str
) -> None:
    """DeBERTa's second graph: two regions of 17 us were searched for 25 s, behind a graph of 37 ms."""
    slow, fast = region("slow"), region("fast")
    turns = RegionQueue(25.0, earlier_us)
    turns.add([(slow, 1), (fast, 1)])
    for one, us in ((slow, 17.0), (fast, 10.0)):
        turns.next()
        turns.done(result(one, us, winner="autotune"))
    assert label(turns) == again


def test_regions_that_are_small_together_are_not_searched() -> None:
    """The lightest ones are left out until they are half a percent of the step's bytes."""
    many = {str(k): 1.0 + k / 100 for k in range(20)}
    assert turns.small(many, 1000.0) == {"0", "1", "2", "3"}, "many that are small each are not small together"
    assert turns.small({"a": 5.0, "product": math.inf}, 1000.0) == {"a"}
    assert turns.small({"a": 5.1}, 1000.0) == set()
    assert turns.small(many, sum(many.values())) == set()


def test_a_launch_has_its_weight_and_a_product_is_never_small() -> None:
    (tiny,) = workloads_of(Case("", lambda x: torch.softmax(x, -1), (T(4, 8),)))
    (large,) = workloads_of(Case("", lambda x: torch.softmax(x, -1), (T(4096, 1024),)))
    found = turns.weights([(tiny, 3), (large, 2)], "cuda:0")
    assert found[tiny.fingerprint] == 3 * (2 * 4 * 4 * 8 + turns._LAUNCH_BYTES["cuda"])
    assert found[large.fingerprint] == 2 * (2 * 4 * 4096 * 1024 + turns._LAUNCH_BYTES["cuda"])
    product = replace(tiny, kind=PRODUCT)
    assert turns.weights([(product, 1)], "cpu") == {product.fingerprint: math.inf}


def test_a_region_that_later_graphs_leave_out_has_no_turn(clock: Clock) -> None:
    queue = RegionQueue(80.0)
    queue.add([(region("small"), 1), (region("large"), 1)])
    queue.add([(region("large"), 1)], whole=True)
    assert label(queue) == "large"
    assert label(queue) == ""


def test_a_step_is_measured_by_the_last_results() -> None:
    a, b = region("a"), region("b")
    found = [result(a, 50.0), result(b, 10.0, deployed_us=8.0), result(a, 40.0)]
    assert turns.step_us({a.fingerprint: 3, b.fingerprint: 2}, found) == 3 * 40.0 + 2 * 8.0
    assert turns.step_us({a.fingerprint: 1}, found[1:2]) == 0.0


def test_a_region_that_takes_long_does_not_keep_the_others_waiting(clock: Clock) -> None:
    """One of T5's candidates compiled for 30 s, and its baseline for 13: 40 of the search's 62 s."""
    slow, quick = region("slow", 9), region("quick", 4)
    turns = RegionQueue(80.0)
    turns.end = 80.0
    turns.add([(slow, 1), (quick, 1)])
    first = turns.next()
    assert first is not None
    assert (first.budget.timeout, first.budget.waits) == (6.0, 3.0)
    turns.done(result(slow, best={"tile": 4}, seconds=6.0))
    assert label(turns) == "quick"
    turns.done(result(quick, best={}, winner="inductor"))
    assert label(turns) == "slow"
    turns.done(result(slow, best={"tile": 4}, seconds=6.0))
    last = turns.next()
    assert last is not None
    assert turns.workloads[last.number] == slow
    assert (last.budget.timeout, last.budget.waits) == (80.0, None)
    turns.done(result(slow, best={"tile": 4}, seconds=6.0))
    assert label(turns) == ""


def test_a_heavy_region_without_a_decision_comes_before_light_ones(clock: Clock) -> None:
    """A 3D UNet's heaviest region waited for its baseline and lost its turn; 20 small ones had theirs before it."""
    heavy, light = region("heavy", 100), [region(f"light {k}", 1) for k in range(4)]
    turns = RegionQueue(80.0)
    turns.add([(heavy, 1), *((one, 1) for one in light)])
    assert label(turns) == "heavy"
    turns.done(result(heavy, best={"tile": 4}, seconds=8.0))
    again = turns.next()
    assert again is not None
    assert turns.workloads[again.number] == heavy
    assert (again.budget.timeout, again.budget.waits) == (6.0, 3.0)
    turns.done(result(heavy, best={"tile": 4}, winner="autotune"))
    assert [label(turns) for _ in range(5)] == ["light 0", "light 1", "light 2", "light 3", ""]


@pytest.mark.parametrize("best", [None, {"tile": 4}])
def test_a_region_that_is_never_decided_leaves_the_others_their_turns(clock: Clock, best: Any) -> None:
    heavy, light = region("heavy", 100), [region(f"light {k}", 1) for k in range(20)]
    turns = RegionQueue(60.0)
    turns.add([(heavy, 1), *((one, 1) for one in light)], whole=True)
    turns.end = clock.monotonic() + 60.0
    begun = list[str]()
    while (turn := turns.next()) is not None:
        subject = turns.workloads[turn.number]
        assert turn.budget.timeout is not None
        assert 0 < turn.budget.timeout <= turns.left_s
        begun.append(subject.label)
        if subject == heavy:
            clock.sleep(took := turn.budget.timeout + (turn.budget.waits or 0.0))
            turns.done(result(heavy, us=0.0, best=best, stop="the time is up", seconds=took))
        else:
            clock.sleep(1.5)
            turns.done(result(subject, winner="inductor", best={}, seconds=1.5, deployed_us=1.0))
    early = 1 if best is None else 2
    assert begun == ["heavy"] * early + [one.label for one in light] + ["heavy"]
    assert turns.left_s == 0.0


def test_an_undecided_region_has_no_long_turn_before_all_graphs_are_known(clock: Clock) -> None:
    turns = RegionQueue(80.0)
    turns.add([(slow := region("slow"), 1)])
    for _ in range(2):
        turn = turns.next()
        assert turn is not None
        assert turn.budget.timeout == 6.0
        turns.done(result(slow, us=0.0, best={"tile": 4}, seconds=3.0))
    assert label(turns) == ""
    turns.end = 80.0
    last = turns.next()
    assert last is not None
    assert (last.budget.timeout, last.budget.waits) == (80.0, None)
    turns.done(result(slow, us=0.0, best={"tile": 4}, seconds=3.0))
    assert label(turns) == ""


def test_a_region_whose_candidates_compile_for_long_has_a_later_turn(clock: Clock) -> None:
    slow, broken = region("slow", 2), region("broken", 1)
    turns = RegionQueue(80.0)
    turns.end = 80.0
    turns.add([(slow, 1), (broken, 1)])
    assert label(turns) == "slow"
    turns.done(result(slow, us=0.0, stop="the time is up", seconds=9.0))
    assert label(turns) == "broken"
    turns.done(result(broken, us=0.0, stop="the trials are used up", measured=4))
    assert label(turns) == "slow"


@pytest.mark.parametrize(
    ("more", "decided"),
    [
        ({"winner": "inductor", "best": {}}, True),
        ({"measured": 4}, True),  # none works: the next process would try them for nothing
        ({"measured": 4, "best": {"tile": 4}}, False),  # the final comparison is missing
        ({}, False),
    ],
)
def test_a_graph_is_searched_again_only_if_that_may_help(more: dict[str, Any], decided: bool) -> None:
    assert is_decided(result(region("a"), **more)) is decided


def test_long_turns_are_no_exception_where_all_are_long(clock: Clock) -> None:
    turns = RegionQueue(80.0)
    turns.add([(region(name), 1) for name in "abcd"])
    for name in "abc":
        turns.next()
        turns.done(result(region(name), seconds=5.0, winner="autotune"))
    turn = turns.next()
    assert turn is not None
    assert turn.budget.timeout == 20.0


def test_no_turn_begins_that_does_not_fit_the_time(clock: Clock) -> None:
    turns = RegionQueue(80.0)
    turns.add([(region(name), 1) for name in "abcd"])
    turns.end = 20.0
    for name, seconds in (("a", 9.0), ("b", 3.0), ("c", 3.0)):
        assert label(turns) == name
        turns.done(result(region(name), seconds=seconds))
    clock.sleep(17.5)
    assert turns.next() is None, "2.5 s are left, and a region takes 3; the first one waited for the processes"
    clock.sleep(10.0)
    assert turns.left_s == 0.0


def test_the_end_may_come_before_the_first_turn(clock: Clock) -> None:
    turns = RegionQueue(80.0)
    turns.add([(region("a"), 1)])
    turns.end = 0.0
    assert turns.next() is None
