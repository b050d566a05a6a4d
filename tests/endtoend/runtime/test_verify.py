"""Stored kernels are compared with the region's operators; what is wrong is used no more, here and later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import autotune
from autotune.compiler.lower.rules import RULES
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, use
from autotune.runtime.ladder import Level
from autotune.runtime.launch import cpu as cpu_launch
from autotune.runtime.launch.verify import Check
from autotune.store import Store
from autotune.store.snapshot_writer import export_snapshot
from autotune.store.upkeep import forget_failures
from autotune.task import Status
from tests.endtoend.runtime.test_backend import close, compiled
from tests.support.deployment import Tune


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 3, -1)


X = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))


def anew() -> None:
    """As another process would begin."""
    use(Deployment())
    torch._dynamo.reset()


def test_a_wrong_result_is_replaced_and_the_schedule_given_up(
    tune: Tune, wrong: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (stored,) = tune(softmax, (X,))
    run = autotune.compile(softmax, verify="first")
    for _ in range(3):
        close(run(X), softmax(X))
    assert len(wrong) == 1, "it is not launched again"
    assert autotune.counters().wrong_results == autotune.counters().fallbacks == 1
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "returned wrong results and is not used any more" in told
    torch._dynamo.reset()
    close(autotune.compile(softmax, verify="never")(X), softmax(X))
    assert len(wrong) == 1, "nor compiled in again"
    with Store.open() as store:
        (kept,) = store.measurements(workload=stored.fingerprint)
        assert (kept.status, kept.stage) == (Status.WRONG_RESULT, "deployed")
        assert "instead of" in kept.reason


def test_later_processes_pass_it_over_until_it_is_forgotten(tune: Tune, wrong: list[int]) -> None:
    tune(softmax, (X,))
    with Store.open() as store:
        before = store.state()
    autotune.compile(softmax, verify="first")(X)
    anew()
    with Store.open() as store:
        assert store.state() != before, "compiled code in Inductor's caches is not taken for current"
    assert autotune.lookup(softmax, (X,)).level is Level.NONE
    close(compiled(softmax)(X), softmax(X))
    assert autotune.counters().misses == 1
    with Store.open() as store:
        noted = store.state()
        assert sum(forget_failures(store, [Status.WRONG_RESULT]).values()) == 1
        assert store.state() != noted
    anew()
    assert autotune.lookup(softmax, (X,)).level is Level.EXACT


def test_new_search_replaces_a_wrong_schedule_by_a_slower_one(tune: Tune, wrong: list[int]) -> None:
    import dataclasses

    (stored,) = tune(softmax, (X,))
    autotune.compile(softmax, verify="first")(X)
    with Store.open() as store:
        (bad,) = store.schedules(artifacts=True)
        slower = dataclasses.replace(bad, config=None, artifact=None, winner="inductor", latency_us=99.0)
        assert store.put_schedule(slower)
        found = store.get_schedule(stored.fingerprint, bad.key.device, autotune.device.environment("cpu"))
        assert found is not None
        assert found.winner == "inductor"


def test_always_and_never(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(softmax, (X,))
    checked: list[int] = []
    real = Check.wrong
    monkeypatch.setattr(Check, "wrong", lambda self, *a: checked.append(1) or real(self, *a))  # type: ignore[func-returns-value]
    for how, times in (("always", 3), ("first", 1), ("never", 0), ("auto", 0)):
        torch._dynamo.reset()
        use(Deployment())
        checked.clear()
        run = autotune.compile(softmax, verify=how)  # type: ignore[arg-type]
        for _ in range(3):
            close(run(X), softmax(X))
        assert len(checked) == times, how
        assert autotune.counters().wrong_results == 0


def test_calls_of_other_threads_are_compared_until_one_is_right(
    tune: Tune, wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread calls the kernel while the results of the first call are compared."""
    tune(softmax, (X,))
    run = autotune.compile(softmax, verify="first")
    seen: list[torch.Tensor] = []
    real = Check.wrong

    def during(self: Check, *tensors: Any) -> str:
        if not seen:
            seen.append(X)
            thread = threading.Thread(target=lambda: seen.append(run(X)))
            thread.start()
            thread.join()
        return real(self, *tensors)

    monkeypatch.setattr(Check, "wrong", during)
    close(run(X), softmax(X))
    close(seen[1], softmax(X))
    assert len(wrong) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no scratch"), KeyboardInterrupt()], ids=repr)
