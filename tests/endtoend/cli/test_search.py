"""``autotune search`` end to end in a separate process, on a small real domain that runs on the CPU.

The workloads come from the database (``--missed``), so no PyTorch program has to be captured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.searching import SearchOutcome, conclude, not_begun
from autotune.device import identify
from autotune.measure.policy import default_policy
from autotune.store import Store
from autotune.tuner.result import Result
from tests.support import ROOT
from tests.support.toy.toy_domain import workload

MAIN = """
import sys
from autotune import task
from autotune.cli.app import main
task.DOMAINS["toy"] = "tests.support.toy.toy_domain"
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "with_toy_domain.py"
    script.write_text(MAIN)
    return [sys.executable, str(script), "search", "--missed", "--device", "cpu", "--db", str(tmp_path / "t.db")]


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def missed(db: Path, *specs: dict[str, Any]) -> None:
    with Store.open(db) as store:
        device = store.put_device(identify("cpu"))
        for spec in specs:
            assert store.add_miss(workload(**spec), device, "missed workload")


def test_missed_workloads_are_searched_stored_and_cleared(
    tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    db = tmp_path / "t.db"
    missed(db, {"rows": 64, "eager_us": 2000}, {"rows": 32, "eager_us": 2000})
    arguments = ["--trials", "4", "--timeout", "600", "--seed", "3"]
    done = subprocess.run(
        [*command, *arguments, "--json"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr

    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert answer["match"] == "exact"
    assert answer["measured"] == 8
    assert answer["failed"] == {}
    assert answer["best"]["latency_us"] > 0
    assert answer["baselines"]["eager"]["latency_us"] > 2000
    assert answer["baselines"]["inductor"] == {"latency_us": None, "error": answer["baselines"]["inductor"]["error"]}
    assert answer["speedup"] > 1
    assert {w["label"] for w in answer["workloads"]} == {"toy 64x256", "toy 32x256"}
    for region in answer["workloads"]:
        assert set(region["best"]["config"]) == {"how", "block"}
    assert "[2/2] toy" in done.stderr

    with Store.open(db) as store:
        assert len(store.schedules()) == 2
        assert store.misses() == []
        assert "--seed 3" in store.runs()[0].command
    again = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert again.returncode == 2
    assert "no missed workload" in again.stderr
    assert again.stdout == ""


def test_search_reports_and_continues_workloads_not_begun_in_time(
    tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    db = tmp_path / "t.db"
    missed(db, {"rows": 64, "pause_s": 1.2}, {"rows": 32, "pause_s": 1.2})  # more than the least time
    for left, words in ((1, "before 1 workload was begun"), (0, "")):
        done = subprocess.run(
            [*command, "--timeout", "0.05", "--json"], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["not_begun"], len(answer["workloads"])) == (left, 1), done.stderr
        assert words in done.stderr
        assert ("WARNING: the time was up" in done.stderr) == bool(left)
        with Store.open(db) as store:
            assert len(store.misses()) == left


def test_search_counts_known_workloads_with_more_budget_as_not_begun(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unknown workloads count as undecided: of five workloads one was begun, and two are known."""
    results = [Result(c, c, "toy", "cpu", "p", best={"a": 1}, begun=c == "a") for c in "abc"]
    left = not_begun(5, results)
    assert left == 4
    assert conclude([SearchOutcome({"not_begun": left}, results, {}, print)], json=True) == 0
    assert "before 4 workloads were begun (2 with an earlier result): " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--missed", "--train"], "leave out TARGET, --inputs, --train, --precision and --matmul-precision"),
        (
            ["--missed", "--precision", "strict"],
            "leave out TARGET, --inputs, --train, --precision and --matmul-precision",
        ),
    ],
)
def test_conflicting_options_are_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    from autotune import task
    from autotune.cli.app import main

    monkeypatch.setitem(task.DOMAINS, "toy", "tests.support.toy.toy_domain")
    missed(tmp_path / "t.db", {"rows": 64})
    assert main(["search", *arguments, "--device", "cpu", "--db", str(tmp_path / "t.db")]) == 2
    assert words in capsys.readouterr().err


def test_candidates_are_timed_with_warm_caches_where_that_is_asked_for(
    tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    """Another policy: nothing that was measured cold is taken for known."""
    missed(tmp_path / "t.db", {"rows": 64})
    done = subprocess.run(
        [*command, "--trials", "2", "--caches", "warm", "--json"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["workloads"]
    with Store.open(tmp_path / "t.db") as store:
        assert {m.key.policy for m in store.measurements()} == {default_policy("cpu", "warm").key}
        assert "--caches warm" in store.runs()[0].command
    assert default_policy("cpu").key != default_policy("cpu", "warm").key
    assert default_policy("cuda:0", "warm") == dataclasses.replace(default_policy("cuda:0"), cold_bytes=0)
    assert found["label"].startswith("toy")


def test_a_search_without_measurements_fails_with_a_message(
    tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    missed(tmp_path / "t.db", {"rows": 0})  # every candidate is rejected
    done = subprocess.run([*command, "--trials", "4"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert "NOTHING COULD BE MEASURED for toy 0x256: " in done.stderr
    assert "a block has more rows than the matrix" in done.stderr
    with Store.open(tmp_path / "t.db") as store:
        assert len(store.misses()) == 1  # still waiting


def test_an_interrupted_search_keeps_its_measurements(
    tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    db = tmp_path / "t.db"
    hold = tmp_path / "hold"
    hold.touch()
    missed(db, {"rows": 64, "hold": str(hold)}, {"rows": 32})
    arguments = [*command, "--trials", "200"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with Store.open(db) as store:
        while len(store.measurements()) < 2:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        hold.unlink()
        _, err = process.communicate()
        assert process.returncode == 130, err
        assert "all measurements are stored" in err
        assert "Traceback" not in err
        assert len(store.measurements()) >= 2
        assert store.runs()[0].state == "interrupted"
