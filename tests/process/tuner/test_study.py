"""Searches of the toy domain in this process: order, budgets, reuse, decisions, and every bad candidate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from autotune import api
from autotune.domain import open_task
from autotune.errors import UserError
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Worker, WorkerFault
from autotune.store import Store
from autotune.store.models import TABLE_PREFIX
from autotune.task import Status, config_key
from autotune.tuner import seeds
from autotune.tuner.result import BusyMachine, Progress, Result
from autotune.tuner.studies import Studies
from autotune.tuner.turns import Clock
from tests.support.toy.policy import Busy
from tests.support.toy.toy_domain import BAD, BLOCKS, EAGER_US, GOOD, ToyTask, takes_us, workload

Search = Callable[..., Result]


@pytest.fixture
def tune(store: Store, policy: Policy) -> Search:
    def run(spec: dict[str, Any] | None = None, **options: Any) -> Result:
        return api.tune_workloads([workload(**(spec or {}))], "cpu", store, **{"policy": policy, **options})[0]

    return run


def times(spec: dict[str, Any], how: str, block: int) -> float:
    """Microseconds of a candidate."""
    return takes_us(spec, {"how": how, "block": block})


def test_a_hopeless_default_is_not_compared(tune: Search, store: Store, policy: Policy) -> None:
    """The default, block 4, takes twice what block 8 does."""
    spec = {"slow_us": 2000}
    found = tune(spec, trials=100, patience=0, sampler="brute", policy=replace(policy, hopeless=1.5))
    assert found.best is not None
    assert found.best["block"] == 8
    assert [found.default_us, found.best_us] == [times(spec, "rows", 4), times(spec, "vector", 8)]
    default = config_key(ToyTask(workload(), "cpu").default())
    assert default in {config_key(m.config) for m in store.measurements(stage="screen")}
    assert default not in {config_key(m.config) for m in store.measurements(stage="final")}
    again = tune(spec, patience=0, sampler="brute", policy=replace(policy, hopeless=1.5))
    assert again.stop.startswith("nothing left to do")
    assert again.default_us == found.default_us


def test_whole_space_then_again_without_measuring(tune: Search, store: Store) -> None:
    seen: list[Progress] = []
    spec = {"slow_us": 1000}
    result = tune(spec, trials=100, patience=0, sampler="brute", progress=seen.append)
    assert result.ok
    assert result.measured == len(GOOD) * len(BLOCKS)
    assert result.stop == "every candidate of the space is known"
    assert result.best is not None
    assert result.best["block"] == 8
    assert result.failed == {}
    assert [result.default_us, result.best_us] == [times(spec, "rows", 4), times(spec, "vector", 8)]
    measured = store.measurements(stage="screen")
    assert measured[0].config == ToyTask(workload(), "cpu").default()
    assert len({config_key(m.config) for m in measured}) == len(measured) == 12
    assert [p.phase for p in seen][-1] == "done"
    assert [p.measured for p in seen if p.phase == "search"] == list(range(1, 13))
    again = tune(spec, trials=100, patience=0)
    assert (again.measured, again.reused, again.best) == (0, 12, result.best)
    assert again.deployed_us == result.deployed_us  # the same decision, not another comparison
    assert len(store.measurements(stage="screen")) == 12
    assert [r.state for r in store.runs()] == ["done", "done"]


def test_a_decision_of_a_busy_machine_is_made_again(tune: Search, store: Store, busy: Busy) -> None:
    spec = {"slow_us": 200}
    busy.others = 1.5
    with pytest.warns(BusyMachine, match=r"kept 1\.5 processors busy .* search again") as told:
        first = tune(spec, trials=100, patience=0, sampler="brute")
    # Once; other warnings meanwhile (objects of earlier tests that are collected now) do not count.
    assert sum(issubclass(w.category, BusyMachine) for w in told) == 1
    assert (first.busy, first.to_json()["others_busy"]) == (True, 1.5)
    (schedule,) = store.schedules()
    assert (schedule.others, schedule.busy) == (1.5, True)
    (row,) = store.overview()
    assert row.busy
    assert (store.stats()["busy"], store.stats()["speedup_geomean"]) == (1, None)
    before = {config_key(m.config): m.when for m in store.measurements(stage="final")}

    busy.others = 0.25  # as much as is tolerated
    with warnings.catch_warnings():
        warnings.simplefilter("error", BusyMachine)
        again = tune(spec, trials=100, patience=0)
    assert again.measured == 0  # only the comparison is repeated
    (schedule,) = store.schedules()
    assert (schedule.others, schedule.busy, again.busy) == (0.25, False, False)
    after = {config_key(m.config): m.when for m in store.measurements(stage="final")}
    assert all(after[key] > when for key, when in before.items())
    assert (store.stats()["busy"], store.stats()["schedules"]) == (0, 1)
    assert store.stats()["speedup_geomean"] >= 1

    busy.others = 3.0
    last = tune(spec, trials=100, patience=0)
    assert last.others == 0.25  # nothing new to compare: the quiet decision stays


def test_patience_ends_no_search_before_the_suggestions(tune: Search) -> None:
    blocks = (32, 16, 8, 2, 1)
    seeds = [{"how": "rows" if block != 8 else "vector", "block": block} for block in blocks]
    with CompilePool(processes=1) as pool:
        found = tune({"slow_us": 500, "seeds": seeds}, trials=100, patience=1, pool=pool)
    assert found.best == {"how": "vector", "block": 8}
    assert found.stop == "no gain of 1% in 1 candidates"


def test_every_bad_candidate_is_survived_and_named(tune: Search, store: Store) -> None:
    bad = [{"how": how, "block": 2} for how in BAD]
    result = tune({"bad": True, "seeds": bad}, trials=len(bad) + 1)
    assert result.ok
    assert result.measured == len(bad) + 1
    by_how = {m.config["how"]: m for m in store.measurements(stage="screen")}
    assert {how: str(m.status) for how, m in by_how.items()} == {
        "rows": "ok",
        "hang": "timeout",
        "segfault": "crashed",
        "exit": "crashed",
        "wrong": "wrong_result",
        "raise": "launch_error",
        "build_error": "compile_error",
        "build_crash": "compile_error",
        "build_hang": "compile_error",
    }
    assert all(m.reason for m in by_how.values() if m.status is not Status.OK)
    assert result.failed == {"timeout": 1, "crashed": 2, "wrong_result": 1, "launch_error": 2, "compile_error": 3}
    assert result.restarts >= 5
    assert result.baselines["crashing"] is None
    assert result.baseline_errors["inductor"] == "RuntimeError: no C++ compiler"


def test_a_faster_baseline_is_deployed(tune: Search, store: Store) -> None:
    result = tune({"slow_us": 3000}, trials=2)
    assert (result.winner, result.speedup, result.deployed_us) == ("eager", 1.0, EAGER_US)
    assert result.best is not None
    (schedule,) = store.schedules(artifacts=True)
    assert schedule.config is None
    assert schedule.artifact is None
    assert schedule.latency_us == schedule.baselines["eager"] == result.deployed_us


def test_candidate_that_is_faster_is_stored_with_its_artifact(tune: Search, store: Store) -> None:
    result = tune({"eager_us": 5000}, trials=3)
    assert (result.winner, result.baselines["eager"]) == ("autotune", EAGER_US + 5000)
    assert result.deployed_us is not None
    assert result.speedup == pytest.approx((EAGER_US + 5000) / result.deployed_us)
    (schedule,) = store.schedules(artifacts=True)
    assert schedule.config == result.best
    assert schedule.artifact is not None
    assert schedule.artifact.kernels[0].entry == "toy"
    data = result.to_json()
    assert data["best"]["latency_us"] == schedule.latency_us
    assert data["baselines"]["eager"]["latency_us"] > data["best"]["latency_us"]
    assert data["baselines"]["inductor"] == {"latency_us": None, "error": "RuntimeError: no C++ compiler"}


def test_a_reference_is_timed_and_neither_wins_nor_is_beaten(tune: Search, store: Store) -> None:
    spec = {"eager_us": 5000, "reference": True}
    result = tune(spec, trials=100, patience=0, sampler="brute")
    assert result.winner == "autotune"
    assert set(result.baselines) == {"eager", "inductor"}
    assert result.deployed_us == times(workload(**spec).spec, "vector", 8)
    assert result.references["nothing"] == 1.0  # and yet it is not what is deployed
    assert result.speedup == pytest.approx((EAGER_US + 5000) / result.deployed_us)
    assert result.to_json()["references"] == result.references
    (schedule,) = store.schedules()
    assert set(schedule.baselines) == {"eager", "=nothing"}
    assert schedule.rivals == {"eager": result.baselines["eager"]}
    assert schedule.references == result.references
    (overview,) = store.overview()
    assert set(overview.baselines) == {"eager"}
    assert overview.speedup == pytest.approx(result.speedup)
    again = tune(spec, trials=100, patience=0)  # answered from the store
    assert again.references == result.references
    assert set(again.baselines) == {"eager"}


def test_nothing_works_is_not_ok(tune: Search, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTask, "default", lambda self: {"how": "wrong", "block": 1})
    result = tune({"bad": True, "seeds": [{"how": "raise", "block": 1}]}, trials=2)
    assert not result.ok
    assert result.failed == {"wrong_result": 1, "launch_error": 1}
    assert store.schedules() == []
    assert store.runs()[0].state == "failed"


def test_a_machine_that_cannot_measure_is_reported(tune: Search, store: Store) -> None:
    result = tune({"columns": -1}, trials=2)
    assert not result.ok
    assert "cannot be opened" in result.error
    assert store.measurements() == []


def test_rejected_candidates_cost_no_trial(tune: Search, store: Store) -> None:
    result = tune({"rows": 4}, trials=50, patience=0, sampler="brute")
    assert result.measured == 6
    assert all(m.config["block"] > 4 for m in store.measurements(status="invalid"))  # type: ignore[operator]
    assert result.failed.get("invalid", 0) == len(store.measurements(status="invalid"))


@pytest.mark.usefixtures("half_a_second_each")
def test_trials_and_patience_and_time_end_a_search(tune: Search) -> None:
    assert tune(trials=4).stop == "the trials are used up"
    assert tune({"columns": 64, "slow_us": 500}, trials=100, patience=3).stop == "no gain of 1% in 3 candidates"
    timed = tune({"columns": 32}, trials=100, timeout=0.01)  # a search has a second at least
    assert (timed.stop, timed.measured, timed.ok) == ("the time is up", 2, True)


def test_time_before_a_fault_counts_as_search(tune: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later workloads would reserve as much time for work other than search."""

    def fail(self: Worker, *_: object, **__: object) -> None:
        raise WorkerFault("the device fell off the bus")

    monkeypatch.setattr(Worker, "measure", fail)
    result = tune(trials=3)
    assert result.error == "the device fell off the bus"
    assert result.seconds - result.search_s < 0.1 * result.seconds


