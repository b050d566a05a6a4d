"""Timing on a CPU with cold data and warm code."""

from __future__ import annotations

import dataclasses
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.measure import rotate as module
from autotune.measure.policy import default_policy
from autotune.measure.rotate import input_sets, last_level_cache, rotate, time_rotating
from autotune.measure.server import Server
from benchmarks.fusion.cases.case import Arguments
from tests.support.clock import Clock

MIB = 1 << 20
POLICY = dataclasses.replace(default_policy("cpu"), warmup=2, final_rounds=4, final_s=30.0, cold_bytes=8 * MIB)


@pytest.mark.parametrize(
    ("moved", "count"),
    [
        (MIB, 20),  # twice the cache
        (3 * MIB, 7),  # rounded up
        (1 << 10, 64),
        (0, 64),
        (20 * MIB, 3),
        (1 << 30, 3),
        (1 << 31, 2),  # memory is dear then
    ],
)
def test_copies_are_more_than_the_caches_hold(moved: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "last_level_cache", lambda: 10 * MIB)
    assert len(input_sets((torch.ones(2),), moved, POLICY)) == count


def test_copies_stay_below_two_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "last_level_cache", lambda: 8 << 30)
    assert len(input_sets((torch.ones(2),), 100 * MIB, POLICY)) == 20
    monkeypatch.setattr(module, "last_level_cache", lambda: 0)  # not known: what a search sweeps
    assert len(input_sets((torch.ones(2),), MIB, POLICY)) == 8


def test_copies_are_laid_out_as_the_inputs_and_share_nothing() -> None:
    base = torch.arange(12.0).view(3, 4)
    args: Arguments = (base, [base[1:].t(), base])
    first, second, *_ = input_sets(args, 1 << 30, POLICY)
    for copied in (first, second):
        assert torch.equal(copied[0], base)
        assert copied[1][1] is copied[0]
        assert copied[1][0].stride() == (1, 4)
        assert copied[1][0].data_ptr() == copied[0].data_ptr() + 16  # the view is one of the copy
    first[0].zero_()
    assert second[0].any()
    assert base.any()


def test_the_last_level_counts_each_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    caches = {"index0": ("1", "Data", "32K"), "index1": ("1", "Instruction", "64K"), "index2": ("3", "Unified", "16M")}
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"), (4, "4")):
        for index, (level, kind, size) in caches.items():
            folder = tmp_path / f"cpu{cpu}" / "cache" / index
            folder.mkdir(parents=True)
            own = shared if level == "3" else str(cpu)
            for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", own)):
                (folder / name).write_text(f"{text}\n")
    assert last_level_cache(tmp_path) == 32 * MIB  # of processors 0 to 2; 5 has no entry, 4 is not ours
    (tmp_path / "cpu2" / "cache" / "index2" / "size").unlink()
    assert last_level_cache(tmp_path) == 16 * MIB
    assert last_level_cache(tmp_path / "nothing") == 0


def test_contenders_warm_up_on_the_set_before_and_take_turns() -> None:
    sets: list[Arguments] = [(k,) for k in range(5)]
    seen: list[tuple[str, int]] = []
    samples = rotate({n: lambda given, n=n: seen.append((n, given[0])) for n in "abc"}, sets, POLICY)  # type: ignore[misc]
    assert [k for _, k in seen] == [i % 5 for i in range(len(seen))]  # every call takes the next set
    assert "".join(n for n, _ in seen) == "aabbcc" + "aaccbb" + "bbaacc" + "ccbbaa" + "bbccaa"  # warm-up, four rounds
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 4, "b": 4, "c": 4}


def test_results_live_until_the_turn_of_their_set_comes_again() -> None:
    alive: list[weakref.ref[Any]] = []
    counted = []

    def call(given: Arguments) -> torch.Tensor:
        counted.append(sum(ref() is not None for ref in alive))
        result = torch.ones(3)
        alive.append(weakref.ref(result))
        return result

    rotate({"a": call}, [(k,) for k in range(4)], POLICY)
    assert counted == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]  # the results of the other three sets


