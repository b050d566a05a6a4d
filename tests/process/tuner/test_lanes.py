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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune import api, device, task
from autotune.cli.app import main
from autotune.errors import UserError
from autotune.measure.pool import CompilePool
from autotune.store import Store
from autotune.tuner import dealing
from autotune.tuner.context import Context
from autotune.tuner.dealing import Lanes
from autotune.tuner.options import SearchOptions
from autotune.tuner.result import Progress, Result
from autotune.tuner.study import FAULT
from autotune.tuner.turns import Turns
from tests.support import ROOT
from tests.support.toy import lane_domain, pair_domain
from tests.support.toy.policy import QUICK
from tests.support.toy.toy_domain import workload as toy

TWO = ["cpu", "cpu"]
ALL: dict[str, Any] = {"patience": 0, "sampler": "random", "policy": QUICK}

pytestmark = pytest.mark.usefixtures("formula")


def lines(log: Path) -> list[list[str]]:
    """Process, workload and candidate of each first measurement."""
    return [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []


def stored(store: Store) -> dict[tuple[str, str, str], float | None]:
    return {(m.key.workload, m.stage, task.config_key(m.config)): m.latency_us for m in store.measurements()}


def refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object, **options: object) -> Any:
        raise AssertionError("a lane was started")

    monkeypatch.setattr(dealing, "Child", started)


def test_lanes_find_the_same_as_one_device_and_the_next_run_starts_none(
    store: Store, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"log": str(log), "meet": str(tmp_path / "meet")}
    works = [toy(columns=c, **spec) for c in (64, 65, 66)]  # of three families
    options = {**ALL, "patience": 3, "timeout": 3000.0}
    seen: list[Progress] = []
    found = api.tune_workloads(works, TWO, store, progress=seen.append, **options)
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert all(r.ok and r.measured > 3 for r in found)
    assert {r.winner for r in found} == {"autotune"}
    both = Counter(process for process, *_ in lines(log))
    assert len(both) == 2
    assert min(both.values()) > 3
    assert max(Counter((w, c) for _, w, c in lines(log)).values()) == 1
    assert {p.device for p in seen} == {"cpu"}
    assert {p.phase for p in seen} >= {"search", "final", "done"}
    (run,) = store.runs()
    assert (run.state, len(run.summary["workloads"])) == ("done", 3)
    assert {m.run for m in store.measurements()} == {run.id}
    assert store.stats()["claims"] == 0

    with Store.open(tmp_path / "alone.db") as alone:
        one = api.tune_workloads(works, "cpu", alone, **options)
        assert [(r.best, r.best_us, r.baselines) for r in one] == [(r.best, r.best_us, r.baselines) for r in found]
        screened = {key: us for key, us in stored(alone).items() if key[1] == "screen"}
        assert screened == {key: us for key, us in stored(store).items() if key[1] == "screen"}

    refuse_to_start(monkeypatch)
    again = api.tune_workloads(works, TWO, store, **options)
    assert [(r.workload, r.measured, r.best) for r in again] == [(r.workload, 0, r.best) for r in found]


def test_lanes_measure_under_the_settings_of_the_program(store: Store, tmp_path: Path) -> None:
    spec = {"meet": str(tmp_path / "meet"), "numerics": str(tmp_path)}
    works, given = [toy(columns=c, **spec) for c in (64, 65)], {"mkldnn.conv.fp32_precision": "bf16"}
    api.tune_workloads(works, TWO, store, trials=1, numerics=given, **ALL)
    found = [json.loads((tmp_path / process.name).read_text()) for process in (tmp_path / "meet").iterdir()]
    assert found == [given, given]


def test_a_shared_part_is_measured_once(store: Store, tmp_path: Path, log: Path) -> None:
    shared = {"rows": 16, "log": str(log), "pause_s": 0.05, "meet": str(tmp_path / "meet")}
    works = [pair_domain.workload(shared, {"rows": r, "log": str(log)}) for r in (8, 9)]
    found = api.tune_workloads(works, TWO, store, trials=12, **{**ALL, "sampler": "tpe"})
    assert all(r.ok and r.winner == "autotune" for r in found)
    measured = [(w, c) for _, w, c in lines(log)]
    assert len({p for p, w, _ in lines(log) if w == toy(**shared).fingerprint}) == 2
    assert max(Counter(measured).values()) == 1
    assert store.stats()["claims"] == 0


