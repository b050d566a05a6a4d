"""Look-ups stay fast, with room for a busy machine; `benchmarks/lookup_speed.py` has the figures."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import autotune
from autotune.device import environment, identify
from autotune.runtime.ladder import Level
from autotune.runtime.match import look_up
from autotune.store import Key, Schedule, Snapshot
from autotune.store.snapshot_writer import Contents, write_snapshot
from tests.support import ROOT
from tests.support.rows import workload

COUNT = 5000


def seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def test_look_ups(tmp_path: Path) -> None:
    here, env, file = identify("cpu"), environment("cpu"), tmp_path / "many.atdb"
    workloads = [workload(n) for n in range(1, COUNT)]
    schedules = [
        Schedule(Key(w.fingerprint, here.fingerprint, env.strict, "p"), None, 5.0, {"eager": 9.0}, None, "inductor",
                 w.family, w.extent, 1.0) for w in workloads
    ]  # fmt: skip
    found = {w.fingerprint: w for w in workloads}
    write_snapshot(file, Contents(schedules, found, {here.fingerprint: here}, {env.strict: env}))
    assert statistics.median(seconds(lambda: Snapshot(file)) for _ in range(9)) < 0.02
    autotune.load(file)
    look_up(workloads[0], "cpu")
    cold = statistics.median(seconds(lambda w=w: look_up(w, "cpu")) for w in workloads[1:200])  # type: ignore[misc]
    assert cold < 0.003
    assert look_up(workloads[7], "cpu").level is Level.EXACT
    hot = min(seconds(lambda: [look_up(workloads[7], "cpu") for _ in range(2000)]) for _ in range(5)) / 2000
    assert hot < 1e-5
    autotune.configure(environment="strict")
    assert look_up(workloads[7], "cpu").level is Level.EXACT, "asked anew"


@pytest.mark.usefixtures("new_interpreters")
def test_importing_adds_little_to_torch() -> None:
    code = "import time, torch; a = time.process_time(); import autotune; autotune.load; print(time.process_time() - a)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.4
