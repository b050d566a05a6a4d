"""A search whose measurements and study are in a PostgreSQL database."""

from __future__ import annotations

import threading

import pytest

from autotune import api
from autotune.measure.policy import Policy
from autotune.store import Store
from autotune.tuner.result import Progress
from tests.support.postgres import PostgresServer
from tests.support.toy.toy_domain import workload


def test_search_and_resume_on_postgresql(postgres_url: str, policy: Policy) -> None:
    with Store.open(postgres_url) as store:
        (first,) = api.tune_workloads([workload()], "cpu", store, trials=3, policy=policy)
        (again,) = api.tune_workloads([workload()], "cpu", store, trials=2, policy=policy)
        assert (first.measured, again.measured, again.reused) == (3, 2, 3)
        assert len(store.measurements(stage="screen")) == 5
        assert len(store.schedules()) == 1


@pytest.mark.parametrize(("after", "when"), [(1, ""), (99, "done")])
def test_a_search_outlasts_its_server(
    own_server: PostgresServer, policy: Policy, after: int, when: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server goes away while candidates are measured, for longer than any single call would try."""
    later: list[threading.Timer] = []

    def progress(state: Progress) -> None:
        if not later and (state.measured >= after or state.phase == when):
            own_server.stop()
            later.append(threading.Timer(4, own_server.start))
            later[0].start()

    with Store.open(own_server.database()) as store:
        both = [workload(), workload(32)]
        first, second = api.tune_workloads(both, "cpu", store, trials=6, policy=policy, progress=progress)
        later[0].join()
        assert first.ok
        assert second.ok
        assert (first.measured, second.measured) == (6, 6)
        assert len(store.schedules()) == 2
    err = capfd.readouterr().err
    assert "waiting for it" in err
    assert "answers again" in err
