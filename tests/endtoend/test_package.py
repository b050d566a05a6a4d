"""The built wheel, installed in a separate environment outside the checkout, works for a new user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment holding only the wheel. Its dependencies are those of the environment that runs the tests.

    They come through a ``.pth`` file, which adds its folder behind the environment's own; ``.pth`` files in there (that
    of the editable install) are not read, so the checkout stays out of reach.
    """
    root = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site,) = (root / "lib").glob("python3.*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    import torch

    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    return root


def run(venv: Path, cwd: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    program = [str(venv / "bin" / command[0]), *command[1:]]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"autotune", f"{wheel.name.split('-py3')[0]}.dist-info"}
    for name in ("py.typed", "search_spaces/fusion.toml", "db/env.py", "schedules/h200.atdb"):
        assert f"autotune/{name}" in names
    assert [n for n in names if n.startswith("autotune/benchmarks/")] == ["autotune/benchmarks/c3_scenarios.toml"]
    assert any(name.startswith("autotune/db/versions/0001") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".db", ".pyc"))]


def test_the_installed_package_is_the_wheels(venv: Path, tmp_path: Path) -> None:
    code = """
import importlib.metadata as m, importlib.util as u, json
import autotune
from autotune.files import resource_dir
backends = [e.value for e in m.entry_points(group="torch_dynamo_backends") if e.name == "autotune"]
print(json.dumps([autotune.__file__, str(resource_dir("db")), str(resource_dir("search_spaces")), backends,
                  [n for n in ("db", "search_spaces", "benchmarks", "tests") if u.find_spec(n)],
                  m.version("autotune-torch") == autotune.__version__]))
"""
    file, db, spaces, backends, strays, same = json.loads(run(venv, tmp_path, "python", "-c", code).stdout)
    for path in (file, db, spaces):
        assert Path(path).is_relative_to(venv)
    assert Path(db, "env.py").exists()
    assert Path(spaces, "fusion.toml").exists()
    assert set(backends) == {"autotune.in_program.backend:dynamo_backend"}
    assert strays == []
    assert same


def test_the_command_answers(venv: Path, tmp_path: Path) -> None:
    assert "search" in run(venv, tmp_path, "autotune", "--help").stdout
    assert "ag-equal-proj" in run(venv, tmp_path, "autotune", "workloads").stdout
    assert run(venv, tmp_path, "autotune", "--version").stdout.startswith("autotune 0.")


def test_a_database_is_made_and_looked_up(venv: Path, tmp_path: Path) -> None:
    run(venv, tmp_path, "autotune", "db", "upgrade", "--db", "sqlite:///x.db")
    assert (tmp_path / "x.db").stat().st_size > 0
    lookup = ("lookup", "fusion", "layer_norm", "--device", "cpu", "--db", "sqlite:///x.db", "--json")
    found = json.loads(run(venv, tmp_path, "autotune", *lookup).stdout)
    assert found["match"] == "none"
