"""Candidates of the caller, and a worker and a pool that the caller lends to several searches."""

from __future__ import annotations

import dataclasses

import pytest

from autotune import api, task
from autotune.device import identify
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Worker
from autotune.store import Store
from autotune.task import Artifact
from tests.support.toy import lane_domain, toy_domain
from tests.support.toy.toy_domain import ToyTask, workload


def test_requested_candidates_are_measured_first_with_lent_processes(store: Store, policy: Policy) -> None:
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


def test_a_second_device_begins_with_the_best_of_the_first(
    store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's winner comes right after the default, before what heuristics suggest."""
    monkeypatch.setitem(task.DOMAINS, toy_domain.KIND, lane_domain.KINDS[toy_domain.KIND])
    work = workload(seeds=[{"how": "rows", "block": 1}])
    api.tune_workloads([work], "cpu", store, policy=policy, sampler="brute", patience=0)
    here = identify("cpu")
    monkeypatch.setattr("autotune.device.identify", lambda device: dataclasses.replace(here, name="a twin"))
    (found,) = api.tune_workloads([work], "cpu", store, policy=policy, trials=5)
    assert found.device != ""
    twin = dataclasses.replace(here, name="a twin").fingerprint
    tried = [m.config for m in store.measurements(device=twin, stage="screen")]
    assert tried[0] == ToyTask(work, "cpu").default()
    assert tried[1] == found.best == {"how": "vector", "block": 8}
    assert tried.index({"how": "rows", "block": 1}) > 2


def _built(pool: CompilePool) -> Artifact | None:
    return pool.submit(workload(32), "cpu", {"how": "vector", "block": 2}).result().artifact
