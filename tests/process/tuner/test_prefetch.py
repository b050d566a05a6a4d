"""Compiling what the next workloads begin with."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotune import api, domain, task
from autotune.errors import Unsupported
from autotune.measure.policy import Policy
from autotune.measure.pool import Built, CompilePool
from autotune.store import Store
from autotune.task import Config
from autotune.tuner import prefetch, seeds
from autotune.tuner.context import Context
from autotune.tuner.options import Budget, SearchOptions
from autotune.tuner.prefetch import WORKLOADS, Prefetcher, first
from autotune.tuner.result import Result
from autotune.workload import Workload
from tests.support.toy import pair_domain
from tests.support.toy.toy_domain import ToyTask
from tests.support.toy.toy_domain import workload as toy

ENDLESS = Budget()
SEEDS = [{"how": "vector", "block": b} for b in (1, 2, 64)]  # the last is outside the space


class Pool(CompilePool):
    """Notes the candidates to build, and those built in vain."""

    def __init__(self) -> None:
        super().__init__(1)
        self.noted: list[tuple[str, Config]] = []
        self.forgotten: list[set[str]] = []

    def prefetch(self, workload: Workload, device: str, config: Config) -> None:
        assert device == "cuda:0"
        self.noted.append((workload.fingerprint, config))

    def forget(self, workloads: Collection[str]) -> None:
        self.forgotten.append(set(workloads))


@pytest.fixture
def context(store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setitem(task.DOMAINS, pair_domain.KIND, pair_domain.__name__)
    monkeypatch.setattr(Context, "_stored_ids", lambda self, workload: ("device", "environment"))
    pool = Pool()
    yield Context(store=store, device="cuda:0", policy=policy, lent=(pool,), _pool=pool)
    pool.close()


def with_options(context: Context, **options: Any) -> Context:
    return replace(context, options=SearchOptions(**options))


def settle(waiting: Prefetcher) -> None:
    while not waiting.idle:
        time.sleep(0.01)


def pool_of(context: Context) -> Pool:
    pool = context.pool
    assert isinstance(pool, Pool)
    return pool


def noted(context: Context) -> list[tuple[str, Config]]:
    return pool_of(context).noted


def ahead_of(context: Context, works: list[Workload], budget: Budget = ENDLESS) -> Prefetcher:
    return Prefetcher(context, works, lambda i: budget)


def test_a_workload_begins_with_the_default_and_the_heuristics(context: Context) -> None:
    work = toy(rows=4, seeds=[*SEEDS, {"how": "rows", "block": 8}])  # a block of 8 rows of 4 is refused
    assert [config for _, config in first(context, work, ENDLESS)] == [{"how": "rows", "block": 4}, *SEEDS[:2]]
    asked = with_options(context, seeds={work.fingerprint: [{"how": "vector", "block": 4}]})
    assert [config["block"] for _, config in first(asked, work, ENDLESS)] == [4, 4, 1, 2]


def test_no_more_than_is_likely_to_be_asked_for(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "FIRST", 2)
    assert len(list(first(context, toy(seeds=SEEDS), ENDLESS))) == 2


def test_no_more_than_the_search_measures(context: Context) -> None:
    work = toy(rows=4, seeds=SEEDS)
    task = context.task(work)
    assert context.task(work) is task  # the search finds what was computed ahead of it
    begin = [task.normalize(seed.config) for seed in seeds.plan(task, task.space(), ())]
    for trials in (1, 2, 3):
        assert [config for _, config in first(context, work, Budget(trials=trials))] == begin[:trials]
    parts = pair_domain.workload({"rows": 8, "slow_us": 1, "seeds": SEEDS}, {"rows": 4, "slow_us": 2, "seeds": SEEDS})
    assert len(list(first(context, parts, Budget(trials=4)))) == 1 + 3 + 1  # the slower part, two thirds of the trials


def test_parts_come_before_the_whole(context: Context) -> None:
    work = pair_domain.workload({"rows": 8, "slow_us": 1}, {"rows": 4, "slow_us": 2, "seeds": SEEDS})
    found = [(w.fingerprint, config) for w, config in first(context, work, ENDLESS)]
    one, two = (toy(**work.spec[k]).fingerprint for k in "ab")
    assert [f for f, _ in found] == [one, two, two, two, work.fingerprint]
    assert found[-1][1] == pair_domain.PairTask(work, "cuda:0").default()


def test_a_few_workloads_ahead_and_none_that_is_known(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [toy(rows=r) for r in (2, 3, 4, 5, 6, 7)]
    known = works[1].fingerprint
    monkeypatch.setattr(Context, "measured", lambda self, w: w.fingerprint == known)
    real = domain.open_task

    def refused(workload: Workload, device: str) -> Any:
        if workload.fingerprint == works[2].fingerprint:
            raise Unsupported("of no kind that we know")
        return real(workload, device)

    monkeypatch.setattr("autotune.tuner.context.open_task", refused)
    with ahead_of(context, works) as waiting:
        waiting.advance(0)
        settle(waiting)
        before = [f for f, _ in noted(context)]
        waiting.advance(1)
        waiting.advance(1)
        settle(waiting)
        after = [f for f, _ in noted(context)]
        waiting.advance(5)
        settle(waiting)
    names = [w.fingerprint for w in works]
    assert before == [names[0], names[3]]
    assert WORKLOADS == 4
    assert after == [names[0], names[3], names[4]]
    assert [f for f, _ in noted(context)] == [names[0], names[3], names[4], names[5]]


def test_prefetch_follows_the_given_next_workloads(context: Context) -> None:
    works = [toy(rows=r) for r in (2, 3, 4, 5)]
    names = [w.fingerprint for w in works]
    with ahead_of(context, works) as waiting:
        waiting.advance(0, [3, 1])
        settle(waiting)
        assert [f for f, _ in noted(context)] == [names[0], names[3], names[1]]
        waiting.advance(3, [])
        settle(waiting)
        assert pool_of(context).forgotten == [{names[0], names[1]}]
        waiting.advance(2, [])
        settle(waiting)
    assert [f for f, _ in noted(context)][3:] == [names[2]]


def test_a_mistake_is_left_to_the_search(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [toy(rows=2), toy(rows=3)]
    real = ToyTask.seeds

    def broken(self: ToyTask) -> Any:
        if self.workload.extent == 2:
            raise ZeroDivisionError
        return real(self)

    monkeypatch.setattr(ToyTask, "seeds", broken)
    with ahead_of(context, works) as waiting:
        waiting.advance(0)
        settle(waiting)
    assert [f for f, _ in noted(context)] == [w.fingerprint for w in works]  # the default of both, at least


def test_parts_are_those_that_there_is_time_for(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_COMPOSITIONS", 3)
    monkeypatch.setattr("autotune.tuner.context.PLANS", 3)
    rival = {"rows": 128, "slow_us": 1}
    work = pair_domain.workload({"rows": 8, "slow_us": 1}, {"rows": 4, "slow_us": 2}, rival=rival)
    names = [toy(**work.spec[k]).fingerprint for k in ("a", "b", "rival")]
    for budget in (ENDLESS, Budget(timeout=60.0), Budget(trials=12)):
        assert [w.fingerprint for w, _ in first(context, work, budget)] == [*names, work.fingerprint]
    for budget in (Budget(timeout=3.0), Budget(trials=11)):
        assert [w.fingerprint for w, _ in first(context, work, budget)] == [*names[:2], work.fingerprint]


def test_plans_are_thought_out_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    true = pair_domain.PairTask.compositions

    def noted(self: pair_domain.PairTask, limit: int) -> Any:
        asked.append(self.workload.fingerprint)
        return true(self, limit)

    monkeypatch.setattr(pair_domain.PairTask, "compositions", noted)
    works = [pair_domain.workload({"rows": 8}, {"rows": r}) for r in range(2, 52)]
    for work in works:
        thread = threading.Thread(target=lambda work=work: list(first(context, work, ENDLESS)))
        thread.start()
        found = context.compositions(context.task(work))
        thread.join()
        assert context.compositions(context.task(work)) is found
    assert asked == [w.fingerprint for w in works]
    assert len(context._planned) < len(works)
    assert context.compositions(context.task(toy(rows=2))) == ()


def test_unused_builds_are_dropped_when_the_next_begins(context: Context) -> None:
    shared = {"rows": 16}
    works = [pair_domain.workload({"rows": 8}, shared), pair_domain.workload({"rows": 4}, shared), toy(rows=2)]
    names = [{toy(**w.spec[k]).fingerprint for k in "ab"} | {w.fingerprint} for w in works[:2]]
    names.append({works[2].fingerprint})
    with ahead_of(context, works) as waiting:
        waiting.advance(0)
        settle(waiting)
        assert pool_of(context).forgotten == []
        waiting.advance(1)
        waiting.advance(1)
        assert pool_of(context).forgotten == [names[0] - names[1]]
    assert pool_of(context).forgotten[1:] == [names[1] | names[2]]


@pytest.mark.parametrize("how", ["late", "interrupted"])
def test_only_builds_that_will_be_requested_are_handed_over(
    how: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [toy(rows=2), toy(rows=3), toy(rows=4)]
    thinking, go_on = threading.Event(), threading.Event()

    def slow(self: ToyTask) -> Any:
        thinking.set()
        assert go_on.wait(250)
        return SEEDS

    monkeypatch.setattr(ToyTask, "seeds", slow)
    with ahead_of(context, works) as waiting:
        waiting.advance(0)
        assert thinking.wait(250)
        if how == "late":
            waiting.advance(2)
        else:
            context.interrupt.requested = True
        go_on.set()
        settle(waiting)
        found = {f for f, _ in noted(context)}
    default = {works[0].fingerprint}  # it was handed over before there were suggestions
    assert found == (default | {works[2].fingerprint} if how == "late" else default)


def test_run_ends_without_waiting_for_an_endless_prefetch(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def endless(self: ToyTask) -> Iterator[Config]:
        while not ended.wait(0.01):
            yield self.default()

    monkeypatch.setattr(ToyTask, "seeds", endless)
    monkeypatch.setattr(prefetch, "_JOIN_S", 0.1)
    with ahead_of(context, [toy(rows=2)]) as waiting:
        waiting.advance(0)
    ended.set()  # not before


@pytest.mark.parametrize("active", [False, True])
def test_a_search_takes_builds_ahead(
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
        monkeypatch.setattr(prefetch, "_overlaps", lambda device: True)
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


def test_a_caller_may_compile_for_more_workloads(context: Context) -> None:
    works = [toy(rows=r) for r in range(2, 12)]
    with Prefetcher(context, works, lambda i: ENDLESS, 7) as waiting:
        waiting.advance(0)
        settle(waiting)
        assert {f for f, _ in noted(context)} == {w.fingerprint for w in works[:7]}


def test_workloads_that_are_alike_wait_for_their_leader(context: Context) -> None:
    works = [*(toy(columns=c, alike="layers", rows=4) for c in (8, 16, 32)), *(toy(rows=r) for r in (2, 3, 5, 6, 7))]
    first_ones = [works[i].fingerprint for i in (0, *range(3, 2 + WORKLOADS))]
    with ahead_of(context, works) as ahead:
        ahead.advance(0)
        settle(ahead)
        assert [*dict.fromkeys(f for f, _ in noted(context))] == first_ones, "those that follow a leader do not count"
        best = {"how": "vector", "block": 2}
        found = Result(first_ones[0], "", "toy", "cuda:0", "", best=best, winner="autotune")
        context.decided(works[0], found, cut=False, settled=False)
        del noted(context)[:]
        ahead.advance(3)
        settle(ahead)
        led = [(f, c) for f, c in noted(context) if f in {w.fingerprint for w in works[1:3]}]
    assert led == [], "they have had their turns"
    del noted(context)[:]
    with ahead_of(context, works) as ahead:
        ahead.advance(3, [1, 2, 4])
        settle(ahead)
    assert noted(context)[:2] == [(w.fingerprint, best) for w in works[1:3]], "one candidate each, before the others"