def test_neighbours_come_right_after_the_default(tune: Search, store: Store) -> None:
    tune({"slow_us": 2000, "rows": 64}, trials=100, patience=0, sampler="brute")
    result = tune({"slow_us": 2000, "rows": 32}, trials=2)
    assert result.best is not None
    assert result.best["block"] == 8  # the neighbour's best, found with two trials
    measured = store.measurements(workload=result.workload, stage="screen")
    assert [m.config["block"] for m in measured] == [4, 8]


def test_a_search_is_seen_as_a_study_and_writes_none(tune: Search, store: Store) -> None:
    spec = {"bad": True, "seeds": [{"how": "raise", "block": 1}, {"how": "vector", "block": 8}]}
    tune(spec, trials=6)
    studies = Studies(store)
    (summary,) = optuna.get_all_study_summaries(studies)
    study = optuna.load_study(study_name=summary.study_name, storage=studies)
    assert study.user_attrs["workload"] == workload(**spec).fingerprint
    told = {t.params["how"]: t for t in study.get_trials()}
    assert (told["raise"].state, told["raise"].user_attrs["status"]) == (TrialState.FAIL, "launch_error")
    assert told["vector"].state is TrialState.COMPLETE
    assert study.best_trial.params["how"] in GOOD
    assert len(study.trials) == len(store.measurements(stage="screen")) == 6
    with store.reading() as c:
        tables = sa.inspect(c).get_table_names()
    assert all(table.startswith(TABLE_PREFIX) for table in tables)


