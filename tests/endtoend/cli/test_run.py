"""``autotune run``: a script without a backend of its own runs stored kernels; arguments and exit code are its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT
from tests.support.deployment import Tune

SCRIPT = """
import sys
import torch
import autotune

def softmax(x):
    return torch.softmax(x * 3, -1)

run = torch.compile(softmax)
assert torch.allclose(run(torch.ones(32, 48)), softmax(torch.ones(32, 48)), atol=1e-5)
print(sys.argv, __name__, autotune.counters().hits)
sys.exit(int(sys.argv[1]))
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 3, -1)


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autotune", "run", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_runs_stored_kernels(tune: Tune, db: str, script: str, tmp_path: Path, code: int) -> None:
    tune(softmax, (torch.randn(32, 48),))
    done = run("--db", db, script, str(code), "--db", "its own", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout == f"{[script, str(code), '--db', 'its own']} __main__ 1\n"


def test_a_module_too(tune: Tune, db: str, script: str, tmp_path: Path) -> None:
    tune(softmax, (torch.randn(32, 48),))
    done = run("-m", "train", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("__main__ 1\n")


def test_another_backend_stays(db: str, tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text(SCRIPT.replace("compile(softmax)", "compile(softmax, backend='eager')"))
    done = run("eager.py", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("__main__ 0\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent.py"], "there is no script absent.py"),
        (["--search", "long", "x.py"], "--search"),
        ([], "SCRIPT"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], says: str) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_the_script_raises_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('mine')")
    done = run("fails.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: mine\n")
