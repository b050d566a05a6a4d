"""The machine's faults are not the candidates': none is stored, and a search with repeated faults ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import api
from autotune.cli.searching import SearchOutcome, conclude
from autotune.errors import UserError
from autotune.measure.outcome import Blame, blame
from autotune.measure.policy import Policy
from autotune.store import Store
from autotune.task import Status
from autotune.tuner.result import Result
from tests.support.toy.toy_domain import workload

Search = Callable[..., list[Result]]
FATAL = ("build_disk", "load_disk", "build_killed", "run_killed", "run_memory")


@pytest.fixture
def tune(store: Store, policy: Policy) -> Search:
    def run(*specs: dict[str, Any], **options: Any) -> list[Result]:
        options = {"policy": policy, "trials": 100, "patience": 0, "sampler": "brute", **options}
        return api.tune_workloads([workload(**spec) for spec in specs], "cpu", store, **options)

    return run


def statuses(store: Store) -> set[Status]:
    return {m.status for m in store.measurements()}


@pytest.mark.parametrize("fault", FATAL)
def test_a_fault_that_stays_ends_the_search_and_is_no_candidates(
    tune: Search, store: Store, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec: dict[str, Any] = {"broken": {"vector": fault, "rows": fault}}
    results = tune(spec, {**spec, "columns": 64})
    (result,) = results  # the second workload is not begun
    assert result.fault
    assert not result.ok
    assert statuses(store) == set()
    assert store.stats()["claims"] == 0
    assert conclude([SearchOutcome({"not_begun": 1}, results, {}, lambda answer: None)], json=False) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("autotune: STOPPED, the machine failed on toy 64x256: ")


def test_a_workload_that_there_is_no_memory_for_does_not_end_the_search(
    tune: Search, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tune({"rows": 1 << 50}, {"rows": 64})
    assert [result.ok for result in results] == [False, True]
    assert not any(result.fault for result in results)
    assert "allocate memory" in results[0].error
    assert statuses(store) == {Status.OK}
    assert conclude([SearchOutcome({"not_begun": 0}, results, {}, lambda answer: None)], json=False) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("autotune: NOTHING COULD BE MEASURED for toy ")


@pytest.mark.parametrize("fault", ["build_disk", "load_disk"])
def test_a_full_disk_after_some_candidates_decides_nothing(tune: Search, store: Store, fault: str) -> None:
    (result,) = tune({"broken": {"vector": fault}})
    assert result.fault
    assert result.ok  # the default works, and is known
    assert (result.winner, store.schedules()) == ("", [])
    assert statuses(store) == {Status.OK}
    assert conclude([SearchOutcome({}, [result], {}, lambda answer: None)], json=True) == 1
    assert "No space left on device" in result.error


@pytest.mark.parametrize("fault", FATAL)
def test_a_fault_that_passes_costs_nothing(tune: Search, store: Store, fault: str, tmp_path: Path) -> None:
    (result,) = tune({"broken": {"vector": fault, "rows": fault}, "once": str(tmp_path)}, trials=3)
    assert not result.fault
    assert (result.measured, result.failed) == (3, {})
    assert len(list(tmp_path.iterdir())) >= 3  # and it was there
    assert statuses(store) == {Status.OK}


@pytest.mark.parametrize("fault", ["build_killed", "run_killed", "run_memory"])
def test_one_candidate_that_eats_all_memory_is_left_out_and_tried_again_next_time(
    tune: Search, store: Store, fault: str
) -> None:
    spec: dict[str, Any] = {"bad": True, "broken": {"wrong": fault}}
    seeds = {workload(**spec).fingerprint: [{"how": "wrong", "block": 1}, {"how": "vector", "block": 1}]}
    (result,) = tune(spec, trials=3, seeds=seeds)
    assert not result.fault
    assert result.winner
    assert sum(result.failed.values()) == 1
    assert statuses(store) == {Status.OK}
    (again,) = tune(spec, trials=1, seeds=seeds)
    assert again.measured == 1
    assert sum(again.failed.values()) == 1


def test_a_wrong_setting_is_the_users_to_mend(tune: Search, store: Store) -> None:
    with pytest.raises(UserError, match="TOY_DIR: cannot write /nowhere"):
        tune({"broken": {"vector": "build_setting"}})
    assert statuses(store) <= {Status.OK}
    assert store.stats()["claims"] == 0


def test_a_worker_that_somebody_stops_is_replaced_before_any_deadline(tune: Search, tmp_path: Path) -> None:
    (result,) = tune({"broken": {"rows": "run_stopped"}, "once": str(tmp_path)}, trials=1)
    assert result.failed == {}
    assert result.restarts == 1


def test_a_worker_that_cannot_be_started_is_reported(tune: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("autotune.measure.worker.Child", fail)
    (result,) = tune({}, trials=1)
    assert result.fault
    assert result.error == "the measuring worker on cpu cannot be started: Too many open files"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(28, "No space left on device"), Blame.MACHINE),
        (OSError(13, "Permission denied"), Blame.MACHINE),
        (OSError(2, "No such file or directory"), Blame.CANDIDATE),
        (RuntimeError("ld: final link failed: No space left on device"), Blame.MACHINE),
        (MemoryError(), Blame.LACK),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), Blame.LACK),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), Blame.LACK),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Blame.CANDIDATE),
        (UserError("mend it"), Blame.USER),
    ],
)
def test_errors_are_distinguished(error: Exception, fault: Blame) -> None:
    assert blame(error) == (fault, error)
    outer = RuntimeError("it does not compile")
    outer.__cause__ = error
    assert blame(outer) == (fault, error if fault else outer)
    outer = RuntimeError("it does not compile")
    outer.__context__ = error
    assert blame(outer) == (fault, error if fault else outer)
    outer.__suppress_context__ = True  # raised ``from None``
    assert blame(outer) == (Blame.CANDIDATE, outer)