def test_a_call_that_was_not_compared_does_not_count(
    tune: Tune, wrong: list[int], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    tune(softmax, (X,))
    run = autotune.compile(softmax, verify="first")
    real = Check.wrong

    def interrupted(*_: Any) -> str:
        raise error

    monkeypatch.setattr(Check, "wrong", interrupted)
    with pytest.raises(type(error)):
        run(X)
    monkeypatch.setattr(Check, "wrong", real)
    for _ in range(2):
        close(run(X), softmax(X))
    assert len(wrong) == 2


def test_other_rows_are_checked_by_default(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search verified the kernel for the rows that it was tuned for, not for these."""
    tune(softmax, (X,))
    checked: list[int] = []
    real = Check.wrong
    monkeypatch.setattr(Check, "wrong", lambda self, *a: checked.append(1) or real(self, *a))  # type: ignore[func-returns-value]
    run, other = compiled(softmax, dynamic=False), torch.randn(64, 48)
    for _ in range(3):
        close(run(other), softmax(other))
    assert autotune.counters().hits_other_rows == 1
    assert len(checked) == 1
    monkeypatch.setenv("AUTOTUNE_VERIFY", "never")
    anew()
    close(compiled(softmax, dynamic=False)(other), softmax(other))
    assert len(checked) == 1


def test_rounding_is_no_wrong_result(tune: Tune) -> None:
    """Operators of half precision round after each step; kernels once. The oracle accepts both."""

    def steps(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.7
        for _ in range(6):
            y = (y + 100.0) * 1.01 - 101.0
        return F.softmax(y, -1) - y.mean(-1, keepdim=True)

    x = torch.randn(64, 200).to(torch.bfloat16)
    tune(steps, (x,))
    run = autotune.compile(steps, verify="always")
    for _ in range(2):
        run(x)
    assert autotune.counters().hits == 1
    assert autotune.counters().wrong_results == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_a_wrong_graph_is_found(tune: Tune, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The oracle computes the same wrong numbers as the kernel, so that the operators decide."""

    def distance(x: torch.Tensor) -> torch.Tensor:
        return x.abs() * 3

    x = (X * 20).to(dtype)
    monkeypatch.setitem(RULES, "abs", lambda region, x: x)
    tune(distance, (x,))
    run = autotune.compile(distance, verify="first")
    for _ in range(2):
        close(run(x), distance(x))
    assert autotune.counters().wrong_results == 1


def test_a_wrong_kernel_of_half_precision_is_found(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1) * 2

    x = torch.randn(64, 200).to(torch.bfloat16)
    tune(shifted, (x,))
    real = cpu_launch.make_launches

    def make(plan: Any, config: Any, tuned: Any = None) -> Any:
        def spoilt(launch: Callable[..., None]) -> Callable[..., None]:
            def run(stream: int, pointers: Any) -> None:
                import ctypes

                launch(stream, pointers)
                ctypes.memset(pointers[-1] + 300, 0x3C, 2)  # about 0.01 in the place of another small number

            return run

        return [(groups, spoilt(launch)) for groups, launch in real(plan, config, tuned)]

    monkeypatch.setattr(cpu_launch, "make_launches", make)
    close(autotune.compile(shifted, verify="first")(x), shifted(x))
    assert autotune.counters().wrong_results == 1


def test_nothing_is_recorded_in_a_snapshot(tune: Tune, db: str, wrong: list[int], tmp_path: Path) -> None:
    tune(softmax, (X,))
    file = tmp_path / "frozen.atdb"
    with Store.open(db) as store:
        export_snapshot(store, file)
        before = store.state()
    data = file.read_bytes()
    autotune.load(file)
    run = autotune.compile(softmax, verify="first")
    for _ in range(2):
        close(run(X), softmax(X))
    assert autotune.counters().wrong_results == 1
    assert file.read_bytes() == data
    with Store.open(db) as store:
        assert store.state() == before
        assert store.measurements() == []


def test_settings_refuse_invalid_values_of_verify_and_rows(db: str) -> None:
    with pytest.raises(UserError, match="auto, first, always, never"):
        autotune.compile(softmax, verify="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="auto, first, always, never"):
        autotune.configure(verify="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="ratio of rows"):
        autotune.configure(rows=0.5)


def test_a_setting_that_is_none_finds_nothing(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt wish for caution must not be taken for the default."""
    tune(softmax, (X,))
    monkeypatch.setenv("AUTOTUNE_ENVIRONMENT", "strictly")
    anew()
    close(compiled(softmax)(X), softmax(X))
    assert autotune.counters().hits == 0
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("AUTOTUNE_ENVIRONMENT: 'strictly' must be one of strict, loose, ignore" in text for text in told)


def test_a_changed_setting_holds_for_later_compilations(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(softmax, (X,))
    checked: list[int] = []
    real = Check.expected

    def expected(self: Check, inputs: Any) -> Any:
        checked.append(1)
        return real(self, inputs)

    monkeypatch.setattr(Check, "expected", expected)
    try:
        for how, times in (("never", 0), ("always", 3), ("never", 0)):
            autotune.configure(verify=how)
            torch._dynamo.reset()
            checked.clear()
            run = torch.compile(softmax, backend="autotune")
            for _ in range(3):
                close(run(X), softmax(X))
            assert len(checked) == times
    finally:
        use(Deployment())
