"""Which wheels an offline GPU host lacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks import form

WORLD = {
    "one": ("1.0", ["two[fast]>=2", "torch>=2", "nvidia-cublas", "old; python_version < '3.9'"]),
    "two": ("2.1", ["three; extra == 'fast'", "four; extra == 'slow'", "one"]),
    "three": ("3.0", ["host"]),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_wheelhouse", form.ROOT / "scripts" / "build_wheelhouse.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_requirements_without_those_of_the_host(script: ModuleType) -> None:
    left_out = (*script.HOST_HAS, "host")
    found = script.closure(["one"], "3.12", left_out, lambda requirement: WORLD[requirement.name])
    assert found == {"one": "1.0", "two": "2.1", "three": "3.0"}


def test_the_projects_own_are_those_installed_here(script: ModuleType) -> None:
    pins = script.closure(script.project_requirements(), "3.12")
    assert {"numba", "optuna", "sqlalchemy", "numba-cuda", "cuda-core"} <= set(pins)
    assert not {"torch", "triton", "transformers"} & set(pins)
    with pytest.raises(SystemExit, match="no-such-package-x is not installed here"):
        script.closure(["no-such-package-x"], "3.12")


def test_an_extra_package_need_not_be_installed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **how: Any) -> Any:
        asked.append(command[-1])
        if "elsewhere" not in command[-1]:
            return SimpleNamespace(returncode=1, stdout="", stderr="WARNING: x\nERROR: no matching distribution\n")
        about = {"version": "0.8.5", "requires_dist": ["torch>=2.1", "triton>=2.3", "peft; extra == 'dev'"]}
        return SimpleNamespace(returncode=0, stdout=json.dumps({"install": [{"metadata": about}]}), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    known = script.installed_or_newest
    assert script.closure(["is-elsewhere>=0.8"], "3.12", known=known) == {"is-elsewhere": "0.8.5"}
    assert asked == ["is-elsewhere>=0.8"]
    assert known(Requirement("numpy"))[0].startswith("2."), "as installed here"
    with pytest.raises(SystemExit, match=r"no-such-x is neither .* nor found by pip: ERROR: no matching distribution"):
        known(Requirement("no-such-x"))
