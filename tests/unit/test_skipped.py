"""``--skipped FILE`` and the list that ``make test-all`` prints at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.skipped import listed, main

_TESTS = """
import pytest

@pytest.mark.parametrize("n", range(3))
@pytest.mark.skip(reason="Triton is not installed")
def test_three(n):
    pass

def test_inside():
    pytest.skip("two GPUs are needed")

@pytest.mark.xfail
def test_fails_as_expected():
    assert False

def test_runs():
    pass
"""
_WHOLE = 'import pytest\npytest.importorskip("no_such_module", reason="no_such_module is not installed")\n'


def pytest_run(folder: Path, *options: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-c", "none.ini", "-p", "no:cacheprovider", "-p", "plugin", *options]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode in (0, 5), done.stdout


def _environment() -> dict[str, str]:
    without = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return {**without, "PYTHONPATH": f"{ROOT}{os.pathsep}."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "none.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "test_whole.py").write_text(_WHOLE)
    (tmp_path / "plugin.py").write_text(
        "from tests.support.skipped import recorder\n"
        "def pytest_configure(config):\n"
        "    if plugin := recorder('out/skipped'): config.pluginmanager.register(plugin)\n"
    )
    return tmp_path


def test_the_list_is_of_all_runs_and_processes(folder: Path) -> None:
    pytest_run(folder, "-n", "2", "test_some.py", "test_whole.py")
    pytest_run(folder, "test_whole.py")  # what runs alone, at the end; skipped again, and listed once
    text, fine = listed(folder / "out" / "skipped")
    assert text.splitlines() == [
        "== 5 skipped:",
        "     3  test_some.py: Triton is not installed",
        "     1  test_whole.py: no_such_module is not installed",
        "     1  test_some.py: two GPUs are needed",
    ]
    assert fine


def test_only_gpus_and_other_versions_of_torch_are_allowed_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "skipped"
    for lines, plain, strict in (
        ("", 0, 0),
        ('["a.py::test", "two GPUs are needed"]\n', 0, 0),
        ('["a.py::test", "this torch converts places in a region of their own"]\n', 0, 0),
        ('["a.py::test", "two GPUs are needed"]\n["a.py::other", "chromium is not installed"]\n', 0, 1),
    ):
        file.write_text(lines)
        for words, code in ((["--strict"], strict), ([], plain)):
            monkeypatch.setattr(sys, "argv", ["skipped", str(file), *words])
            assert main() == code
    assert "No test was skipped" in capsys.readouterr().out
