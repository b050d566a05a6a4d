"""``search --missed`` where deployments missed regions and C3 scenarios alike: one command searches both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.app import main
from autotune.device import DeviceIdentity, identify
from autotune.domain import identity_of
from autotune.domains.c3 import cli as c3_search
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.errors import UserError
from autotune.store import Store
from autotune.workload import Workload
from tests.support import ROOT

MAIN = """
import sys
from autotune import task
from autotune.cli.app import main
task.DOMAINS["toy"] = "tests.support.toy.toy_domain"
if __name__ == "__main__":
    sys.exit(main())
"""


def scenario(ranks: int = 2) -> Workload:
    return Scenario(Gemm(64, 64, 64, "f32"), "all_reduce", 4096, ranks, "f32").workload()


def missed(db: Path, *workloads: Workload) -> None:
    """As a deployment on this CPU would have recorded them."""
    with Store.open(db) as store:
        for workload in workloads:
            where = identity_of(workload, "cpu") if workload.kind == "c3" else identify("cpu")
            assert store.add_miss(workload, store.put_device(where), "missed workload")


def toy() -> Workload:
    spec = {"rows": 64, "columns": 256, "bad": False, "slow_us": 0, "eager_us": 2000}
    return Workload("toy", spec, family="toy", extent=64, label="toy")


@pytest.mark.slow
def test_misses_of_any_domain_are_searched_and_cleared(tmp_path: Path) -> None:
    db, script = tmp_path / "t.db", tmp_path / "with_toy_domain.py"
    script.write_text(MAIN)
    missed(db, toy(), scenario(), scenario(3))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), "search", *words, "--device", "cpu", "--db", str(db), "--trials", "2"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    done = run("--missed", "--timeout", "60", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["workload"], answer["match"], answer["measured"]) == ("missed workloads", "exact", 2)
    assert [w["label"] for w in answer["workloads"]] == ["toy"]
    both = answer["c3"]
    assert (both["workload"], both["match"]) == ("missed scenarios", "exact")
    assert {w["fingerprint"] for w in both["workloads"]} == {scenario().fingerprint, scenario(3).fingerprint}
    with Store.open(db) as store:
        assert store.misses() == []
        assert len(store.schedules(identity_of(scenario(3), "cpu").fingerprint)) == 1
        commands = [found.command for found in store.runs()]
        assert any(c.startswith("autotune search --missed") and "--timeout 60" in c for c in commands)
        assert any(c.startswith("autotune search c3 --missed") for c in commands)
    again = run("--missed")
    assert again.returncode == 2
    assert "has no missed workload of this device" in again.stderr


@pytest.mark.parametrize("words", [["fusion"], ["--plans", "greedy"]])
def test_a_domain_or_its_options_confine_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missed(tmp_path / "t.db", scenario())
    assert main(["search", *words, "--missed", "--device", "cpu", "--db", str(tmp_path / "t.db")]) == 2
    assert "no missed workload" in capsys.readouterr().err
    with Store.open(tmp_path / "t.db") as store:
        assert len(store.misses()) == 1


def test_scenarios_of_other_devices_or_more_of_them_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_devices(ranks: int, device: str) -> None:
        if ranks > 2:
            raise UserError(f"{ranks} ranks need {ranks} GPUs, but there are 2")

    monkeypatch.setattr("autotune.domains.c3.task.check_devices", check_devices)
    missed(tmp_path / "t.db", scenario(), scenario(4))
    with Store.open(tmp_path / "t.db") as store:
        elsewhere = DeviceIdentity("cuda", "NVIDIA H200", 132, 144384, "9.0", count=2, links="NV18")
        assert store.add_miss(scenario(), store.put_device(elsewhere), "met on GPUs")
        assert [found.ranks for found in c3_search.missed(store, "cpu")] == [2]
    assert "x4 is skipped: 4 ranks need 4 GPUs, but there are 2" in capsys.readouterr().err
