"""The deploy path needs torch and numpy, and nothing that searches or compiles: the extra `deploy`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.device import DeviceIdentity, Environment
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.domains.c3.strategy import Strategy
from autotune.domains.fusion.task import FusionTask
from autotune.store import Key, Schedule, Store
from autotune.store.snapshot_writer import export_snapshot
from autotune.task import Artifact
from tests.support import ROOT, forks
from tests.support.hostile import normalised, workload_of

GPU = DeviceIdentity("cuda", "NVIDIA Test", 132, 143360, "9.0")
ENV = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")
SCENARIO = Scenario(Gemm(8192, 8192, 8192), "all_gather", 512 * 2**20, 4)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bare")
    task = FusionTask(workload_of(normalised, torch.ones(64, 256)), "cuda:0", "sm_90", 132)
    config = task.default()
    artifact, workload = task.build(config), task.workload
    many = replace(GPU, count=4, links="NV18")
    with Store.open(folder / "tuned.db") as store:
        env = store.put_environment(ENV)
        key = Key(store.put_workload(workload), store.put_device(GPU), env, "by hand")
        store.put_schedule(Schedule(key, config, 10.0, {"eager": 20.0}, artifact, "autotune", workload.family, 64))
        w = SCENARIO.workload()
        key = Key(store.put_workload(w), store.put_device(many), env, "by hand")
        strategy = Strategy(order="comm_first", engine="copy", reserve=8).config()
        empty = Artifact("sm_90", ())
        store.put_schedule(Schedule(key, strategy, 90.0, {"naive": 100.0}, empty, "autotune", w.family, w.extent))
        export_snapshot(store, folder / "frozen.atdb")
    told = {"workload": workload.to_json(), "device": GPU.to_json(), "environment": ENV.to_json(),
            "scenario": SCENARIO.to_json(), "devices": many.to_json()}  # fmt: skip
    (folder / "job.json").write_text(json.dumps(told))
    job = [
        sys.executable,
        "-m",
        "tests.support.runtime.bare_job",
        str(folder / "frozen.atdb"),
        str(folder / "job.json"),
    ]
    with forks.new_interpreters():
        done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    kernels = artifact.kernels
    return {**found, "code": [len(k.code) for k in kernels], "blocks": [k.launch["block"] for k in kernels]}


def test_cubins_reach_the_driver_without_a_compiler(deployed: dict[str, Any]) -> None:
    assert deployed["level"] == "exact", deployed["reason"]
    assert deployed["differences"] == [], "a compiler that is missing is no difference"
    assert deployed["loaded"] == deployed["code"]
    assert [launch["block"] for launch in deployed["launched"]] == deployed["blocks"]
    assert all(launch["grid"] > 0 for launch in deployed["launched"])
    assert deployed["launched"][0]["first"] == deployed["first_input"], "the kernel reads the tensor"


def test_a_strategy_is_found_without_a_compiler(deployed: dict[str, Any]) -> None:
    assert deployed["c3"] == "exact"


def test_nothing_forbidden_was_there(deployed: dict[str, Any]) -> None:
    assert deployed["imported"] == []


def test_deploy_extra_is_a_subset_of_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["deploy"]
    assert set(extra) <= {*project["dependencies"], *project["optional-dependencies"]["sign"]}
