"""``autotune run``: a script that names no backend runs stored kernels, with its arguments and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.in_program.__main__ import replace_inductor
from autotune.in_program.backend import dynamo_backend
from autotune.measure.child import interpreter
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
    done = run("-m", "--", "train", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("__main__ 1\n")


def test_a_script_that_changes_its_folder_keeps_the_database(tune: Tune, db: str, tmp_path: Path) -> None:
    tune(softmax, (torch.randn(32, 48),))
    (tmp_path / "run 1").mkdir()
    (tmp_path / "moves.py").write_text("import os; os.chdir('run 1')\n" + SCRIPT)
    done = run("--db", "tuned.db", "moves.py", "0", cwd=tmp_path)
    assert done.stdout.endswith("__main__ 1\n"), done.stderr
    assert list((tmp_path / "run 1").iterdir()) == []


@pytest.mark.usefixtures("new_interpreters")
def test_a_relative_path_is_that_of_the_folder_in_which_autotune_was_imported(tmp_path: Path) -> None:
    (tmp_path / "run 1").mkdir()
    program = (
        "import autotune, os, subprocess, sys; os.chdir('run 1'); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    command = [sys.executable, "-c", program, "from autotune.store import Store; Store.open().close()"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTUNE_DB": "tuned.db"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run 1", "tuned.db"]
    assert list((tmp_path / "run 1").iterdir()) == []


def test_another_backend_stays(db: str, tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text(SCRIPT.replace("compile(softmax)", "compile(softmax, backend='eager')"))
    done = run("eager.py", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("__main__ 0\n")


def test_an_archive_and_a_folder_run_as_in_python(db: str, tmp_path: Path) -> None:
    folder = tmp_path / "application"
    folder.mkdir()
    (folder / "__main__.py").write_text(
        "import sys, torch, part; print(hasattr(torch.compile, '_autotune'), sys.path[0])"
    )
    (folder / "part.py").touch()
    archive = tmp_path / "application.pyz"
    zipapp.create_archive(folder, archive)
    for path in (folder, archive):
        done = run(str(path), cwd=tmp_path)
        assert done.stdout == f"True {path}\n", done.stderr


STARTS = """
import atexit, multiprocessing, subprocess, sys, torch

class Held:
    pass

def say(name):
    print(name, hasattr(torch.compile, "_autotune"), flush=True)

if __name__ == "__main__":
    seconds: float = 1.0
    assert sys.modules["__main__"].__annotations__ == {"seconds": float}, "compiled as Python does"
    say(__file__)
    process = multiprocessing.get_context("spawn").Process(target=say, args=("spawned",))
    process.start()
    process.join()
    subprocess.run([sys.executable, "-c", "import torch; print('launched', hasattr(torch.compile, '_autotune'))"])
    atexit.register(lambda: print("at exit", sys.modules["__main__"].Held.__name__))
"""


def test_processes_that_a_script_starts_run_as_it_does(db: str, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    done = run("starts.py", cwd=tmp_path)
    expected = [f"{tmp_path / 'starts.py'} True", "spawned True", "launched True", "at exit Held"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(
    ("given", "default", "expected"),
    [
        ({}, "inductor", "autotune"),
        ({"backend": None}, "inductor", "autotune"),
        ({"backend": "inductor"}, "eager", "autotune"),
        ({}, "eager", "eager"),
        ({"backend": "aot_eager"}, "inductor", "aot_eager"),
    ],
)
def test_inductor_alone_is_replaced(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], default: str, expected: str
) -> None:
    """torch 2.15 has a default backend that programs can change."""
    used: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, backend, **options: used.append(backend))
    monkeypatch.setattr(torch.compiler, "get_default_backend", lambda: default, raising=False)
    replace_inductor()
    torch.compile(softmax, **given)
    assert used == [dynamo_backend if expected == "autotune" else expected]


@pytest.mark.parametrize("name", ["AUTOTUNE_RUN", "TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG"])
def test_autotunes_own_processes_compile_by_inductor_without_logs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    _, environ = interpreter()
    assert name not in environ
    assert os.environ[name] == "1"


def test_a_path_that_python_does_not_import_from_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths: list[Any] = [tmp_path, "", *sys.path]
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.chdir(tmp_path.parent)
    _, environ = interpreter()
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path.parent)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent.py"], "there is no script absent.py"),
        (["-m", "absent"], "No module named absent"),
        (["-m", "absent.module"], "No module named 'absent'"),
        (["."], "can't find '__main__' module in"),
        (["--search", "long", "x.py"], "--search"),
        ([], "SCRIPT"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], says: str) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["fails.py"], ["-m", "fails"]])
@pytest.mark.parametrize("error", ["ValueError: mine", "ImportError: mine"])
def test_exceptions_of_the_script_are_its_own(tmp_path: Path, words: list[str], error: str) -> None:
    name, _, text = error.partition(": ")
    (tmp_path / "fails.py").write_text(f"raise {name}('{text}')")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(f"{error}\n")
