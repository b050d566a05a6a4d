"""A domain outside of the package, by the commands: named by an environment variable or an entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULE = "examples.blocked_gelu.domain"
TARGET = ["gelu", "65536", "--device", "cpu"]


def command(*words: str, told: bool = True, path: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    env |= {"AUTOTUNE_DOMAINS": f"gelu={MODULE}"} if told else {}
    words = (sys.executable, "-m", "autotune", *words)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=550)


def answer(*words: str) -> dict[str, object]:
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_it_is_searched_looked_up_shown_and_moved(tmp_path: Path) -> None:
    here, there, file = (str(tmp_path / name) for name in ("here.db", "there.db", "gelu.atdb"))
    searched = answer("search", *TARGET, "--trials", "4", "--db", here)
    assert (searched["match"], searched["measured"]) == ("exact", 4)
    assert set(searched["best"]["config"]) == {"block", "threads"}  # type: ignore[index]
    assert searched["baselines"]["numpy"]["latency_us"] > 0  # type: ignore[index]
    (shown,) = answer("show", "--db", here)["tuned"]  # type: ignore[misc]
    assert shown["label"] == "gelu 65536"
    assert answer("db", "export", file, "--db", here)["schedules"] == 1
    assert answer("db", "import", file, "--db", there)["stored"] == 1
    for db in (here, there):
        found = answer("lookup", *TARGET, "--db", db)
        assert (found["match"], found["deployed_us"]) == ("exact", searched["deployed_us"])
    assert answer("lookup", "gelu", "4096", "--device", "cpu", "--db", here)["match"] == "none"


def test_an_entry_point_tells_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "gelu-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gelu\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[autotune.domains]\ngelu = {MODULE}\n")
    listed = command("workloads", "--json", told=False, path=str(tmp_path))
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)["workloads"]
    assert list(dict.fromkeys(row["domain"] for row in rows)) == ["fusion", "c3", "gelu"]


@pytest.mark.parametrize("words", [["search", "gelu", "16"], ["lookup", "gelu", "16"]])
def test_a_domain_that_is_missing_is_one_line(words: list[str]) -> None:
    done = command(*words, told=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "'gelu'" in done.stderr
    assert "'c3'" in done.stderr
    assert "'fusion'" in done.stderr


def test_a_mistake_is_reported(tmp_path: Path) -> None:
    for words, said in (
        (["search", "gelu", "many"], "give the number of elements"),
        (["search", *TARGET, "--train"], "unrecognized arguments: --train"),
        (["lookup", "gelu"], "required: TARGET"),
    ):
        done = command(*words, "--db", str(tmp_path / "t.db"))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr
