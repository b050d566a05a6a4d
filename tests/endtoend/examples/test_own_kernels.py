"""docs/how-to/own-kernels.md is run as it is written; the examples it names are tuned, stored and looked up."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PAGE = ROOT / "docs" / "how-to" / "own-kernels.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def command(*words: str, cwd: Path, db: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)]), "AUTOTUNE_DB": str(db)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=env, cwd=cwd, timeout=550
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # a search waits for a quiet machine, again and again
def test_the_page_runs(tmp_path: Path) -> None:
    """Files are written under the names that their first lines say, commands are run as they come."""
    ran = 0
    for language, text in BLOCKS:
        if language == "bash":
            for line in text.strip().splitlines():
                words = shlex.split(line)
                assert words[0] == "autotune"
                done = command("-m", *words, cwd=tmp_path, db=tmp_path / "docs.db")
                assert done.returncode == 0, f"{line}\n{done.stderr}"
                ran += 1
            continue
        first = text.partition("\n")[0]
        if first.startswith("# triton"):
            ast.parse(text)
            continue
        name = first.removeprefix("# ")
        assert name.endswith((".py", ".toml")), first
        (tmp_path / name).write_text(text)
        if name == "run.py":
            done = command(name, cwd=tmp_path, db=tmp_path / "docs.db")
            assert done.returncode == 0, done.stderr
            assert "block" in done.stdout
            ran += 1
    assert ran == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stencil:heat", "neighbours:nearest"])
def test_an_example_is_tuned_and_looked_up_in_a_new_process(name: str, tmp_path: Path) -> None:
    shapes = {"stencil:heat": {"height": 66, "width": 130}, "neighbours:nearest": {"points": 500, "queries": 100}}
    (tmp_path / "shapes.jsonl").write_text(json.dumps(shapes[name]))
    words = ["kernel", f"examples.own_kernels.{name}", "--device", "cpu", "--shapes", "shapes.jsonl", "--json"]
    searched = command("-m", "autotune", "search", *words, "--trials", "3", cwd=tmp_path, db=tmp_path / "k.db")
    assert searched.returncode == 0, searched.stderr
    answer = json.loads(searched.stdout)
    assert (answer["measured"], answer["workloads"][0]["failed"].get("wrong_result", 0)) == (3, 0)
    found = command("-m", "autotune", "lookup", *words, cwd=tmp_path, db=tmp_path / "k.db")
    (key,) = json.loads(found.stdout)["keys"]
    assert key["match"] == "exact"
    if key["winner"] != "default":
        assert key["config"] == answer["best"]["config"]
