"""A search on several devices at once: what each searches, what is stored, and how it ends.

The devices are the CPU several times; candidates are measured by a formula (:mod:`lane_domain`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune import api, device, task
from autotune.errors import UserError
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Worker
from autotune.store import Store
from autotune.tuner import lanes
from autotune.tuner.result import Progress, Result

from . import lane_domain, pair_domain
from .conftest import QUICK, ROOT
from .toy_domain import BLOCKS, GOOD
from .toy_domain import workload as toy

TWO = ["cpu", "cpu"]
WHOLE = len(GOOD) * len(BLOCKS)
ALL: dict[str, Any] = {"patience": 0, "sampler": "random", "policy": QUICK}


@pytest.fixture(autouse=True)
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, module in lane_domain.KINDS.items():
        monkeypatch.setitem(task.DOMAINS, kind, module)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "measured"


def lines(log: Path) -> list[list[str]]:
    """Process, workload and candidate of each first measurement."""
    return [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []


def stored(store: Store) -> dict[tuple[str, str, str], float | None]:
    return {(m.key.workload, m.stage, task.config_key(m.config)): m.latency_us for m in store.measurements()}


def refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object, **options: object) -> Any:
        raise AssertionError("a lane was started")

    monkeypatch.setattr(lanes, "Child", started)


def test_lanes_find_what_one_device_finds_and_the_next_run_starts_none(
    store: Store, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [toy(rows=r, log=str(log), pause_s=0.02) for r in (64, 65, 66, 67)]
    seen: list[Progress] = []
    found = api.tune_workloads(works, TWO, store, progress=seen.append, **ALL)
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert [(r.measured, r.best) for r in found] == [(WHOLE, {"how": "vector", "block": 8})] * 4
    assert {r.winner for r in found} == {"autotune"}
    both = Counter(process for process, *_ in lines(log))
    assert len(both) == 2
    assert min(both.values()) >= WHOLE
    assert max(Counter((w, c) for _, w, c in lines(log)).values()) == 1
    assert {p.device for p in seen} == {"cpu"}
    assert {p.phase for p in seen} >= {"search", "final", "done"}
    (run,) = store.runs()
    assert (run.state, len(run.summary["workloads"])) == ("done", 4)
    assert {m.run for m in store.measurements()} == {run.id}
    assert store.stats()["claims"] == 0

    with Store.open(tmp_path / "alone.db") as alone:
        one = api.tune_workloads(works, "cpu", alone, **ALL)
        assert [(r.best, r.best_us, r.baselines) for r in one] == [(r.best, r.best_us, r.baselines) for r in found]
        screened = {key: us for key, us in stored(alone).items() if key[1] == "screen"}
        assert screened == {key: us for key, us in stored(store).items() if key[1] == "screen"}

    refuse_to_start(monkeypatch)
    again = api.tune_workloads(works, TWO, store, **ALL)
    assert [(r.workload, r.measured, r.best) for r in again] == [(r.workload, 0, r.best) for r in found]


def test_a_lane_that_is_through_takes_over_what_waits_in_another(store: Store, log: Path) -> None:
    heavy = toy(rows=64, log=str(log))
    slow = [toy(rows=r, log=str(log), pause_s=0.25) for r in (32, 33, 34, 35)]
    found = api.tune_workloads([heavy, *slow], TWO, store, weights={heavy.fingerprint: 10.0}, **{**ALL, "trials": 4})
    assert [r.measured for r in found] == [4] * 5
    who: dict[str, set[str]] = {}
    for process, workload, _ in lines(log):
        who.setdefault(workload, set()).add(process)
    of_the_heavy = who[heavy.fingerprint]
    assert any(who[w.fingerprint] == of_the_heavy for w in slow)
    assert any(who[w.fingerprint] != of_the_heavy for w in slow)


def test_a_shared_part_is_measured_once(store: Store, log: Path) -> None:
    shared = {"rows": 16, "log": str(log), "pause_s": 0.05}
    works = [pair_domain.workload(shared, {"rows": r, "log": str(log)}) for r in (8, 9)]
    found = api.tune_workloads(works, TWO, store, timeout=60.0, **{**ALL, "sampler": "tpe"})
    assert all(r.ok and r.winner == "autotune" for r in found)
    measured = [(w, c) for _, w, c in lines(log)]
    assert len({w for w, _ in measured}) > 2
    assert max(Counter(measured).values()) == 1
    assert store.stats()["claims"] == 0


def test_when_the_time_is_up_what_is_left_is_not_begun(store: Store) -> None:
    works = [toy(rows=r) for r in (64, 65, 66, 67)]
    found = api.tune_workloads(works, TWO, store, timeout=0.05, **ALL)
    assert len(found) == 1  # a lane takes longer to start
    assert found[0].ok
    assert found[0].measured
    assert store.runs()[0].state == "done"


def test_a_lane_that_is_killed_costs_what_it_had_in_hand(store: Store, tmp_path: Path, log: Path) -> None:
    fatal = tmp_path / "fatal"
    fatal.touch()
    works = [toy(rows=64, fatal=str(fatal)), *(toy(rows=r, log=str(log)) for r in (32, 33, 34))]
    found = api.tune_workloads(works, TWO, store, **{**ALL, "trials": 4})
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert [r.ok for r in found] == [False, True, True, True]
    assert "the process that searched on cpu ended early: killed by SIGKILL" in found[0].error
    assert store.runs()[0].state == "done"
    assert store.stats()["claims"] == 0
    fatal.unlink()
    again = api.tune_workloads(works, TWO, store, **{**ALL, "trials": 4})
    assert all(r.ok for r in again)


def test_where_no_lane_is_left_every_workload_is_told(store: Store, tmp_path: Path) -> None:
    fatal = tmp_path / "fatal"
    fatal.touch()
    works = [toy(rows=r, fatal=str(fatal)) for r in (64, 65, 66)]
    found = api.tune_workloads(works, TWO, store, **ALL)
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert all("ended early: killed by SIGKILL" in r.error for r in found)
    assert store.runs()[0].state == "failed"


def test_a_mistake_of_the_user_is_told_once(store: Store, tmp_path: Path) -> None:
    space = tmp_path / "narrow.toml"
    space.write_text("no_such = [1]\n")
    with pytest.raises(UserError, match="no_such"):
        api.tune_workloads([toy(rows=64), toy(rows=65)], TWO, store, space_file=str(space), **ALL)
    assert store.runs()[0].state == "failed"


def test_what_cannot_be_searched_side_by_side(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_start(monkeypatch)
    works = [toy(rows=64), toy(rows=65)]
    with CompilePool(1) as pool, pytest.raises(UserError, match="one device"):
        api.tune_workloads(works, TWO, store, pool=pool, **ALL)
    real = device.identify("cpu")
    other = dataclasses.replace(real, name="another")
    monkeypatch.setattr(device, "identify", lambda name: other if name == "cuda:1" else real)
    with pytest.raises(UserError, match="cuda:1 is another .* equal devices"):
        api.tune_workloads(works, ["cuda:0", "cuda:1"], store, **ALL)
    monkeypatch.setattr(device, "identify", lambda name: dataclasses.replace(real, count=2))
    with pytest.raises(UserError, match="several devices itself"):
        api.tune_workloads(works, ["cuda:0", "cuda:1"], store, **ALL)
    assert store.runs() == []


_SEARCH = """
import json, sys
from autotune import task
from {package} import lane_domain
from {package}.conftest import QUICK
from {package}.toy_domain import workload
from autotune.api import tune_workloads
from autotune.store import Store

