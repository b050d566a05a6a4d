"""Timing over ranks: the slowest rank counts, and all ranks get the same numbers at the same end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autotune.domains.c3.measuring.ranks import Ranks
from tests.process.domains.test_ranks import QUICK
from tests.support.c3 import toy_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(None, "cpu", QUICK, ranks=2) as opened:
        yield opened


def timed(ranks: Ranks, *names: str, **options: Any) -> dict[str, Any]:
    """The answer of both ranks, which have to agree."""
    first, second = ranks.call(f"{toy_ranks.__name__}:timed", {"names": names, **options}, 600)
    assert first == second
    found: dict[str, Any] = first
    return found


def test_samples_are_the_largest_over_ranks_in_rotating_order(ranks: Ranks) -> None:
    found = timed(ranks, "slow", "empty", rounds=6, budget_s=10)
    assert (found["slow"], found["empty"]) == ([20_000.0] * 6, [0.0] * 6)
    assert found["told"] == ["slow", "empty"] + ["slow", "empty", "empty", "slow"] * 3


def test_the_budget_ends_it_for_all_ranks(ranks: Ranks) -> None:
    assert len(timed(ranks, "slow", "empty", rounds=1000, budget_s=0.19)["slow"]) == 10
    assert len(timed(ranks, "slow", "empty", rounds=1000, budget_s=0.0)["empty"]) == 5
    assert len(timed(ranks, "slow", rounds=1000, budget_s=0.29)["slow"]) == 15
    assert len(timed(ranks, "slow", rounds=1000, budget_s=0.0)["slow"]) == 3


def test_one_that_is_too_slow_gets_three_samples(ranks: Ranks) -> None:
    assert len(timed(ranks, "slow", rounds=8, budget_s=10, limit_us=10_000)["slow"]) == 3
    assert len(timed(ranks, "slow", rounds=8, budget_s=10, limit_us=10_000_000)["slow"]) == 8
    assert len(timed(ranks, "slow", rounds=2, budget_s=10)["slow"]) == 2


def test_ranks_share_the_processors(ranks: Ranks) -> None:
    import os

    threads = [a["threads"] for a in ranks.call(f"{toy_ranks.__name__}:whoami", {"word": ""}, 600)]
    assert threads[0] == threads[1] <= max(1, len(os.sched_getaffinity(0)) // 2)