def test_when_the_time_is_up_remaining_workloads_are_not_begun(store: Store) -> None:
    works = [toy(rows=r) for r in (64, 65, 66, 67)]
    found = api.tune_workloads(works, TWO, store, timeout=0.001, **ALL)
    assert len(found) == 1  # a lane takes longer to start
    assert found[0].ok
    assert found[0].measured
    assert store.runs()[0].state == "done"


def test_killed_lane_loses_only_its_current_workload(store: Store, tmp_path: Path, log: Path) -> None:
    """The other one takes over what waited for it."""
    fatal = tmp_path / "fatal"
    fatal.touch()
    spec = {"log": str(log), "meet": str(tmp_path / "meet")}
    works = [toy(rows=64, fatal=str(fatal), **spec), *(toy(rows=r, **spec) for r in (32, 33, 34))]
    found = api.tune_workloads(works, TWO, store, **{**ALL, "trials": 2})
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert [r.ok for r in found] == [False, True, True, True]
    assert "the process that searched on cpu ended early: killed by SIGKILL" in found[0].error
    by = {workload: process for process, workload, _ in lines(log)}
    assert set(by) == {w.fingerprint for w in works[1:]}
    assert len(set(by.values())) == 1
    assert store.runs()[0].state == "done"
    assert store.stats()["claims"] == 0


@pytest.mark.parametrize("owner", ["", "owner"])
def test_a_silent_lane_is_not_waited_for(
    owner: str, still: Lanes, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before its first turn nor in one."""
    monkeypatch.setattr(dealing, "_START_S", -1.0 if not owner else 1e9)
    monkeypatch.setattr(dealing, "_SILENT_S", -1.0 if owner else 1e9)
    for lane in still._lanes:
        lane.owner, lane.turn = owner, lane.queue.pop(0) if owner else None
    monkeypatch.setattr(dealing, "ready", lambda *given: [])
    found = list(still.results())
    assert [lane.over for lane in still._lanes] == [True, True]
    assert {r.workload for r in found} == {w.fingerprint for w in still._turns.workloads}
    assert {r.begun for r in found} == ({True, False} if owner else {False})
    assert all("was not heard of any more" in r.error for r in found)


def test_a_slow_starter_does_not_hold_up_the_end(still: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "_late", property(lambda group: True))
    monkeypatch.setattr(dealing, "ready", lambda *given: [])
    assert list(still.results()) == []
    assert [lane.over for lane in still._lanes] == [True, True]


def test_stored_results_are_reported_if_all_lanes_are_lost(store: Store, tmp_path: Path) -> None:
    fatal = tmp_path / "fatal"
    works = [toy(rows=r, fatal=str(fatal)) for r in (64, 65, 66)]
    before = api.tune_workloads(works, TWO, store, **{**ALL, "trials": 2})
    assert all(r.ok for r in before)
    fatal.touch()
    after = api.tune_workloads(works, TWO, store, **{**ALL, "trials": 4})
    assert [r.winner for r in after] == [r.winner for r in before]
    assert all("ended early" in r.error for r in after)
    assert sum(not r.begun for r in after) == 1  # two were given out


class Still:
    """A lane's process that does nothing: its messages, and its prepared answers."""

    def __init__(self, *args: object) -> None:
        self.sent: list[dict[str, Any]] = []
        self.says: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], timeout: float) -> None:
        self.sent.append(message)

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        return (self.says.pop(0), b"") if self.says else None

    def kill(self) -> None:
        self.sent.append({"killed": True})


