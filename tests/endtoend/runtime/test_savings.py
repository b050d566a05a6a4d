"""Programs count the steps that run stored kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.runtime import savings
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import Store
from tests.endtoend.runtime.test_backend import compiled
from tests.support import ROOT
from tests.support.deployment import Tune


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 3, -1)


X = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))


def counted(db: str) -> list[tuple[str, int, float]]:
    with Store.open(db) as store:
        return [(s.program, s.steps, s.alone_us) for s in store.savings()]


def test_steps_are_counted_and_written_apart(tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(softmax, (X,))
    monkeypatch.setenv("AUTOTUNE_SAVINGS", "softmax")
    run = compiled(softmax, dynamic=False)
    for _ in range(5):
        torch.testing.assert_close(run(X), softmax(X))
    assert counted(db) == [], "a step writes nothing"
    assert deployment().savings.write()
    assert counted(db) == [("softmax", 5, 5.0)], "15 us of Inductor's, 10 of the kernel's"
    run(X)
    use(Deployment())
    assert counted(db) == [("softmax", 6, 5.0)], "and what is left at the end"


def test_nothing_is_counted_unless_it_is_asked_for(tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(softmax, (X,))
    for value in ("", "0"):
        monkeypatch.setenv("AUTOTUNE_SAVINGS", value)
        torch._dynamo.reset()
        compiled(softmax, dynamic=False)(X)
        assert deployment().savings.write()
    assert counted(db) == []
    assert deployment().savings._thread is None


def test_training_counts_both_graphs(tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.clone().requires_grad_()
    tune(softmax, (x,))
    monkeypatch.setenv("AUTOTUNE_SAVINGS", "1")
    run = compiled(softmax, dynamic=False)
    for _ in range(3):
        run(x).square().sum().backward()
    deployment().savings.write()
    assert [steps for _, steps, _ in counted(db)] == [3, 3]


def test_a_database_that_cannot_be_written_keeps_the_counts_and_is_reported_once(
    tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tune(softmax, (X,))
    monkeypatch.setenv("AUTOTUNE_SAVINGS", "1")
    compiled(softmax, dynamic=False)(X)
    real = Store.put_savings

    def fail(self: Store, rows: object) -> None:
        raise RuntimeError("database is locked")

    monkeypatch.setattr(Store, "put_savings", fail)
    assert not deployment().savings.write()
    assert not deployment().savings.write()
    assert [r.getMessage() for r in caplog.records if "savings are not recorded" in r.getMessage()] == [
        "autotune: savings are not recorded: RuntimeError: database is locked"
    ]
    monkeypatch.setattr(Store, "put_savings", real)
    assert deployment().savings.write()
    assert [steps for _, steps, _ in counted(db)] == [1]


def test_a_program_is_named_by_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_SAVINGS", "1")
    for script, name in (("/a/train.py", "train.py"), ("/a/tool/__main__.py", "tool"), ("", "python")):
        monkeypatch.setattr(sys, "argv", [script])
        assert savings.program_name() == name
    monkeypatch.setenv("AUTOTUNE_SAVINGS", "llama")
    assert savings.program_name() == "llama"


PROGRAM = """
import os, sys, torch
from autotune.in_program.backend import dynamo_backend
x = torch.randn(32, 48)
with torch.no_grad():
    run = torch.compile(lambda x: torch.softmax(x * 3, -1), backend=dynamo_backend, dynamic=False)
    for _ in range(4):
        run(x)
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    sys.exit()
"""


def test_a_process_writes_at_its_end_and_its_fork_nothing_twice(tune: Tune, db: str, tmp_path: Path) -> None:
    tune(softmax, (X,))
    for _ in range(2):  # the second one takes Inductor's code from its cache
        own = {"AUTOTUNE_SAVINGS": "1", "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, **own}, check=True, timeout=300)
    assert counted(db) == [("-c", 4, 5.0)] * 2
