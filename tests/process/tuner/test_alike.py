"""Workloads that differ in constants alone: the first one is searched, and the others take what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from autotune import api
from autotune.domains.fusion.program_spec import workloads_of
from autotune.measure.policy import Policy
from autotune.store import Store
from autotune.tuner import study
from autotune.tuner.context import Session
from autotune.tuner.options import Budget
from autotune.tuner.phases.explore import ALIKE, TIME_UP, explore
from autotune.tuner.result import Result
from autotune.workload import Workload
from tests.support.toy.toy_domain import workload

Search = Callable[..., list[Result]]


@pytest.fixture
def tune(store: Store, policy: Policy) -> Search:
    def run(works: Sequence[Workload], **options: Any) -> list[Result]:
        given = {"trials": 12, "patience": 0, "sampler": "brute", "policy": policy, **options}
        return api.tune_workloads(works, "cpu", store, **given)

    return run


def layer(columns: int, **more: Any) -> Workload:
    return workload(columns=columns, alike="layers", slow_us=100, eager_us=10_000, **more)


def test_the_others_measure_one_candidate(tune: Search, store: Store) -> None:
    other = workload(columns=64, slow_us=100)
    one, two, three, alone = tune([layer(256), layer(128), layer(32), other])
    assert [r.measured for r in (one, two, three, alone)] == [12, 1, 1, 12]
    assert [r.stop for r in (two, three)] == [ALIKE, ALIKE]
    assert one.best is not None
    assert one.best["block"] == 8
    assert [(r.winner, r.best) for r in (two, three)] == [("autotune", one.best)] * 2
    assert len(store.schedules()) == 4


def test_they_are_compared_with_their_own_baselines(tune: Search) -> None:
    fast = workload(columns=128, alike="layers", slow_us=100, eager_us=0)
    one, two = tune([layer(256), fast])
    assert [(r.winner, r.best) for r in (one, two)] == [("autotune", one.best), ("eager", one.best)]


def test_a_configuration_that_does_not_work_leaves_the_whole_search(tune: Search) -> None:
    """The leader's best configuration fits no block of the second one, and the third one cannot run it."""
    one, small, broken = tune([layer(256), layer(128, rows=4), layer(32, broken={"vector": "run_memory"})])
    assert one.best == {"how": "vector", "block": 8}
    assert small.measured > 1
    assert small.best == {"how": "vector", "block": 4}
    assert broken.best == {"how": "rows", "block": 8}


def test_a_second_run_takes_the_stored_leader(tune: Search) -> None:
    options = {"trials": None, "sampler": "brute"}
    (one,) = tune([layer(256)], **options)
    again, two = tune([layer(256), layer(128)], **options)
    assert again.stop.startswith("nothing left to do")
    assert (two.measured, two.best) == (1, one.best)


def test_layers_of_a_network_with_stochastic_depth(tune: Search, store: Store) -> None:
    """Three layers whose probabilities differ, on a CPU: the kernels of all are verified with their own constants."""

    def block(x: torch.Tensor, noise: torch.Tensor, p: float) -> torch.Tensor:
        y = x + torch.nn.functional.gelu(x) * (noise < p) / p
        return torch.nn.functional.layer_norm(y, (64,)) * p

    works = []
    for p in (0.96, 0.94, 0.92):
        found = workloads_of(lambda x, noise, p=p: block(x, noise, p), (torch.randn(256, 64), torch.rand(256, 1)))
        works += [w for w, _ in found]
    assert len({w.fingerprint for w in works}) == 3
    one, two, three = tune(works, trials=4, sampler="tpe")
    assert (one.measured > 1, two.measured, three.measured) == (True, 1, 1)
    assert one.best == two.best == three.best
    assert all(r.winner and not r.failed for r in (one, two, three))


def test_a_leader_whose_time_was_up_is_a_seed_of_a_usual_search(tune: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layers share the time: the first one's tenth found the default, and all others took it."""

    def late(s: Session, budget: Budget, *, until_s: float | None) -> str:
        explore(s, budget, until_s=until_s)
        return TIME_UP

    monkeypatch.setattr(study, "explore", late)
    one, two = tune([layer(256), layer(128)], trials=None)
    assert one.stop == TIME_UP
    assert two.measured == 12, "it searches on"


def test_a_search_with_its_own_seeds_follows_nobody(tune: Search) -> None:
    asked = {"how": "rows", "block": 8}
    two = layer(128)
    one, found = tune([layer(256), two], seeds={two.fingerprint: [asked]}, trials=2)
    assert one.best != asked
    assert (found.measured, found.best) == (2, asked)


def test_a_failed_configuration_counts_as_a_candidate(tune: Search) -> None:
    _, broken = tune([layer(256), layer(32, broken={"vector": "run_memory"})], trials=2)
    assert broken.measured <= 2


def test_a_follower_is_finished_when_its_leader_is(tune: Search) -> None:
    works = [layer(256), layer(128)]
    tune(works, trials=None)
    again = tune(works, trials=None)
    assert [r.stop.startswith("nothing left to do") for r in again] == [True, True]