@pytest.fixture
def still(store: Store, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    """Two lanes, one with a large workload, the other with five small ones."""
    monkeypatch.setattr(dealing, "Child", Still)
    works = [toy(rows=r) for r in range(10, 16)]
    turns = Turns(works, [9.0, 3.0, 2.0, 2.0, 1.0, 1.0], SearchOptions(trials=5, patience=7), devices=2)
    group = Lanes(Context(store, "cpu", QUICK), TWO, turns, range(6))
    assert [lane.queue for lane in group._lanes] == [[0], [1, 2, 3, 4, 5]]
    return group


def test_an_idle_lane_gets_half_of_anothers_queue(still: Lanes) -> None:
    def told(lane: Any) -> tuple[int | None, list[int]]:
        assert list(still._next(lane)) == []
        return lane.turn, list(lane.queue)

    one, other = still._lanes
    assert told(one) == (0, [])
    assert told(other) == (1, [2, 3, 4, 5])
    assert sent(other)["then"] == [2, 3, 4]
    assert told(one) == (3, [5])
    assert (other.queue, sent(one)["budget"]["trials"]) == ([2, 4], 5)
    assert [told(other), told(other), told(other)] == [(2, [4]), (4, []), (5, [])]
    assert not one.over
    told(one)
    assert one.over
    assert sent(one) == {"killed": True}


def sent(lane: Any) -> dict[str, Any]:
    """The last that a still lane was sent."""
    return dict(lane.child.sent[-1])


def test_a_broken_device_does_not_take_workloads_of_others(still: Lanes, caplog: pytest.LogCaptureFixture) -> None:
    one, other = still._lanes
    failed = Result("w", "toy", "toy", "cpu", "p", stop=FAULT, seconds=9.0, error="the worker does not start")
    fine = dataclasses.replace(failed, stop="no gain", error="")

    def says(lane: Any, *results: Result) -> list[Result]:
        lane.child.says += [{"result": dataclasses.asdict(r)} for r in results]
        return list(still._hear(lane))

    list(still._next(one))
    list(still._next(other))
    assert says(other, failed, fine, failed) == [fine]  # what it failed on is searched on the other one
    assert (other.turn, other.over, one.queue) == (4, False, [1, 3])
    assert says(other, failed) == []
    assert (other.turn, other.over, other.queue) == (None, True, [5])
    assert [r.message for r in caplog.records] == [
        "cpu failed on 2 workloads in a row: the search continues on the other devices"
    ]
    assert says(one, failed) == [failed]  # nobody is left to try it
    assert (one.turn, one.queue) == (1, [3, 4])
    assert says(one, failed, failed, fine) == [failed, failed, fine]  # the last one goes on to the end
    assert one.turn == 5
    assert says(one, fine) == [fine]
    assert one.over


def test_where_no_lane_is_left_every_workload_is_reported(store: Store, tmp_path: Path) -> None:
    fatal = tmp_path / "fatal"
    fatal.touch()
    works = [toy(rows=r, fatal=str(fatal)) for r in (64, 65, 66)]
    found = api.tune_workloads(works, TWO, store, **ALL)
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert all("ended early: killed by SIGKILL" in r.error for r in found)
    assert store.runs()[0].state == "failed"


def test_a_mistake_of_the_user_is_reported_once(store: Store, tmp_path: Path) -> None:
    space = tmp_path / "narrow.toml"
    space.write_text('how = ["another"]\n')
    with pytest.raises(UserError, match="none of how"):
        api.tune_workloads([toy(rows=64), toy(rows=65)], TWO, store, space_file=str(space), **ALL)
    assert store.runs()[0].state == "failed"


def test_search_refuses_devices_that_cannot_run_side_by_side(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_start(monkeypatch)
    works = [toy(rows=64), toy(rows=65)]
    with pytest.raises(UserError, match="cuda:0 is named twice"):
        api.tune_workloads(works, ["cuda:0", "cuda:0"], store, **ALL)
    with CompilePool(1) as pool, pytest.raises(UserError, match="one device"):
        api.tune_workloads(works, TWO, store, pool=pool, **ALL)
    real = device.identify("cpu")
    other = dataclasses.replace(real, name="another")
    monkeypatch.setattr(device, "identify", lambda name: other if name == "cuda:1" else real)
    with pytest.raises(UserError, match=r"cuda:1 is another .* equal devices"):
        api.tune_workloads(works, ["cuda:0", "cuda:1"], store, **ALL)
    monkeypatch.setattr(device, "identify", lambda name: dataclasses.replace(real, count=2))
    with pytest.raises(UserError, match="that uses several devices"):
        api.tune_workloads(works, ["cuda:0", "cuda:1"], store, **ALL)
    assert store.runs() == []


_SEARCH = """
import json, sys
from autotune import task
from {package} import lane_domain
from {package}.policy import QUICK
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
def start(url: str, started: list[subprocess.Popen[str]]) -> Start:
    """Start a search on two devices in another process; whatever is left of it is killed at the end."""
    package = lane_domain.__name__.rpartition(".")[0]

    def run(specs: list[dict[str, Any]]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SEARCH.format(package=package), url, json.dumps(specs)]
        path = str(ROOT)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        started.append(process)
        return process

    return run


def until_both_measure(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until two workloads have been heard of; answers the processes there are by then."""
    assert process.stdout is not None
    heard = set()
    for line in process.stdout:
        heard.add(line)
        if len(heard) == 2:
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(process.communicate()[1])


def await_end(processes: list[psutil.Process]) -> None:
    """Until pytest's limit."""
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        time.sleep(0.05)


def test_ctrl_c_in_the_parent_ends_all_lanes_in_good_order(
    start: Start, store: Store, tmp_path: Path, log: Path
) -> None:
    meet = str(tmp_path / "meet")
    specs = [{"rows": r, "log": str(log), "pause_s": 0.2, "meet": meet} for r in (64, 65, 66, 67)]
    process = start(specs)
    children = until_both_measure(process)
    assert len(children) >= 4  # two lanes, each with a compiler
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=550)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert [(r["interrupted"], r["stop"]) for r in found] == [(True, "interrupted")] * 2
    assert [r["winner"] for r in found] == ["autotune", "autotune"]  # what was known by then met the baselines
    await_end(children)
    assert store.runs()[0].state == "interrupted"
    assert store.stats()["claims"] == 0
    assert sum(r["measured"] for r in found) == len(lines(log)) == len(store.measurements(stage="screen"))


def test_a_second_ctrl_c_ends_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Lanes] = []
    ended: list[bool] = []
    leave = Lanes.__exit__

    def leaving(self: Lanes, *error: Any) -> None:
        begun.append(self)
        leave(self, *error)
        ended.extend(not lane.child.alive for lane in self._lanes)

    monkeypatch.setattr(Lanes, "__exit__", leaving)

    def twice(state: Progress) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        api.tune_workloads([toy(rows=r, pause_s=0.3) for r in (4, 5)], TWO, store, progress=twice, **ALL)
    assert ended == [True, True]
    assert store.runs()[0].state == "interrupted"
    assert store.stats()["claims"] == 0