def test_other_policy_is_another_key(tune: Search, policy: Policy) -> None:
    assert tune(trials=2).measured == 2
    assert tune(trials=2, policy=replace(policy, screen_repeats=4)).measured == 2


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_samplers_find_the_best(tune: Search, sampler: str) -> None:
    result = tune({"slow_us": 1000}, trials=12, patience=0, sampler=sampler, seed=3)
    assert result.measured == 12
    assert result.best is not None
    assert result.best["block"] == 8


def test_time_is_shared_by_weight_and_one_worker_serves_all(store: Store, policy: Policy) -> None:
    both = [workload(rows=16), workload(rows=32)]
    seen: list[Progress] = []
    results = api.tune_workloads(
        both,
        "cpu",
        store,
        trials=2,
        timeout=4000,
        weights={both[0].fingerprint: 3.0},
        policy=policy,
        progress=seen.append,
    )
    assert [r.workload for r in results] == [w.fingerprint for w in both]
    first = next(p for p in seen if p.workload == both[0].label)
    last = [p for p in seen if p.workload == both[1].label][-1]
    assert first.left_s is not None
    assert 2000 < first.left_s <= 3000  # three quarters of the time
    assert last.left_s is not None
    assert last.left_s + last.elapsed_s > 3000  # all that the first one left
    assert len(store.runs()) == 1
    assert results[1].restarts == 0


