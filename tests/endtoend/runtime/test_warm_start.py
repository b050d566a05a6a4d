"""Inductor's caches have code with calls of stored kernels, which is used while the database has the same schedules."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as aot_config

from autotune.device import environment, identify
from autotune.runtime.backend import trial_backend
from autotune.runtime.inductor import region_call
from autotune.runtime.inductor.verdict import Trial
from autotune.store import Store, Verdict
from autotune.task import Config
from tests.support import ROOT, forks
from tests.support.deployment import Tune, tune_in
from tests.support.runtime.warm_job import example


def job(folder: Path, *words: str) -> dict[str, Any]:
    """The output of :mod:`warm_job` in a separate process."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "AUTOTUNE_DB": str(folder / "tuned.db")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.runtime.warm_job", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warm")


def stored_into(folder: Path, tune: Tune, db: str, which: str) -> None:
    """Store the kernel of one of the example's two regions."""
    if (folder / "tuned.db").exists():
        shutil.copy(folder / "tuned.db", db)
    model, x = example()
    backward = which == "backward"
    assert len(tune(model, (x.requires_grad_(),), select=lambda w: ("backward" in w.label) is backward)) == 1
    with sqlite3.connect(db) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(db, folder / "tuned.db")


def remove_schedules(folder: Path) -> None:
    with sqlite3.connect(folder / "tuned.db") as connection:
        assert connection.execute("DELETE FROM autotune_schedules").rowcount == 1


@pytest.fixture
def warmed(shared: Path, tune: Tune, db: str, tmp_path: Path) -> Path:
    """A folder with a database, which has the forward's kernel alone, and the caches of a process that ran with it."""
    if not (shared / "tuned.db").exists():
        stored_into(shared, tune, db, "forward")
        cold = job(shared)
        assert cold["counters"] == {"graphs": 2, "hits": 1, "misses": 1}
        assert not cold["aot"].get("autograd_cache_hit")
    folder = tmp_path / "warm"
    shutil.copytree(shared, folder)
    return folder


def test_a_second_process_runs_stored_kernels_out_of_the_caches(warmed: Path) -> None:
    shutil.rmtree(warmed / "inductor")
    with forks.new_interpreters():
        cold = job(warmed)
        warm = job(warmed)
    assert cold["looks_for_regions"]
    assert not warm["looks_for_regions"], "what finds regions is not imported"
    assert warm["counters"] == {"hits": 1}, "no graph is looked up"
    assert warm["aot"]["autograd_cache_hit"] == 1
    assert warm["warnings"] == []


def test_inductors_cache_alone_does_the_same(warmed: Path) -> None:
    warm = job(warmed, "no-autograd-cache")
    assert warm["counters"] == {"hits": 1}
    assert warm["inductor"]["fxgraph_cache_hit"] == 2


def test_a_schedule_more_or_less_is_noticed(warmed: Path, tune: Tune, db: str) -> None:
    stored_into(warmed, tune, db, "backward")
    more = job(warmed)
    assert more["counters"] == {"graphs": 2, "hits": 2}
    with sqlite3.connect(warmed / "tuned.db") as connection:
        connection.execute("DELETE FROM autotune_schedules")
    less = job(warmed)
    assert less["counters"] == {"graphs": 2, "misses": 2}
    assert less["warnings"] == []


def test_one_process_runs_the_schedules_of_each_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached graph of one names its regions as that of the other does."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 3, -1)

    x, loaded, ready = torch.randn(32, 48), list[int](), region_call._ready

    def noting(call: region_call.RegionCall) -> region_call.Call:
        schedule = region_call.found_for(call).schedule
        assert schedule is not None
        assert schedule.config is not None
        loaded.extend(int(str(v)) for k, v in schedule.config.items() if k.endswith("threads"))
        return ready(call)

    monkeypatch.setattr(region_call, "_ready", noting)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for threads in (1, 2):

        def of(config: Config, threads: int = threads) -> Config:
            return {k: threads if k.endswith("threads") else v for k, v in config.items()}

        tune_in(str(tmp_path / f"{threads}.db"))(program, (x,), config=of)
    compiled = torch._dynamo.utils.counters
    with torch._inductor.config.patch(fx_graph_cache=True), aot_config.patch(enable_autograd_cache=True):
        for threads in (1, 2, 1, 2):
            monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / f"{threads}.db"))
            torch._dynamo.reset()
            compiled.clear()
            loaded.clear()
            torch.testing.assert_close(torch.compile(program, backend="autotune")(x), program(x))
            assert loaded == [threads]
    assert compiled["aot_autograd"]["autograd_cache_hit"] == 1


def test_a_model_that_was_compiled_ahead_of_time_runs_stored_kernels_untraced(warmed: Path) -> None:
    """By torch's own form; the kernels still come from the database, or their operators take their place."""
    file = str(warmed / "model.bin")
    saved = job(warmed, "ahead", file)
    assert saved["counters"] == {"graphs": 1, "hits": 1}
    with forks.new_interpreters():  # a fork has imported what a search needs
        loaded = job(warmed, "ahead", file)
    assert loaded["counters"] == {"hits": 1}
    assert not loaded["looks_for_regions"]
    remove_schedules(warmed)
    without = job(warmed, "ahead", file)
    assert without["counters"] == {"hits": 1, "fallbacks": 1}
    assert any("no longer stored" in text for text in without["warnings"])


@pytest.mark.parametrize("gone", ["schedule", "database"])
def test_kernels_that_have_gone_since_are_replaced_by_their_operators(warmed: Path, gone: str) -> None:
    job(warmed, "stale")
    if gone == "schedule":
        remove_schedules(warmed)
    else:
        (warmed / "tuned.db").unlink()
    found = job(warmed, "stale")
    assert found["counters"] == {"hits": 1, "fallbacks": 1}
    (warning,) = found["warnings"]
    assert ("no longer stored" if gone == "schedule" else "there is no database") in warning


def test_a_verdict_is_obeyed_by_other_processes_with_warm_caches_and_without(
    warmed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(warmed / "tuned.db"))
    trial = Trial()
    model, x = example()
    torch.compile(model, backend=trial_backend(trial))(x.requires_grad_()).sum().backward()
    with Store.open(warmed / "tuned.db") as store:
        device, strict = store.put_device(identify("cpu")), store.put_environment(environment("cpu"))
        assert len(trial.graphs) == 1, "the forward's, which has a kernel"
        for (graph, _), workloads in trial.graphs.items():
            store.put_verdicts([Verdict(graph, device, strict, "default", tuple(workloads))])
    left = job(warmed)
    assert left["counters"] == {"graphs": 2, "left": 1, "misses": 1}, "what was cached before the verdict is not used"
    warm = job(warmed)
    assert warm["counters"] == {}
    assert warm["aot"]["autograd_cache_hit"] == 1
    assert warm["warnings"] == []
