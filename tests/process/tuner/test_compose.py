"""Searching by parts: each is tuned once for all workloads that have it, and the whole is decided by measuring it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import api, task
from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Worker
from autotune.store import Store
from autotune.task import Composition, Ranked, Status
from autotune.tuner.context import Session
from autotune.tuner.options import Budget
from autotune.tuner.phases import compose
from autotune.tuner.phases.compose import Parts
from autotune.tuner.result import Progress, Result
from tests.support.toy import lane_domain, pair_domain
from tests.support.toy.pair_domain import workload
from tests.support.toy.toy_domain import workload as toy

A, B, C = {"rows": 64, "slow_us": 900}, {"rows": 32, "slow_us": 500}, {"rows": 16, "slow_us": 500}
ALL = {"patience": 0, "sampler": "brute"}
Tune = Callable[..., Result]


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.DOMAINS, pair_domain.KIND, pair_domain.__name__)


@pytest.fixture
def tune(store: Store, policy: Policy) -> Tune:
    def run(a: dict[str, int], b: dict[str, int], rival: dict[str, int] | None = None, **options: object) -> Result:
        whole = workload(a, b, **({"rival": rival} if rival else {}))
        return api.tune_workloads([whole], "cpu", store, **{"policy": policy, **ALL, **options})[0]  # type: ignore[arg-type]

    return run


def screened(store: Store, fingerprint: str) -> int:
    return len(store.measurements(workload=fingerprint, stage="screen"))


def test_parts_are_tuned_once_and_the_whole_is_measured(tune: Tune, store: Store) -> None:
    seen: list[Progress] = []
    first = tune(A, B, progress=seen.append)
    assert first.ok
    assert first.best is not None
    best = {"g0.how": "vector", "g0.block": 8, "g1.how": "vector", "g1.block": 8}
    assert {n: v for n, v in first.best.items() if n != "plan"} == best  # each part's, found in its own search
    assert first.winner == "autotune"
    assert (screened(store, toy(**A).fingerprint), screened(store, toy(**B).fingerprint)) == (12, 12)
    wholes = store.measurements(workload=first.workload, stage="screen")
    assert {m.config.get("plan", "apart") for m in wholes} == {"apart", "swapped"}
    assert len(wholes) == 3  # the default, and the best of both compositions; the hopeless one was not followed up
    assert screened(store, toy(rows=48, slow_us=1).fingerprint) == 0
    assert first.measured == 27
    assert first.default_us is not None
    assert first.deployed_us is not None
    assert first.deployed_us < first.default_us
    assert {p.workload for p in seen} == {"pair 64 32"}
    counts = [p.measured for p in seen]
    assert counts == sorted(counts)

    second = tune(A, C)  # shares a part
    assert second.ok
    assert second.measured == 10 + 3  # a block of 32 has more rows than the new part
    assert screened(store, toy(**A).fingerprint) == 12


def test_the_best_whole_is_polished(store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few wholes are known then, and no sampler proposes any: neighbours of the best are tried at once."""
    monkeypatch.setitem(task.DOMAINS, pair_domain.KIND, lane_domain.__name__)
    (found,) = api.tune_workloads([workload(A, B)], "cpu", store, policy=policy)
    wholes = [m.config for m in store.measurements(workload=found.workload, stage="screen")]
    steps = [sum(c.get(name) != whole.get(name) for name in c) for c in wholes for whole in wholes[:3]]
    assert steps.count(1) >= 5, wholes