def test_remaining_workloads_are_not_begun_when_the_time_is_up(store: Store, policy: Policy) -> None:
    """The costliest comes first; the same search goes on with the others."""
    works = [workload(rows=16), workload(rows=32), workload(rows=48)]
    weights = {works[1].fingerprint: 3.0, works[2].fingerprint: 2.0}

    def begun(**options: Any) -> list[int]:
        found = api.tune_workloads(works, "cpu", store, timeout=0.05, weights=weights, policy=policy, **options)
        keys = [w.fingerprint for w in works]
        assert all(r.ok for r in found)
        return [keys.index(r.workload) for r in found]

    assert begun() == [1]  # in less than a worker takes to start
    assert begun() == [1, 2]
    assert begun() == [0, 1, 2]


def test_every_workload_is_begun_where_that_is_asked_for(store: Store, policy: Policy) -> None:
    works = [workload(rows=16), workload(rows=32), workload(rows=48)]
    found = api.tune_workloads(works, "cpu", store, timeout=0.05, policy=policy, every=True)
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert all(r.ok and r.measured for r in found)


@pytest.mark.filterwarnings("ignore::autotune.tuner.result.BusyMachine")
def test_a_winner_from_a_busy_machine_is_looked_for_again_after_those_that_have_none(
    store: Store, policy: Policy, busy: Busy
) -> None:
    works = [workload(rows=16), workload(rows=32)]
    first, second = (w.label for w in works)

    def searched() -> tuple[list[str], list[str]]:
        """Labels in the order in which they were searched, and those of busy results."""
        seen: list[Progress] = []
        found = api.tune_workloads(
            works, "cpu", store, timeout=0.05, weights={works[0].fingerprint: 9.0}, policy=policy, progress=seen.append
        )
        return list(dict.fromkeys(p.workload for p in seen)), [r.label for r in found if r.busy]

    busy.others = 1.5
    assert searched() == ([first], [first])
    busy.others = 0.0
    assert searched() == ([second], [first])
    assert searched() == ([first], [])
    assert searched() == ([], [])


def test_search_begins_a_workload_despite_slow_recall_of_known_ones(store: Store, policy: Policy) -> None:
    works = [workload(rows=16), workload(rows=32), workload(rows=48)]
    for n in range(1, 4):
        found = api.tune_workloads(works, "cpu", store, timeout=1e-9, policy=policy)
        assert [r.workload for r in found] == [w.fingerprint for w in works[:n]]
        assert [r.seconds > 0 for r in found] == [False] * (n - 1) + [True]


def test_known_results_are_reported_however_late(store: Store, policy: Policy) -> None:
    works = [workload(rows=16), workload(rows=32)]
    (known,) = api.tune_workloads(works[1:], "cpu", store, timeout=5.0, policy=policy)
    found = api.tune_workloads(works, "cpu", store, timeout=0.05, policy=policy)
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert found[1].measured == 0
    assert found[1].best == known.best


@pytest.mark.usefixtures("half_a_second_each")  # a second is spent before all candidates are measured
@pytest.mark.parametrize("known", [{"trials": 2}, {"timeout": 1e-9}])
def test_known_workload_with_more_budget_counts_as_not_begun_after_the_time(
    store: Store, policy: Policy, known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an earlier search with as many candidates as are asked for again, or with much less time than now."""
    works = [workload(rows=16), workload(rows=32), workload(rows=48)]
    (before,) = api.tune_workloads(works[2:], "cpu", store, policy=policy, **known)
    monkeypatch.setattr(Clock, "up", True)
    again = {"trials": 2, "timeout": 60.0} if "trials" in known else {"timeout": 60.0}
    first, last = api.tune_workloads(works, "cpu", store, policy=policy, **again)
    assert [w.fingerprint for w in (works[0], works[2])] == [first.workload, last.workload]
    assert (first.begun, last.begun) == (True, False)
    assert (last.best, last.measured) == (before.best, 0)
    assert last.stop.startswith("not begun")
    assert last.to_json()["begun"] is False


def test_all_schedules_are_read_once_however_many_workloads_are_known(
    store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [workload(rows=16), workload(rows=32)]
    api.tune_workloads(works, "cpu", store, timeout=60.0, policy=policy)
    reads: list[str | None] = []
    read = Store.schedules
    monkeypatch.setattr(Store, "schedules", lambda self, device=None: (reads.append(device), read(self, device))[1])
    found = api.tune_workloads(works, "cpu", store, timeout=60.0, policy=policy)
    assert [r.begun and r.seconds == 0 for r in found] == [True, True]
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 0}, "at least one"),
        ({"timeout": -1.0}, "above 0"),
        ({"patience": -1}, "patience"),
        ({"sampler": "cmaes"}, "unknown sampler 'cmaes'; the samplers are tpe, random, brute"),
    ],
)
def test_mistakes_are_reported(tune: Search, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tune(**options)


def test_no_workload(store: Store) -> None:
    with pytest.raises(UserError, match="nothing to search"):
        api.tune_workloads([], "cpu", store)


def test_search_takes_workloads(url: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = api.search(workload(), device="cpu", db=url, trials=1, policy=policy)
    assert result.ok


def test_seeds_are_each_once_and_in_the_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = open_task(workload(seeds=[{"how": "rows", "block": 4}, {"how": "vector", "block": 9}]), "cpu")
    space = task.space().restrict("how", ["vector"])
    plan = seeds.plan(task, space, [{"how": "vector", "block": block} for block in (4, 8, 2)])
    assert [(s.origin, s.config) for s in plan] == [
        ("default", {"how": "rows", "block": 4}),
        ("neighbour", {"how": "vector", "block": 4}),
        ("heuristic", {"how": "vector", "block": 8}),
        ("neighbour", {"how": "vector", "block": 2}),
    ]
