"""A search with a budget is never worse than one with half of it: it does the same first, and then goes on."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from autotune import api
from autotune.domain import open_task
from autotune.measure.policy import Policy
from autotune.measure.pool import Built, CompilePool
from autotune.store import Store
from autotune.task import Config
from autotune.tuner.result import Result
from autotune.workload import Workload
from tests.support.toy import lane_domain, pair_domain, toy_domain

pytestmark = pytest.mark.usefixtures("formula")


class Compiled(CompilePool):
    """Everything is compiled at once, in this process."""

    def submit(self, workload: Workload, device: str, config: Config) -> Future[Built]:
        future: Future[Built] = Future()
        future.set_result(Built(open_task(workload, device).build(config)))
        return future


def search(folder: Path, policy: Policy, workload: Workload, trials: int) -> tuple[Result, list[Config]]:
    """A search in a separate database; its result, and its candidates of ``workload``, in order."""
    measurer = lane_domain.Formula(workload)
    with Compiled(processes=3) as pool, Store.open(folder / f"{trials}.db") as store:
        options = {"policy": policy, "trials": trials, "measurer": measurer, "pool": pool}
        (found,) = api.tune_workloads([workload], "cpu", store, **options)
        return found, [m.config for m in store.measurements(workload.fingerprint, stage="screen")]


def test_half_of_a_budget_tries_the_first_half_of_the_candidates(tmp_path: Path, policy: Policy) -> None:
    workload = toy_domain.workload(seeds=[{"how": "vector", "block": 1}])
    half, whole = (search(tmp_path, policy, workload, trials)[1] for trials in (5, 10))
    assert (len(half), len(whole)) == (5, 10)
    assert whole[:5] == half


def test_a_whole_of_parts_is_no_worse_for_a_larger_budget(tmp_path: Path, policy: Policy) -> None:
    """Its parts share the budget, and with more of it more ways to cut the whole are followed."""
    a, b, rival = ({"rows": rows, "slow_us": us} for rows, us in ((64, 900), (32, 500), (128, 800)))
    workload = pair_domain.workload(a, b, rival=rival)
    found = [search(tmp_path, policy, workload, trials)[0] for trials in (4, 8, 16, 32)]
    reached = [lane_domain.latency(f.best) for f in found if f.best is not None]
    assert len(reached) == 4
    assert reached == sorted(reached, reverse=True)
