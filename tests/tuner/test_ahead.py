"""Compiling what the next workloads begin with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotune import api, task
from autotune.errors import Unsupported
from autotune.measure.policy import Policy
from autotune.measure.pool import Built, CompilePool
from autotune.store import Store
from autotune.task import Config
from autotune.tuner import ahead
from autotune.tuner.ahead import WORKLOADS, Ahead, first
from autotune.tuner.context import Context
from autotune.workload import Workload

from . import pair_domain
from .toy_domain import ToyTask
from .toy_domain import workload as toy

SEEDS = [{"how": "vector", "block": b} for b in (1, 2, 64)]  # the last is outside the space


class Pool(CompilePool):
    """Notes what it is to build."""

    def __init__(self) -> None:
        super().__init__(1)
        self.noted: list[tuple[str, Config]] = []

    def ahead(self, workload: Workload, device: str, config: Config) -> None:
        assert device == "cuda:0"
        self.noted.append((workload.fingerprint, config))


@pytest.fixture
def context(store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setitem(task.DOMAINS, pair_domain.KIND, pair_domain.__name__)
    monkeypatch.setattr(Context, "_place", lambda self, workload: ("device", "environment"))
    pool = Pool()
    yield Context(store=store, device="cuda:0", policy=policy, lent=(pool,), _pool=pool)
    pool.close()


def settle(waiting: Ahead) -> None:
    until = time.monotonic() + 30
    while not waiting.idle and time.monotonic() < until:
        time.sleep(0.01)


def noted(context: Context) -> list[tuple[str, Config]]:
    pool = context.pool
    assert isinstance(pool, Pool)
    return pool.noted


def test_a_workload_begins_with_the_default_and_what_the_heuristics_suggest(context: Context) -> None:
    work = toy(rows=4, seeds=[*SEEDS, {"how": "rows", "block": 8}])  # a block of 8 rows of 4 is refused
    assert [config for _, config in first(context, work)] == [{"how": "rows", "block": 4}, *SEEDS[:2]]
    asked = replace(context, seeds={work.fingerprint: [{"how": "vector", "block": 4}]})
    assert [config["block"] for _, config in first(asked, work)] == [4, 4, 1, 2]


def test_no_more_than_is_likely_to_be_asked_for(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "FIRST", 2)
    assert len(list(first(context, toy(seeds=SEEDS)))) == 2


def test_parts_come_before_the_whole(context: Context) -> None:
    work = pair_domain.workload({"rows": 8, "slow_us": 1}, {"rows": 4, "slow_us": 2, "seeds": SEEDS})
    found = [(w.fingerprint, config) for w, config in first(context, work)]
    one, two = (toy(**work.spec[k]).fingerprint for k in "ab")
    assert [f for f, _ in found] == [one, two, two, two, work.fingerprint]
    assert found[-1][1] == pair_domain.PairTask(work, "cuda:0").default()


def test_a_few_workloads_ahead_and_none_that_is_known(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [toy(rows=r) for r in (2, 3, 4, 5, 6, 7)]
    known = works[1].fingerprint
    monkeypatch.setattr(Context, "measured", lambda self, w: w.fingerprint == known)
    real = task.open_task

    def refused(workload: Workload, device: str) -> Any:
        if workload.fingerprint == works[2].fingerprint:
            raise Unsupported("of no kind that we know")
        return real(workload, device)

    monkeypatch.setattr("autotune.tuner.context.open_task", refused)
    with Ahead(context, works) as waiting:
        waiting.reach(0)
        settle(waiting)
        before = [f for f, _ in noted(context)]
        waiting.reach(1)
        waiting.reach(1)
        settle(waiting)
        after = [f for f, _ in noted(context)]
        waiting.reach(5)
        settle(waiting)
    names = [w.fingerprint for w in works]
    assert before == [names[0], names[3]]
    assert WORKLOADS == 4
    assert after == [names[0], names[3], names[4]]
    assert [f for f, _ in noted(context)] == [names[0], names[3], names[4], names[5]]


def test_a_mistake_is_left_to_the_search(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [toy(rows=2), toy(rows=3)]
    real = ToyTask.seeds

    def broken(self: ToyTask) -> Any:
        if self.workload.extent == 2:
            raise ZeroDivisionError
        return real(self)

    monkeypatch.setattr(ToyTask, "seeds", broken)
    with Ahead(context, works) as waiting:
        waiting.reach(0)
        settle(waiting)
    assert [f for f, _ in noted(context)] == [works[1].fingerprint]


@pytest.mark.parametrize("active", [False, True])
def test_a_search_takes_what_was_built_ahead(
    active: bool, store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is built ahead, since that would disturb what is measured."""
    began: list[str] = []
    real = CompilePool._build

    def build(self: CompilePool, number: int, workload: Workload, device: str, config: Config, opened: Any) -> Built:
        began.append(f"{workload.label} {config['how']} {config['block']}")
        return real(self, number, workload, device, config, opened)

    monkeypatch.setattr(CompilePool, "_build", build)
    if active:
        monkeypatch.setattr(ahead, "_overlaps", lambda device: True)
    works = [toy(rows=r, seeds=SEEDS) for r in (16, 32)]
    results = api.tune_workloads(works, "cpu", store, policy=policy, trials=4, sampler="random")
    assert [r.measured for r in results] == [4, 4]
    assert all(r.ok for r in results)
    first_two = {f"{w.label} {how} {b}" for w in works for how, b in (("rows", 4), ("vector", 1), ("vector", 2))}
    assert first_two <= set(began)
    assert len(began) == len(set(began))
    of_the_second = min(k for k, name in enumerate(began) if name.startswith(works[1].label))
    last_of_the_first = max(k for k, name in enumerate(began) if name.startswith(works[0].label))
    assert (of_the_second < last_of_the_first) == active
