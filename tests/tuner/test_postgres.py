"""A search whose measurements and study lie in a PostgreSQL database."""

from __future__ import annotations

from store.conftest import postgres_server, postgres_url

from autotune import api
from autotune.measure.policy import Policy
from autotune.store import Store

from .toy_domain import workload

__all__ = ["postgres_server", "postgres_url"]


def test_search_and_resume_on_postgresql(postgres_url: str, policy: Policy) -> None:
    with Store.open(postgres_url) as store:
        (first,) = api.tune_workloads([workload()], "cpu", store, trials=3, policy=policy)
        (again,) = api.tune_workloads([workload()], "cpu", store, trials=2, policy=policy)
        assert (first.measured, again.measured, again.reused) == (3, 2, 3)
        assert len(store.measurements(stage="screen")) == 5
        assert len(store.schedules()) == 1
