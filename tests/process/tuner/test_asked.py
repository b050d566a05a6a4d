"""Candidates that the caller asks for, and a worker and a pool that the caller lends to several searches."""

from __future__ import annotations

from autotune import api
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Worker
from autotune.store import Store
from autotune.task import Artifact
from tests.support.toy.toy_domain import ToyTask, workload


def test_what_is_asked_for_is_measured_first_with_what_was_lent(store: Store, policy: Policy) -> None:
    first, second = workload(), workload(32)
    asked = [{"how": "vector", "block": 2}, {"how": "vector", "block": 16}, {"how": "vector", "block": 5}]
    with Worker(first, "cpu", policy) as worker, CompilePool(processes=1) as pool:
        for each in (first, second):
            seeds = {each.fingerprint: asked}
            options = {"trials": 4, "seeds": seeds, "measurer": worker, "pool": pool, "policy": policy}
            assert api.tune_workloads([each], "cpu", store, **options)[0].measured == 4
            measured = store.measurements(workload=each.fingerprint, stage="screen")
            assert [m.config for m in measured] == [
                ToyTask(each, "cpu").default(),
                *asked[:2],
                {"how": "vector", "block": 4},  # the nearest that the space has
            ]
        assert worker.restarts == 0
        assert worker.measure(asked[0], _built(pool), stage="screen", seed=0).ok  # still open


def _built(pool: CompilePool) -> Artifact | None:
    return pool.submit(workload(32), "cpu", {"how": "vector", "block": 2}).result().artifact