def test_nothing_left_to_do_starts_nothing(tune: Tune, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tune(A, B)

    def started(*args: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(Worker, "__init__", started)
    again = tune(A, B)
    assert again.measured == 0
    assert again.stop.startswith("nothing left to do: no gain")
    same = ("best", "deployed_us", "default_us", "winner", "baselines", "workload", "label")
    assert {n: getattr(again, n) for n in same} == {n: getattr(first, n) for n in same}
    with pytest.raises(AssertionError, match="worker was started"):
        tune(A, B, sampler="random")  # another scope: its measurements do not count
    with pytest.raises(AssertionError, match="worker was started"):
        tune(A, B, trials=1)  # so many more, in any case


@pytest.mark.usefixtures("half_a_second_each")
def test_a_search_with_much_more_time_goes_on(tune: Tune, store: Store) -> None:
    first = tune(A, B, timeout=2.0, sampler="tpe", patience=None)
    assert first.stop == "the time is up"
    again = tune(A, B, timeout=3.0, sampler="tpe", patience=None)
    assert (again.measured, again.stop) == (0, "nothing left to do: the time is up")
    more = tune(A, B, timeout=40.0, sampler="tpe", patience=None)
    assert more.measured > 0


def test_trials_are_shared_by_the_parts(tune: Tune, store: Store) -> None:
    result = tune(A, B, trials=6, sampler="tpe")
    parts = [screened(store, toy(**spec).fingerprint) for spec in (A, B)]
    assert sum(parts) == 6
    assert parts[0] > parts[1] > 0  # in proportion to their predicted times
    assert result.measured <= 6 + 3


RIVAL = {"rows": 128, "slow_us": 800}


def plans(store: Store, result: Result) -> set[object]:
    return {m.config.get("plan", "apart") for m in store.measurements(workload=result.workload, stage="screen")}


@pytest.mark.usefixtures("half_a_second_each")
def test_a_short_search_follows_the_most_promising_up_and_a_longer_one_goes_on(tune: Tune, store: Store) -> None:
    short = tune(A, B, RIVAL, timeout=2.0)  # a bit more than a second for parts: no more than the first need
    assert short.ok
    assert short.best is not None
    assert screened(store, toy(**RIVAL).fingerprint) == 0
    assert min(screened(store, toy(**spec).fingerprint) for spec in (A, B)) > 0
    assert plans(store, short) == {"apart", "swapped"}  # which has the same parts
    assert short.stop == "the time is up"  # not settled, though it may have seen all of the first plan's parts
    known = tune(A, B, RIVAL, timeout=3.0)
    assert (known.measured, known.stop) == (0, "nothing left to do: the time is up")
    longer = tune(A, B, RIVAL, timeout=200.0)  # more than they take
    assert screened(store, toy(**RIVAL).fingerprint) == 12
    assert plans(store, longer) == {"apart", "swapped", "rival"}
    assert longer.stop == "no gain in any part"
    assert tune(A, B, RIVAL, timeout=2000.0).stop == "nothing left to do: no gain in any part"


@pytest.mark.usefixtures("half_a_second_each")
def test_compose_gives_remaining_time_to_the_best_interrupted_part(
    tune: Tune, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[tuple[str, float]] = []
    stops = ["the time is up"]
    true = compose.explore

    def explored(s: Session, budget: Budget, *, until_s: float | None) -> str:
        assert budget.timeout is not None
        searched.append((s.key.workload, budget.timeout))
        stop = true(s, budget, until_s=until_s)
        return stops[0] or stop

    monkeypatch.setattr(compose, "explore", explored)
    a, b = toy(**A).fingerprint, toy(**B).fingerprint
    first = tune(A, B, timeout=600.0)
    assert [part for part, _ in searched] == [a, b, a, b]
    assert searched[2][1] + searched[3][1] > 100.0  # of several hundred for parts, most of which they do not take
    assert (first.measured, first.reused) == (27, 0)  # nothing twice, and nothing was known before
    assert first.stop == "the time is up"

    searched.clear()
    tune(A, {**C, "columns": 128}, timeout=1.0)  # nothing is left
    assert len(searched) == 1  # the first part is known as far as it would be searched
    searched.clear()
    stops[0] = ""
    tune({**A, "columns": 128}, {**B, "columns": 128}, timeout=600.0)  # nothing was cut short
    assert len(searched) == 2


def test_builds_of_a_part_are_kept_until_the_parts_are_done(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    gone: list[set[str]] = []
    keep, forget, explore = CompilePool.keep, CompilePool.forget, compose.explore

    def noted(self: CompilePool, *given: Any) -> None:
        keep(self, *given)
        kept.append(len(self._prefetched))

    def forgotten(self: CompilePool, workloads: Collection[str]) -> None:
        gone.append(set(workloads))
        forget(self, workloads)
        assert not self._prefetched

    def cut(s: Session, budget: Budget, *, until_s: float | None) -> str:
        return explore(s, budget, until_s=0.0)  # over as soon as one is measured, others being compiled

    monkeypatch.setattr(CompilePool, "keep", noted)
    monkeypatch.setattr(CompilePool, "forget", forgotten)
    monkeypatch.setattr(compose, "explore", cut)
    monkeypatch.setattr("autotune.measure.pool.default_processes", lambda: 3)
    monkeypatch.setattr("autotune.tuner.phases.explore._QUIET_S", 0.0)
    assert tune(A, B).ok
    assert len(kept) >= 2
    assert max(kept) >= 1
    assert gone == [{toy(**A).fingerprint, toy(**B).fingerprint}]


def test_measurements_choose_the_best_without_a_model_of_plans() -> None:
    def made(*specs: dict[str, int]) -> Composition:
        parts = tuple(toy(**spec) for spec in specs)

        def combine(choices: Sequence[Sequence[Ranked]]) -> list[Ranked]:
            return [({}, sum(c[0][1] for c in choices))] if len(specs) < 3 else []  # three do not fit together

        return Composition(str(specs), parts, (1.0,) * len(parts), 0.0, combine)

    found: dict[str, list[Ranked]] = {toy(**A).fingerprint: [({}, 9.0)], toy(**B).fingerprint: [({}, 5.0)]}
    slow, quick, apart, unknown = made(A), made(B), made(A, B, B), made(C)
    assert compose._best([slow, apart, unknown, quick], Parts(found)) is quick
    assert compose._best([apart, unknown], Parts(found)) is None


def test_the_best_of_the_whole_elsewhere_is_measured(tune: Tune, store: Store) -> None:
    first = tune(A, B)
    one = store.measurements(workload=first.workload, stage="screen")[0]
    other = DeviceIdentity("cpu", "Another CPU", 4, 1024, "x86_64", threads=4)
    there = replace(one.key, device=store.put_device(other))
    odd = {"g0.how": "rows", "g0.block": 1, "g1.how": "rows", "g1.block": 2}
    for config in (odd, {**odd, "plan": "gone"}):
        store.add_measurement(replace(one, key=there, config=config, samples=(1.0,)))
    second = tune(A, B, trials=40)
    here = [m.config for m in store.measurements(workload=first.workload, device=one.key.device, stage="screen")]
    assert second.measured == 1
    assert odd in here
    assert "gone" not in {config.get("plan") for config in here}


def test_few_trials_go_to_the_most_promising(tune: Tune, store: Store) -> None:
    few = tune(A, B, RIVAL, trials=11, sampler="tpe")  # four for each part is the least
    assert screened(store, toy(**RIVAL).fingerprint) == 0
    assert sum(screened(store, toy(**spec).fingerprint) for spec in (A, B)) >= 11
    assert few.stop == "the trials are used up"
    more = tune(A, B, RIVAL, trials=36, sampler="tpe")
    assert screened(store, toy(**RIVAL).fingerprint) > 0
    assert "rival" in plans(store, more)


def test_methods_go_to_the_domain(tune: Tune, store: Store) -> None:
    result = tune(A, B, method="short")
    assert {m.config.get("plan", "apart") for m in store.measurements(workload=result.workload)} == {"apart"}


def test_unknown_methods_are_told(tune: Tune) -> None:
    with pytest.raises(UserError, match="unknown way to choose plans 'measure'; did you mean 'measured'"):
        tune(A, B, plans="measure")
    with pytest.raises(UserError, match="no method 'greedy'"):
        tune(A, B, plans="greedy")


def test_a_narrowed_space_holds_for_parts_too(tune: Tune, store: Store, tmp_path: Path) -> None:
    wide = tune(A, B)
    assert wide.best is not None
    mine = tmp_path / "mine.toml"
    mine.write_text("block = [1, 16]")  # the one takes twice as long as the other
    narrow = tune(A, B, space_file=str(mine))
    assert narrow.best is not None
    assert (narrow.best["g0.block"], narrow.best["g1.block"]) == (16, 16)
    (schedule,) = store.schedules()
    assert schedule.config == narrow.best


@pytest.mark.parametrize("narrowed", [False, True])
def test_a_search_goes_on_where_the_best_so_far_has_a_plan_that_is_gone(
    narrowed: bool, tune: Tune, store: Store, tmp_path: Path
) -> None:
    first = tune(A, B, trials=4, sampler="tpe")
    m = next(m for m in store.measurements(workload=first.workload) if m.status is Status.OK)
    for stage in ("screen", "repeat"):
        store.add_measurement(replace(m, config={**m.config, "plan": "gone"}, stage=stage, latency_us=1.0))
    mine = tmp_path / "mine.toml"
    mine.write_text("block = [1, 16]")
    again = tune(A, B, trials=4, sampler="tpe", **({"space_file": str(mine)} if narrowed else {}))
    assert again.ok
    assert again.best is not None
    assert again.best.get("plan") != "gone"
    (schedule,) = store.schedules()
    assert schedule.config == again.best


@pytest.mark.usefixtures("half_a_second_each")
def test_the_time_of_wholes_is_limited_too(tune: Tune, store: Store) -> None:
    """Beyond it, the default and the best composition are measured all the same."""
    found = tune(A, B, timeout=4.0)
    assert found.best is not None
    (whole,) = [
        w
        for w in store.get_workloads(m.key.workload for m in store.measurements()).values()
        if w.kind == pair_domain.KIND
    ]
    measured = store.measurements(workload=whole.fingerprint, stage="screen")
    assert len(measured) == 2
    assert found.best in [m.config for m in measured]
