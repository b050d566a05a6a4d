"""The scripts for GPU hosts, as far as they go without one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autotune.measure.worker import WorkerFault
from tests.support import ROOT

FOLDER = ROOT / "tests" / "gpu"


NAMES = sorted(p.stem for p in (*FOLDER.glob("*_check.py"), *FOLDER.glob("*_soak.py")))
PLAIN = {"capture_check", "deploy_check"}  # take no options, and do nothing without a GPU


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.gpu.{name}")


@pytest.mark.parametrize("name", sorted({*NAMES} - PLAIN))
def test_it_tells_its_options(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        load(name).main()
    assert "--device" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_all_that_it_imports_is_there(name: str) -> None:
    load(name)


def test_bad_candidates_compile_or_are_refused_as_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOTUNE_CUDA_TARGET", "sm_90:132")
    assert load("bad_candidates").dry("cuda:0") == 0


@pytest.mark.parametrize("name", ["c3_check", "c3_soak"])
def test_c3_scripts_print_their_arguments_and_missing_devices(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = load(name)
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    assert "--ranks N" in capsys.readouterr().out
    monkeypatch.setattr("autotune.device._cuda_count", lambda: 0)
    assert script.main([]) == 2
    assert capsys.readouterr().err.startswith(f"{name}: device 'cuda:0' does not exist")
    monkeypatch.setattr("autotune.device._cuda_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert script.main([]) == 2
    assert "2 ranks or more, not 1" in capsys.readouterr().err


class FakeRanks:
    """Two ranks with prepared answers to a soak."""

    ranks = 2

    def __init__(self, answers: list[dict[str, Any]] | None) -> None:
        self.answers = answers

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, function: str, arguments: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        assert (function, arguments) == ("tests.gpu.c3.soak:soak", {"calls": 10, "seed": 3})
        if self.answers is None:
            raise WorkerFault("no answer of rank 1")
        return self.answers


@pytest.mark.parametrize(("wrong", "calls", "code"), [(0, 11, 0), (2, 11, 1), (0, 9, 1), (None, 0, 1)])
def test_a_soak_fails_on_one_wrong_element(
    wrong: int | None,
    calls: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    answer = {"calls": calls, "wrong": 0, "pairs": 3, "late": 1, "seconds": 0.5, "by_op": {"all_gather": calls}}
    answers = None if wrong is None else [answer, {**answer, "wrong": wrong, "seconds": 0.75}]
    script, out = load("c3_soak"), tmp_path / "soak.json"
    monkeypatch.setattr(script, "open_ranks", lambda options: (FakeRanks(answers), "cpu"))
    assert script.main(["--calls", "10", "--seed", "3", "--out", str(out)]) == code
    data = json.loads(out.read_text())
    assert {"device", "versions", "commit", "command"} <= data.keys()
    if wrong is None:
        assert data["fault"] == "no answer of rank 1"
    else:
        assert (data["wrong"], data["late"], data["seconds"], data["pairs"]) == (wrong, 2, 0.75, 3)
