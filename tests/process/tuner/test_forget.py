"""Failures that are forgotten are tried again; nothing else is lost."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from autotune import api
from autotune.cli.app import main
from autotune.errors import UserError
from autotune.measure.policy import Policy
from autotune.store import Store
from autotune.store.upkeep import forget_failures
from autotune.task import Status
from autotune.tuner.result import Result
from tests.support.toy.toy_domain import workload

SEEDS = [{"how": "raise", "block": 1}, {"how": "build_error", "block": 2}]


def search(store: Store, policy: Policy, rows: int = 64, trials: int | None = 3) -> Result:
    spec = {"rows": rows, "bad": True, "seeds": SEEDS}
    options = {"trials": trials, "timeout": None if trials else 1.0, "patience": 0 if trials else None}
    return api.tune_workloads([workload(**spec)], "cpu", store, policy=policy, **options)[0]


def counted(store: Store) -> Counter[str]:
    return Counter(str(m.status) for m in store.measurements(stage="screen"))


def test_forgotten_candidates_are_tried_again(store: Store, policy: Policy) -> None:
    search(store, policy)
    before = store.schedules()
    assert counted(store) == {"ok": 1, "launch_error": 1, "compile_error": 1}
    assert sum(forget_failures(store, [Status.COMPILE_ERROR]).values()) == 1
    assert counted(store) == {"ok": 1, "launch_error": 1}
    again = search(store, policy, trials=1)
    assert (again.measured, again.failed) == (1, {"compile_error": 1})  # it was the next thing to try
    assert store.schedules() == before
    assert list(forget_failures(store).values()) == [2]
    assert counted(store) == {"ok": 1}
    assert forget_failures(store) == {}


def test_a_workload_or_a_reason_is_picked(store: Store, policy: Policy) -> None:
    search(store, policy)
    search(store, policy, rows=32)
    assert list(forget_failures(store, workload="32x256", reason="512 KiB").values()) == [1]
    assert counted(store) == {"ok": 2, "launch_error": 2, "compile_error": 1}
    assert forget_failures(store, reason="100%") == {}
    with pytest.raises(UserError, match=r"has no workload 'bert'"):
        forget_failures(store, workload="bert")
    with pytest.raises(UserError, match="'ok' is not a failure"):
        forget_failures(store, [Status.OK])


def test_a_completed_search_is_begun_again(store: Store, policy: Policy) -> None:
    search(store, policy)  # records the failures, on a busy machine too
    search(store, policy, trials=None)
    assert search(store, policy, trials=None).stop.startswith("nothing left to do")
    forget_failures(store)
    assert not search(store, policy, trials=None).stop.startswith("nothing left to do")


def test_the_command(store: Store, policy: Policy, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    search(store, policy)
    assert main(["db", "forget", "--db", url, "--status", "compile_error", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"database": store.name, "forgotten": 1, "workloads": 1}
    assert main(["db", "forget", "--db", url, "--status", "compile_error"]) == 0
    assert "no such failure" in capsys.readouterr().out
    assert main(["db", "forget", "--db", url]) == 0
    assert "deleted 1 failures of 1 workloads" in capsys.readouterr().out
    assert main(["db", "forget", "--db", url, "--workload", "bert"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