def test_ctrl_c_before_anything_is_begun(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dealing.compile_threads
    monkeypatch.setattr(dealing, "compile_threads", lambda count: (signal.raise_signal(signal.SIGINT), real(count))[1])
    with pytest.raises(KeyboardInterrupt):
        api.tune_workloads([toy(rows=r) for r in (4, 5)], TWO, store, **ALL)
    assert store.runs()[0].state == "interrupted"
    assert store.measurements() == []


def test_ctrl_c_before_the_first_workload_keeps_known_results(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    works = [toy(rows=r) for r in (4, 5, 6)]
    api.tune_workloads(works[:1], "cpu", store, **{**ALL, "patience": 2, "timeout": 3000.0})
    real = dealing.compile_threads
    monkeypatch.setattr(dealing, "compile_threads", lambda count: (signal.raise_signal(signal.SIGINT), real(count))[1])
    (known,) = api.tune_workloads(works, TWO, store, **{**ALL, "patience": 2, "timeout": 3000.0})
    assert (known.workload, known.ok, known.interrupted) == (works[0].fingerprint, True, True)
    assert store.runs()[0].state == "interrupted"


def test_a_parent_that_is_killed_leaves_no_process(start: Start, log: Path) -> None:
    process = start([{"rows": r, "log": str(log), "pause_s": 0.3} for r in (64, 65)])
    children = until_both_measure(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=550)
    assert process.returncode == -signal.SIGTERM
    await_end(children)
    kept = len(lines(log))
    time.sleep(0.5)
    assert len(lines(log)) == kept


def test_the_command_prints_the_device_of_each_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(tmp_path / "missed.db")
    with Store.open(db) as store:
        own = store.put_device(device.identify("cpu"))
        for rows in (64, 65):
            assert store.add_miss(toy(rows=rows), own)
    monkeypatch.setattr(device, "resolve_devices", lambda named: ["cpu"] * 3 if named == "cuda:all" else [])
    assert main(["search", "--missed", "--device", "cuda:all", "--trials", "2", "--db", db, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["device"], answer["not_begun"]) == ("cpu,cpu", 0)
    assert [r["device"] for r in answer["workloads"]] == ["cpu", "cpu"]
    assert f"missed workloads: 2 workloads on 2 x {device.identify('cpu').name}" in err
    for number in (1, 2):
        assert f"\n[cpu {number}/2] toy 6" in err
    with Store.open(db) as store:
        assert store.misses() == []
