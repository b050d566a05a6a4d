"""Inductor's caches have code by the hook's ``uuid``: everything that changes the code is part of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from autotune.compiler.capture import hooks
from autotune.files import code_digest
from autotune.runtime import backend
from autotune.runtime.deployment import Deployment, use
from autotune.runtime.inductor import region_call


def identity(mode: str = "default", *, cpp: bool = False) -> object:
    return backend.passes({}, mode, cpp=cpp)["post_grad_custom_post_pass"].uuid()


def test_code_written_by_another_version_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "none.db"))
    use(Deployment())
    now = identity()
    assert now is not None
    assert identity() == now
    assert identity("max-autotune") != now
    assert identity(cpp=True) != now, "C++ leaves out regions that Python has"
    monkeypatch.setattr(region_call, "WRITTEN", b"region of another version")
    assert identity() != now


def test_graphs_that_other_code_rewrote_are_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def joint() -> object:
        return backend.passes({}, "default")["joint_custom_post_pass"].uuid()

    now = joint()
    assert now is not None
    assert joint() == now
    shutil.copytree(Path(hooks.__file__).parent, tmp_path / "capture")
    monkeypatch.setattr(hooks, "__file__", str(tmp_path / "capture" / "hooks.py"))
    assert joint() == now, "where the code lies does not matter"
    (tmp_path / "capture" / "products.py").write_text("# another rewriting")
    code_digest.cache_clear()
    assert joint() != now
