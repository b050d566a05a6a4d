"""Faults in deployment, of the database, a kernel or autotune itself: the model runs, with one warning."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autotune
from autotune.compiler.targets.cpu.launcher import CpuKernel
from autotune.runtime.deployment import Deployment
from autotune.runtime.inductor import region_pass
from autotune.runtime.launch import cpu as cpu_launch
from autotune.store import Store
from tests.endtoend.runtime.test_backend import close, compiled
from tests.support.deployment import Tune
from tests.support.runtime.models import Block, assert_same_step, twin


def test_a_broken_database(db: str, caplog: pytest.LogCaptureFixture) -> None:
    Path(db).write_bytes(b"no database at all")
    model, x = Block().eval(), torch.randn(8, 48)
    with torch.no_grad():
        close(compiled(model)(x), model(x))
        torch._dynamo.reset()
        close(compiled(model)(x), model(x))
    assert "tuned.db" in _only_warning(caplog)
    assert Path(db).read_bytes() == b"no database at all", "what is not ours is left alone"
    assert autotune.counters().misses == 4


def test_a_database_of_another_version(tune: Tune, db: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Block().eval(), torch.randn(8, 48)
    with torch.no_grad():
        tune(model, (x,))
        with sqlite3.connect(db) as connection:
            connection.execute("UPDATE autotune_alembic_version SET version_num = 'zzzz'")
        close(compiled(model)(x), model(x))
    assert "newer than revision" in _only_warning(caplog)
    assert autotune.counters().misses == 2


def _only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (warning,) = [r for r in caplog.records if r.name == "autotune" and r.levelname == "WARNING"]
    return warning.getMessage()


def test_a_read_only_database(tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    tune(fn, (torch.randn(32, 48),))
    opened = Store.open
    monkeypatch.setattr(Store, "open", lambda url=None, **k: opened(url, **(k | {"readonly": True, "migrate": False})))
    x, other = torch.randn(32, 48), torch.randn(32, 56)
    close(compiled(fn, dynamic=False)(x), fn(x))
    assert autotune.counters().hits == 1
    close(compiled(fn, dynamic=False)(other), fn(other))
    monkeypatch.undo()
    with Store.open(db) as store:
        assert store.misses() == []


def test_a_damaged_schedule_is_a_miss(tune: Tune, db: str) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        with sqlite3.connect(db) as connection:
            connection.execute("UPDATE autotune_artifacts SET kernels = '[]'")
        close(compiled(model)(x), model(x))
    assert autotune.counters().hits == 0
    assert autotune.counters().misses == 2


def test_a_kernel_that_cannot_be_loaded(tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        stored = tune(model, (x,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_launch, "make_launches", _fail)
            close(compiled(model)(x), model(x))
    assert autotune.counters().fallbacks == len(stored)
    assert sum("is not used: no such kernel" in r.getMessage() for r in caplog.records) == len(stored)


def _fail(*args: Any) -> Any:
    raise RuntimeError("no such kernel")


def test_a_launch_that_fails_falls_back_for_good(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    x = torch.randn(32, 48)
    tune(fn, (x,))
    launches = []
    monkeypatch.setattr(CpuKernel, "bind", lambda *a: lambda *b: (launches.append(b), _fail()))
    f = compiled(fn)
    close(f(x), fn(x))
    close(f(x), fn(x))
    assert len(launches) == 1
    assert autotune.counters().fallbacks == 1
    assert sum("failed and is not used any more" in r.getMessage() for r in caplog.records) == 1


def test_a_fall_back_requires_no_gradient(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generated code gets a parameter as it is, outside of ``no_grad``."""
    weight = nn.Parameter(torch.randn(48))

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(x * weight, -1)

    x = torch.randn(32, 48)
    tune(fn, (x,))
    monkeypatch.setattr(CpuKernel, "bind", lambda *a: lambda *b: _fail())
    y = compiled(fn)(x)
    close(y, fn(x))
    assert autotune.counters().fallbacks == 1
    assert not y.requires_grad


def test_a_fall_back_under_autocast_keeps_its_types(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    x = torch.randn(32, 48)
    monkeypatch.setattr(CpuKernel, "bind", lambda *a: lambda *b: _fail())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tune(fn, (x,))
        y, want = compiled(fn)(x), fn(x)
    assert y.dtype == want.dtype
    close(y, want)
    assert autotune.counters().fallbacks == 1


def test_memory_that_runs_out_is_no_fault_of_a_kernel(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    def full(*args: Any) -> Any:
        if not freed:
            raise torch.OutOfMemoryError("no memory")
        return launch(*args)

    x = torch.randn(32, 48)
    tune(fn, (x,))
    freed: list[bool] = []
    bind, launch = CpuKernel.bind, None

    def binding(*args: Any) -> Any:
        nonlocal launch
        launch = bind(*args)
        return full

    monkeypatch.setattr(CpuKernel, "bind", binding)
    f = compiled(fn)
    with pytest.raises(torch.OutOfMemoryError):
        f(x)
    freed.append(True)
    close(f(x), fn(x))
    assert autotune.counters().fallbacks == 0


def test_a_graph_that_is_not_looked_up(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Block(), torch.randn(32, 48)
    assert tune(twin(model), (x.clone().requires_grad_(),))
    monkeypatch.setattr(region_pass, "regions_from", _fail)
    assert_same_step(compiled(model), model, twin(model), x)
    assert autotune.counters().hits == autotune.counters().misses == 0
    assert "not looked up: RuntimeError: no such kernel" in _only_warning(caplog)


def test_regions_that_are_not_replaced(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of those that fail nothing is left in the graph, and the others are replaced."""
    made, failing = Deployment.keep_match, iter([True, False, True, False, False, False])

    def first_and_third(*args: Any) -> None:
        made(*args)
        if next(failing):
            _fail()

    model, x = Block(), torch.randn(32, 48)
    stored = tune(twin(model), (x.clone().requires_grad_(),))
    monkeypatch.setattr(Deployment, "keep_match", first_and_third)
    assert_same_step(compiled(model), model, twin(model), x)
    assert autotune.counters().hits == len(stored) - 2
    assert sum("is left to Inductor" in r.getMessage() for r in caplog.records) == 2