task.DOMAINS.update(lane_domain.KINDS)
url, specs = sys.argv[1], json.loads(sys.argv[2])
try:
    with Store.open(url) as store:
        results = tune_workloads(
            [workload(**spec) for spec in specs], ["cpu", "cpu"], store, policy=QUICK, patience=0, sampler="random",
            progress=lambda p: print("PROGRESS", p.workload, flush=True),
        )
    print("RESULT", json.dumps([r.to_json() for r in results]))
except KeyboardInterrupt:
    sys.exit(130)
"""
Start = Callable[[list[dict[str, Any]]], "subprocess.Popen[str]"]


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    """Start a search on two devices in another process; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []
    package = lane_domain.__name__.rpartition(".")[0]
    tests = str(Path(lane_domain.__file__).parents[len(lane_domain.__name__.split(".")) - 1])

    def run(specs: list[dict[str, Any]]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SEARCH.format(package=package), url, json.dumps(specs)]
        path = os.pathsep.join([tests, str(ROOT)])
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until_both_measure(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until two workloads have been heard of; answers the processes there are by then."""
    assert process.stdout is not None
    heard = set()
    for line in process.stdout:
        heard.add(line)
        if len(heard) == 2:
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(process.communicate()[1])


def gone(processes: list[psutil.Process]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_in_the_parent_ends_all_lanes_in_good_order(start: Start, store: Store, log: Path) -> None:
    specs = [{"rows": r, "log": str(log), "pause_s": 0.3} for r in (64, 65, 66, 67)]
    process = start(specs)
    children = until_both_measure(process)
    assert len(children) >= 4  # two lanes, each with a compiler
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert [r["interrupted"] for r in found] == [True, True]
    assert [r["winner"] for r in found] == ["autotune", "autotune"]  # what was known by then met the baselines
    assert gone(children)
    assert store.runs()[0].state == "interrupted"
    assert store.stats()["claims"] == 0
    kept = len(lines(log))
    assert sum(r["measured"] for r in found) == kept == len(store.measurements(stage="screen"))
    works = [toy(**spec) for spec in ({**s} for s in specs)]
    again = api.tune_workloads(works[:2], TWO, store, **ALL)
    assert sum(r.measured for r in again) == 2 * WHOLE - kept


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_parent_that_is_killed_leaves_no_process(how: signal.Signals, start: Start, log: Path) -> None:
    process = start([{"rows": r, "log": str(log), "pause_s": 0.3} for r in (64, 65)])
    children = until_both_measure(process)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == -how
    assert gone(children)
    kept = len(lines(log))
    time.sleep(0.5)
    assert len(lines(log)) == kept
