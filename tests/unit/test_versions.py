"""Versions that the project supports: metadata, the Makefile, the workflow and the documents have the same ones."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = SpecifierSet(PROJECT["requires-python"])
DEPENDENCIES = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
PYTHONS = [f"3.{n}" for n in range(8, 30) if f"3.{n}.1" in PYTHON]
TORCHES = [f"2.{n}" for n in range(5, 40) if f"2.{n}.0" in DEPENDENCIES["torch"]]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_metadata_agrees_with_itself() -> None:
    said = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert said == PYTHONS
    deploy = {r.name: r.specifier for r in map(Requirement, PROJECT["optional-dependencies"]["deploy"])}
    assert deploy == {name: DEPENDENCIES[name] for name in ("torch", "numpy")}
    assert str(sys.version_info.minor) in [p.partition(".")[2] for p in PYTHONS]


@pytest.mark.parametrize(("name", "versions"), [("python", PYTHONS), ("torch", TORCHES)])
def test_the_hosted_workflow_runs_each_minor_version(name: str, versions: list[str]) -> None:
    ran = re.findall(rf'\b{name}: "(\d+\.\d+)', text(".github/workflows/ci.yml"))
    assert sorted(set(ran), key=lambda v: int(v.partition(".")[2])) == versions


@pytest.mark.parametrize(
    "document", ["README.md", "docs/tutorials/cpu.md", "CONTRIBUTING.md", "docs/reference/compatibility.md"]
)
def test_the_documents_name_the_versions(document: str) -> None:
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in text(document)
    if document != "docs/tutorials/cpu.md":
        assert f"{TORCHES[0]} to {TORCHES[-1]}" in text(document)
    wanted = [f"'torch{torch}'" for torch in re.findall(r"'torch([<>=.,\d]+)'", text("docs/how-to/deploy.md"))]
    assert [SpecifierSet(w.strip("'").removeprefix("torch")) for w in wanted] == [DEPENDENCIES["torch"]]


def test_the_makefile_takes_supported_interpreters_only(tmp_path: Path) -> None:
    """The only interpreter of the path reports some version."""
    make = shutil.which("make")
    assert make is not None
    after = f"3.{int(PYTHONS[-1].partition('.')[2]) + 1}"
    for version in ("3.10", *PYTHONS, after):
        fake, release = tmp_path / "python3", tuple(map(int, version.split(".")))
        code = f"import sys; sys.version_info = {(*release, 0)}; exec(sys.argv[2])"
        fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
        fake.chmod(0o755)
        command = [make, "-s", "--eval=chosen:;$(info $(PYTHON))", "chosen"]
        env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == (str(fake) if version in PYTHONS else ""), version
