"""Searches that are interrupted, killed or not alone: nothing is lost, nothing is measured twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autotune.store import Store
from autotune.store.records import Key, Measurement
from autotune.store.tables.measurements import owner_name
from autotune.task import Status, config_key
from autotune.tuner.threads import Lease
from tests.support import forks
from tests.support.toy.toy_domain import BLOCKS, GOOD, workload

Start = Callable[..., "subprocess.Popen[str]"]
WHOLE = len(GOOD) * len(BLOCKS)
ALL = {"trials": 100, "patience": 0, "sampler": "random"}


def until_measured(process: subprocess.Popen[str], count: int) -> None:
    """Read its progress until it has measured ``count`` candidates."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[0] == "search" and int(line.split()[1]) >= count:
            return
    raise AssertionError(process.communicate()[1])


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=550)
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, out + err
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def spec(log: Path, **more: object) -> dict[str, object]:
    return {"slow_us": 1000, "log": str(log), **more}


def screened(store: Store) -> list[Measurement]:
    found = store.measurements(stage="screen")
    assert max(Counter(config_key(m.config) for m in found).values()) == 1
    return found


@pytest.mark.slow
def test_two_searches_one_killed_and_started_again(search: Start, store: Store, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    given = spec(tmp_path / "loads", hold=str(hold))  # none measures all before the other has begun
    first, second = search(given, **ALL), search(given, **ALL, seed=1)
    until_measured(first, 1)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    hold.unlink()
    kept = {config_key(m.config): m.samples for m in store.measurements(stage="screen")}
    third = search(given, **ALL)
    results = [result_of(second), result_of(third)]
    found = screened(store)
    assert len(found) == WHOLE
    assert all(m.status is Status.OK for m in found)
    assert {config_key(m.config): m.samples for m in found if config_key(m.config) in kept} == kept
    for result in results:
        assert result["measured"] + result["reused"] == WHOLE
        assert result["best"]["config"]["block"] == 8
    (schedule,) = store.schedules()
    assert schedule.config is None or schedule.config["block"] == 8
    states = Counter(r.state for r in store.runs())
    assert states == {"done": 2, "interrupted": 1}
    assert store.stats()["claims"] == 0


def test_ctrl_c_ends_in_good_order_and_the_next_search_goes_on(search: Start, store: Store, tmp_path: Path) -> None:
    log, hold = tmp_path / "loads", tmp_path / "hold"
    hold.touch()
    given = spec(log, eager_us=100_000, hold=str(hold))
    with forks.new_interpreters():
        process = search(given, **ALL)
    until_measured(process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    hold.unlink()
    result = result_of(process)
    assert process.returncode == 0
    assert result["interrupted"]
    assert result["stop"] == "interrupted"
    assert 2 <= result["measured"] < WHOLE
    assert result["winner"] == "autotune"  # what was known by then met the baselines
    assert len(store.schedules()) == 1
    assert store.runs()[0].state == "interrupted"
    assert store.stats()["claims"] == 0
    assert len(screened(store)) == result["measured"]
    assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children)
    again = result_of(search(given, **ALL))
    assert again["measured"] == WHOLE - result["measured"]
    assert again["reused"] == result["measured"]
    assert len(screened(store)) == WHOLE


def test_a_second_ctrl_c_ends_at_once_and_keeps_everything(search: Start, store: Store, tmp_path: Path) -> None:
    process = search({"slow_us": 100, "bad": True, "seeds": [{"how": "hang", "block": 1}]}, trials=20)
    until_measured(process, 1)
    os.kill(process.pid, signal.SIGINT)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert "interrupted\n" in lines, process.communicate()[1]
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=550)  # the hanging candidate would have ten minutes
    assert screened(store)
    assert store.runs()[0].state == "interrupted"
    assert store.stats()["claims"] == 0


def test_claims_of_others_are_left_to_them_and_their_results_used(search: Start, store: Store) -> None:
    done = result_of(search({"slow_us": 100}, trials=1))
    mine = store.measurements(stage="screen")[0]
    owner = owner_name()  # a live search: this process
    other = {"how": "vector", "block": 8}
    with Lease(store, owner):
        assert store.claim(mine.key, other, "screen", owner, 60)
        process = search({"slow_us": 100}, **ALL)
        until_measured(process, WHOLE - 2)
        time.sleep(0.5)
        assert store.get_measurement(mine.key, other, "screen") is None
        store.add_measurement(
            Measurement(mine.key, other, Status.OK, latency_us=1.0, samples=(1.0,), noise=0.0, run="r")
        )
        result = result_of(process)
    assert result["measured"] == WHOLE - 2
    assert result["reused"] == 2
    assert done["measured"] == 1
    assert result["best"]["config"]["block"] == 8
    assert len(screened(store)) == WHOLE


def test_lease_is_renewed_and_given_back(store: Store, monkeypatch: Any) -> None:
    """By a faked clock: the delay of the renewing thread on a busy machine does not matter."""
    from autotune.device import environment, identify
    from autotune.store.tables import measurements as claims
    from autotune.tuner import threads

    now, renewed = [1000.0], threading.Semaphore(0)
    renew = store.renew

    def counted(owner: str, lease_s: float) -> None:
        renew(owner, lease_s)
        renewed.release()

    monkeypatch.setattr(claims, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(store, "renew", counted)
    monkeypatch.setattr(threads, "LEASE_S", 0.3)
    key = Key(
        store.put_workload(workload()),
        store.put_device(identify("cpu")),
        store.put_environment(environment("cpu")),
        "p",
    )
    config = {"how": "rows", "block": 1}
    mine, other = owner_name(), owner_name()
    with Lease(store, mine):
        assert store.claim(key, config, "screen", mine, 0.3)
        for _ in range(4):
            now[0] += 0.2
            for _ in range(2):  # the first may have begun before the clock moved
                assert renewed.acquire(timeout=550)
            assert not store.claim(key, config, "screen", other, 0.3)
    assert store.claim(key, config, "screen", other, 0.3)
    now[0] += 0.4
    assert store.claim(key, config, "screen", mine, 0.3)  # nobody renews that one
