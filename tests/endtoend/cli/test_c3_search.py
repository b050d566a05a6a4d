"""``search c3`` and ``lookup c3`` as a newcomer without GPUs runs them, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.store import Store

pytestmark = pytest.mark.slow

SCENARIO = ("--gemm", "256x256x256", "--collective", "all_gather", "--bytes", "256KiB", "--ranks", "2")


class User:
    """A folder with a database, and commands run there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.db = folder, folder / "their.db"

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autotune", *words, "--device", "cpu", "--db", str(self.db)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        assert done.returncode == code, done.stderr
        return done

    def json(self, *words: str) -> dict[str, Any]:
        done = self.run(*words, "--json")
        assert done.stdout.count("\n") == 1
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def searched(user: User) -> dict[str, Any]:
    return user.json("search", "c3", *SCENARIO, "--trials", "4", "--seed", "1")


def test_a_search_prints_all_times_and_their_summary(searched: dict[str, Any]) -> None:
    assert searched["match"] == "exact"
    assert 1 <= searched["measured"] <= 4
    assert searched["winner"] in ("autotune", "sequential", "naive")
    assert set(searched["t_comm_by_engine_us"]) == {"gloo", "copy"}
    assert searched["t_comm_us"] == min(searched["t_comm_by_engine_us"].values())
    both = searched["t_compute_us"] + searched["t_comm_us"]
    assert searched["ideal"] == pytest.approx(both / max(searched["t_compute_us"], searched["t_comm_us"]), rel=1e-3)
    assert searched["speedup"] == pytest.approx(both / searched["deployed_us"], rel=1e-3)
    assert searched["baselines"] == {"sequential": {"latency_us": searched["sequential_us"]},
                                     "naive": {"latency_us": searched["naive_us"]}}  # fmt: skip
    assert searched["deployed_us"] <= min(searched["sequential_us"], searched["naive_us"])
    assert searched["kind"] in ("compute", "equal", "communication")
    assert searched["workloads"][0]["fingerprint"] == searched["fingerprint"]


def test_a_new_process_finds_it(user: User, searched: dict[str, Any]) -> None:
    found = user.json("lookup", "c3", *SCENARIO)
    assert (found["match"], found["fingerprint"]) == ("exact", searched["fingerprint"])
    for name in ("strategy", "strategy_label", "deployed_us", "t_compute_us", "ideal", "fraction", "winner"):
        assert found[name] == searched[name]


def test_others_find_the_nearest_or_the_default(user: User, searched: dict[str, Any]) -> None:
    near = user.json("lookup", "c3", *SCENARIO, "--gemm", "256x256x128")
    assert (near["match"], near["distance"]) == ("nearest", 1.0)
    assert near["strategy_label"] == searched["strategy_label"]
    assert near["deployed_us"] is None  # measured for another scenario
    text = user.run("lookup", "c3", *SCENARIO, "--collective", "all_reduce")
    assert "default" in text.stdout
    assert "not tuned on these devices" in text.stderr


def test_the_same_search_again_measures_little(user: User, searched: dict[str, Any]) -> None:
    again = user.run("search", "c3", *SCENARIO, "--trials", "1")
    scenario = "256x256x256 f32 | all_gather 256KiB x2"
    for words in (scenario, "ideal speedup", "speedup over both alone", "share of the ideal", "strategy"):
        assert words in again.stdout
    with Store.open(user.db) as store:
        commands = [run.command for run in store.runs()]
        assert any("--gemm 256x256x256 --collective all_gather --bytes 256KiB --ranks 2" in c for c in commands)


def test_torchruns_processes_are_the_ranks(user: User) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autotune"]
    scenario = ("--gemm", "64x64x64", "--collective", "all_to_all", "--bytes", "64KiB")
    words = ["search", "c3", *scenario, "--trials", "1", "--device", "cpu", "--db", str(user.db), "--json"]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False, cwd=user.folder)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["scenario"]["ranks"] == 2
