"""Inductor keeps compiled code by what the hook's ``uuid`` names: whatever changes that code is a part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.runtime import backend, database
from autotune.runtime.inductor import region_call


def identity(mode: str = "default", *, cpp: bool = False) -> object:
    return backend.passes({}, mode, cpp=cpp)["post_grad_custom_post_pass"].uuid()


def test_code_written_by_another_version_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "none.db"))
    database.forget_stores()
    now = identity()
    assert now is not None
    assert identity() == now
    assert identity("max-autotune") != now
    assert identity(cpp=True) != now, "C++ leaves out regions that Python has"
    monkeypatch.setattr(region_call, "WRITTEN", b"region of another version")
    assert identity() != now
