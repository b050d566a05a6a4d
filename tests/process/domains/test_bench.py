"""A rank's bench, in processes: what is right passes, every way to be wrong is caught, a search ends in a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autotune.api import tune_workloads
from autotune.domain import identity_of
from autotune.domains.c3 import task
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.domains.c3.strategy import HostStrategy, normalize
from autotune.store import Store

RANKS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(None, "cpu", task.policy("cpu"), ranks=RANKS) as ranks:
        yield ranks


def call(ranks: Ranks, name: str, **arguments: Any) -> list[Any]:
    return ranks.call(f"tests.support.c3.host_jobs:{name}", arguments, 60.0)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_strategy_is_right(ranks: Ranks, op: str) -> None:
    configs = [
        HostStrategy(order, engine, threads, copies).config()
        for (order, engine), (threads, copies) in product(
            product(["sequential", "comm_first", "gemm_first"], ["gloo", "copy"]), [(0, 1), (1, 2)]
        )
    ]
    scenario = Scenario(Gemm(130, 40, 50, "bf16", "nt"), op, 2 * 5001 * RANKS, RANKS, "bf16")
    for verdicts in call(ranks, "sound", data=scenario.to_json(), configs=configs):
        assert verdicts == [[True, "", c["engine"]] for c in configs]


@pytest.mark.parametrize("op", COLLECTIVES)
def test_an_engine_of_ones_own_is_a_file_and_a_line(ranks: Ranks, op: str) -> None:
    """Its file is ``tests/support/c3/toy_engine.py``; all else that a strategy needs finds it by the line."""
    configs = [HostStrategy(order, "send").config() for order in ("sequential", "comm_first", "gemm_first")]
    scenario = Scenario(Gemm(130, 40, 50, "bf16", "nt"), op, 2 * 5001 * RANKS, RANKS, "bf16")
    arguments = {"data": scenario.to_json(), "configs": configs}
    assert configs == [normalize(c, scenario, "cpu") for c in configs]
    for verdicts in ranks.call("tests.support.c3.toy_engine:sound", arguments, 60.0):
        assert verdicts == [[True, "", "send"]] * 3


def test_beside_a_users_program(ranks: Ranks) -> None:
    scenario = Scenario(
        Program("tests.support.c3.programs:pair", "tests.support.c3.programs:inputs"), "all_gather", 8000, RANKS, "f32"
    )
    config = HostStrategy("comm_first").config()
    assert call(ranks, "sound", data=scenario.to_json(), configs=[config]) == [[[True, "", "gloo"]]] * RANKS


@pytest.mark.parametrize("op", COLLECTIVES)
def test_wrong_results_are_caught(ranks: Ranks, op: str) -> None:
    verdicts = call(ranks, "caught", op=op)
    for fault in verdicts[0]:
        failed = [not v[fault][0] for v in verdicts]
        assert any(failed), fault
        if fault not in ("skipped_piece", "missing_rank"):  # those show on the receiving rank
            assert all(failed), fault
    guilty, victim = verdicts[1]["skipped_piece"], verdicts[0]["skipped_piece"]
    if op != "reduce_scatter":  # where a rank writes to itself only
        assert not victim[0]
        assert "was not written" in victim[1]
    else:
        assert "was not written" in guilty[1]
    assert "reduce_scatter, call 1" in verdicts[0]["stale"][1] or op != "reduce_scatter"


def test_baselines_and_references_run(ranks: Ranks) -> None:
    scenario = Scenario(Gemm(64, 32, 16, "f32"), "all_gather", 8000, RANKS, "f32")
    for answer in call(ranks, "alone", data=scenario.to_json()):
        assert answer["ran"] == [
            ["sequential", True, True],
            ["naive", True, True],
            ["compute", False, True],
            ["comm:gloo", True, False],
            ["comm:copy", True, False],
        ]
        assert answer["closed"]
        assert answer["bytes"] == 4 * (64 * 16 + 16 * 32 + 64 * 32) + 8000 + 4000


@pytest.mark.filterwarnings("ignore::autotune.tuner.result.BusyMachine")
def test_a_search_ends_in_a_schedule(tmp_path: Path) -> None:
    scenario = Scenario(Gemm(128, 128, 128, "f32"), "all_to_all", 1 << 16, RANKS, "f32")
    workload = scenario.workload()
    policy = replace(task.policy("cpu"), quiet_s=0.0, final_rounds=5)
    with Store.open(tmp_path / "c3.db") as store:
        (result,) = tune_workloads([workload], "cpu", store, trials=4, policy=policy)
        assert result.error == ""
        assert (result.measured, result.failed) == (4, {})
        assert {"sequential", "naive"} <= result.baselines.keys()
        (schedule,) = store.schedules(identity_of(workload, "cpu").fingerprint)
        assert schedule.key.workload == workload.fingerprint
        assert (schedule.family, schedule.extent) == (workload.family, 1 << 16)
        if schedule.config is not None:
            assert task.C3Task(workload, "cpu").space().contains(schedule.config)
