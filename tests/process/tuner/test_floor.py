"""A search ends where nothing can be won: a candidate takes no longer than moving the bytes."""

from __future__ import annotations

import pytest

from autotune import api, task
from autotune.measure.policy import Policy
from autotune.store import Store
from autotune.tuner.phases.explore import AT_FLOOR, TIME_UP
from tests.support.clock import paced
from tests.support.toy import pair_domain, toy_domain
from tests.support.toy.toy_domain import workload as toy


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for domain in (toy_domain, pair_domain):
        monkeypatch.setitem(task.DOMAINS, domain.KIND, domain.__name__)


def test_the_first_candidate_at_the_floor_ends_it(store: Store, policy: Policy) -> None:
    (found,) = api.tune_workloads([toy(eager_us=5000, least_us=1e6)], "cpu", store, policy=policy)
    assert found.stop == AT_FLOOR
    assert found.measured == 1
    assert found.winner == "autotune"  # the comparison with the user's code runs in any case
    (again,) = api.tune_workloads([toy(eager_us=5000, least_us=1e6)], "cpu", store, policy=policy)
    assert again.measured == 0
    assert again.stop == f"nothing left to do: {AT_FLOOR}"


@pytest.mark.parametrize("least", [None, 1e-3])
def test_above_the_floor_it_goes_on(store: Store, policy: Policy, least: float | None) -> None:
    (found,) = api.tune_workloads([toy(slow_us=300, least_us=least)], "cpu", store, policy=policy)
    assert found.stop != AT_FLOOR
    assert found.measured == 12


@pytest.mark.parametrize(("expected", "parts"), [(1.0, 0), (1e7, 24), (None, 24)])
def test_parts_are_not_searched_where_the_default_is_expected_at_the_floor_and_is(
    store: Store, policy: Policy, expected: float | None, parts: int
) -> None:
    whole = pair_domain.workload(
        {"rows": 64, "slow_us": 900}, {"rows": 32, "slow_us": 500}, least_us=1e6, predicted=expected
    )
    (found,) = api.tune_workloads([whole], "cpu", store, policy=policy)
    if parts:
        assert found.stop != AT_FLOOR
        assert found.measured > parts
    else:
        assert (found.stop, found.measured) == (AT_FLOOR, 1)


def test_no_part_is_begun_after_the_time_if_the_default_works(
    store: Store, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced(2.0, monkeypatch.setattr)
    floor = {"least_us": 1500, "predicted": 1.0}  # the default takes 2800
    whole = pair_domain.workload({"rows": 64, "slow_us": 900}, {"rows": 32, "slow_us": 500}, eager_us=100_000, **floor)
    (short,) = api.tune_workloads([whole], "cpu", store, policy=policy, timeout=1.0)
    assert (short.measured, short.stop, short.winner) == (1, TIME_UP, "autotune")
    (longer,) = api.tune_workloads([whole], "cpu", store, policy=policy, timeout=600.0)
    assert longer.measured > 24


@pytest.mark.parametrize(("eager_us", "at_floor"), [(0, True), (100_000, False)])
def test_a_baseline_at_the_floor_ends_it_before_parts_are_searched(
    store: Store, policy: Policy, eager_us: int, at_floor: bool
) -> None:
    floor = {"least_us": 1500, "predicted": 1.0}  # the default takes 2800
    whole = pair_domain.workload({"rows": 64, "slow_us": 900}, {"rows": 32, "slow_us": 500}, eager_us=eager_us, **floor)
    (found,) = api.tune_workloads([whole], "cpu", store, policy=policy)
    assert (found.stop == AT_FLOOR) is at_floor
    assert (found.measured == 1) is at_floor
    assert found.winner == ("eager" if at_floor else "autotune")
    (again,) = api.tune_workloads([whole], "cpu", store, policy=policy)
    assert (again.measured, again.winner) == (0, found.winner)


def test_who_asks_for_all_candidates_gets_them(store: Store, policy: Policy) -> None:
    (found,) = api.tune_workloads([toy(least_us=1e6)], "cpu", store, policy=policy, patience=0, sampler="brute")
    assert found.measured == 12
