"""The scripts for GPU hosts, as far as they go without one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent / "gpu"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Import a script by its name, which may reach for its neighbours as it does where it is run."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])

    def script(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return script


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*_check.py")))
def test_it_loads(load, name: str) -> None:  # type: ignore[no-untyped-def]
    assert callable(load(name).main)


def test_bad_candidates_compile_or_are_refused_as_they_should(
    load,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOTUNE_CUDA_TARGET", "sm_90:132")
    assert load("bad_candidates").dry("cuda:0") == 0
