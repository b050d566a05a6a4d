"""Timing on a CPU with cold data and warm code."""

from __future__ import annotations

import dataclasses
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.bench import rotate as module
from autotune.bench.case import Arguments
from autotune.bench.rotate import input_sets, last_level_cache, rotate
from autotune.measure.policy import default_policy

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
        (1 << 31, 3),
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
    assert "".join(n for n, _ in seen) == "aabbcc" + "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"  # warm-up, four rounds
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