def test_time_runs_out_after_five_rounds() -> None:
    hurried = dataclasses.replace(POLICY, final_rounds=100, final_s=0.0)
    assert len(rotate({"a": lambda given: None}, [(1,), (2,)], hurried)["a"]) == 5


def test_one_contender_alone_has_a_separate_set_in_each_call() -> None:
    seen: list[int] = []
    samples = time_rotating([0, 1, 2], seen.append, POLICY, repeats=4)
    assert len(samples) == 4
    assert seen == [i % 3 for i in range(2 + 2 * 4)]


def test_hopeless_contenders_and_spent_budgets_end_early(clock: Clock) -> None:
    def slow(given: int) -> None:
        clock.busy(2_000)

    assert len(time_rotating([0, 1], slow, POLICY, repeats=50, limit_us=100)) == 3
    # a sample takes 4 ms, warm-up and all: as many as end before the budget does, and the one that ends after it
    assert len(time_rotating([0, 1], slow, POLICY, repeats=500, budget_s=0.05)) == 13
    assert len(time_rotating([0, 1], slow, POLICY, repeats=500, budget_s=0.001)) == 3


def test_the_worker_times_copies_in_turn_by_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copied:
        def input_sets(self, count: int) -> list[int]:
            return list(range(count))

        def figure(self) -> None:
            return None

    monkeypatch.setattr(module, "last_level_cache", lambda: 0)
    seen: list[int] = []

    def run(given: int = -1) -> None:
        seen.append(given)

    server = Server()
    server.bench, server.moved = Copied(), 2 * MIB  # type: ignore[assignment]
    server.policy = dataclasses.replace(POLICY, screen_repeats=3, repeat_repeats=4)
    server._copy_inputs()
    assert len(server._time(run, "screen", None)) == 3
    assert sorted(set(seen)) == [0, 1, 2, 3]
    assert set(server._interleave({"a": run, "b": run}, lambda name: None)) == {"a", "b"}
    assert -1 not in seen
    swept = Server()
    swept.bench, swept.policy = server.bench, dataclasses.replace(server.policy, method="cpu", cold_bytes=0)
    swept._copy_inputs()
    swept._time(run, "screen", None)
    assert seen[-1] == -1


class Call:
    """A contender, by the microseconds of its calls; the last ones are repeated.

    Attributes:
        count: number of calls.
    """

    def __init__(self, clock: Clock, *times: float) -> None:
        self._clock, self._times, self.count = clock, times, 0

    def __call__(self, given: object) -> None:
        self._clock.busy(self._times[min(self.count, len(self._times) - 1)])
        self.count += 1


@pytest.mark.parametrize(
    ("times", "calls"),
    [
        ([40_000.0], 2 + 2 * 4),
        ([60_000.0], 2 + 4),  # no untimed call before a sample
        ([300_000.0], 1 + 4),  # nor a second call to warm up
        ([100_000.0, 40.0], 2 + 2 * 4),  # a busy host has delayed the first call
    ],
)
def test_long_calls_are_timed_by_fewer(times: list[float], calls: int, clock: Clock) -> None:
    call = Call(clock, *times)
    assert time_rotating([0, 1], call, POLICY, repeats=4) == [times[-1]] * 4
    assert call.count == calls


@pytest.mark.parametrize(("final_s", "rounds"), [(2.0, 3), (6.0, 4)])
def test_a_comparison_of_long_calls_ends_after_three_rounds(final_s: float, rounds: int, clock: Clock) -> None:
    calls = {"a": Call(clock, 1.3e6), "b": Call(clock, 0.5e6)}
    policy = dataclasses.replace(POLICY, final_rounds=25, final_s=final_s)
    samples = rotate(calls, [0, 1], policy)
    assert samples == {"a": [1.3e6] * rounds, "b": [0.5e6] * rounds}
