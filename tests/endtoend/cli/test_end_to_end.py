"""The steps of a new user with a module: search, look-up, run; each in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MODULE = """
import torch

torch.manual_seed(0)
print("a module that prints when it is imported")


def block(x, weight, bias):
    y = torch.tanh(x + bias)
    y = y - y.mean(-1, keepdim=True)
    return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5) * weight


def make(rows, columns):
    return torch.randn(rows, columns), torch.rand(columns), torch.randn(columns)


def inputs():
    return make(96, 320)


def other_rows():
    return make(40, 320)


def other_columns():
    return make(96, 336)
"""

RUN = """
import json, sys, torch
import strangers
import autotune
inputs = getattr(strangers, sys.argv[1])()
got = torch.compile(strangers.block, backend="autotune")(*inputs)
error = (got - strangers.block(*inputs)).abs().max().item()
others = [strangers.other_rows(), strangers.other_columns()]
levels = [autotune.lookup(strangers.block, other).level for other in others]
print(json.dumps({"error": error, "levels": levels, **autotune.counters()}))
"""


class Stranger:
    """A folder with a module, a database, and commands run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "strangers.py").write_text(MODULE)

    def run(self, *command: str) -> dict[str, Any]:
        env = {**os.environ, "AUTOTUNE_DB": "sqlite:///their.db", "AUTOTUNE_CACHE_DIR": str(self.folder / "cache")}
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, cwd=self.folder, env=env
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def autotune(self, *arguments: str) -> dict[str, Any]:
        return self.run("-m", "autotune", *arguments, "--json")

    def lookup(self, inputs: str) -> dict[str, Any]:
        target = ("strangers:block", "--inputs", f"strangers:{inputs}", "--device", "cpu")
        return self.autotune("lookup", "fusion", *target)

    def deploy(self, inputs: str) -> dict[str, Any]:
        return self.run("-c", RUN, inputs)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return Stranger(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def searched(stranger: Stranger) -> dict[str, Any]:
    target = ("strangers:block", "--inputs", "strangers:inputs", "--device", "cpu")
    return stranger.autotune("search", "fusion", *target, "--trials", "5", "--timeout", "120", "--no-step")


def test_the_search_measures_and_compares(searched: dict[str, Any]) -> None:
    assert searched["workload"] == "strangers:block"
    assert searched["match"] == "exact"
    assert 1 <= searched["measured"] <= 5
    assert sum(searched["failed"].values()) < searched["measured"]
    assert searched["best"]["config"]
    assert searched["best"]["latency_us"] > 0
    assert searched["baselines"]["eager"]["latency_us"] > 0
    assert "inductor" in searched["baselines"]
    assert searched["speedup"] >= 1
    assert len(searched["workloads"]) == 1


def test_a_new_process_finds_it(stranger: Stranger, searched: dict[str, Any]) -> None:
    found = stranger.lookup("inputs")
    assert found["match"] == "exact"
    (region,) = found["workloads"]
    assert region["workload"] == searched["workloads"][0]["workload"]
    assert found["deployed_us"] == searched["deployed_us"]
    assert found["baselines"]["eager"] == searched["baselines"]["eager"]


def test_it_runs_stored_kernels_also_at_other_rows(stranger: Stranger, searched: dict[str, Any]) -> None:
    ran = stranger.deploy("inputs")
    assert ran["error"] < 1e-4
    assert ran["hits"] >= 1
    assert (ran["misses"], ran["fallbacks"]) == (0, 0)
    rows, columns = ran["levels"]
    assert columns == "none"
    if searched["workloads"][0]["winner"] == "autotune":
        assert rows == "other_rows"


def test_a_miss_is_right_recorded_and_can_be_searched(stranger: Stranger, searched: dict[str, Any]) -> None:
    ran = stranger.deploy("other_columns")
    assert ran["error"] < 1e-3  # Inductor's code, with GCC's -ffast-math: 4e-7 mostly, 1.02e-4 once
    assert ran["misses"] >= 1
    assert len(stranger.autotune("show")["missed"]) == 1
    found = stranger.autotune("search", "--missed", "--device", "cpu", "--trials", "2", "--timeout", "60")
    assert found["match"] == "exact"
    assert stranger.autotune("show")["missed"] == []


def test_a_second_search_repeats_no_measurement(stranger: Stranger, searched: dict[str, Any]) -> None:
    target = ("strangers:block", "--inputs", "strangers:inputs", "--device", "cpu")
    again = stranger.autotune("search", "fusion", *target, "--trials", "1", "--timeout", "60")
    assert again["measured"] <= 1
    assert again["reused"] >= 1
    if again["workloads"][0]["winner"] == "autotune":
        (step,) = again["steps"]
        assert step["compile_us"] > 0
