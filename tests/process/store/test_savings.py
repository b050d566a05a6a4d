"""Counts of steps: kept by process, added up without loss, and turned into hours by the verdicts on their steps."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from autotune.cli import app
from autotune.runtime.savings import monday, saved
from autotune.store import Saving, Store, Verdict
from autotune.store.merge import merge
from autotune.store.upkeep import damage
from tests.support import ROOT
from tests.support.rows import put_key

MONDAY = 1_795_392_000.0
"""2026-11-23, midnight in UTC."""
WEEK = "2026-11-23"

PROGRAM = """
import json, random, sys, time
from autotune.device import environment, identify
from autotune.runtime import savings
from autotune.store import Store

host, name, seed, start = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
chance, now = random.Random(seed), start
savings.time.time = lambda: now

def put(counted):
    with Store.open(None) as store:
        rows = []
        for found in counted.values():
            device = store.put_device(identify("cpu"))
            env = store.put_environment(environment("cpu"))
            from dataclasses import replace
            rows += [replace(one, device=device, environment=env) for one in found]
        if chance.random() < 0.3:
            return False  # the server is away: the next write has these counts too
        store.put_savings(rows)
        if chance.random() < 0.3:
            store.put_savings(rows)  # a write that is repeated, since its answer was lost
    return True

own, trace = savings.Savings(put), {}
graphs = [name * 64, name.upper() * 64]  # a forward and a backward graph
runs = [own.counted(lambda *x: None, "cpu", graph=g, mode="default", alone_us=250.0) for g in graphs]
while now < start + 86400.0:
    steps = chance.randrange(1, 400)
    for _ in range(steps):
        for run in runs:
            run()
    now += chance.uniform(600.0, 4000.0)
    week = savings.monday(now)
    trace[week] = trace.get(week, 0) + steps
    own.write()
while not own.write():
    pass
print(json.dumps(trace))
"""


def simulated(url: str, host: str, name: str, seed: int, start: float = MONDAY) -> subprocess.Popen[str]:
    """A program's day on a host, as a process."""
    env = {"AUTOTUNE_DB": url, "AUTOTUNE_SAVINGS": f"program-{name}", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    words = [sys.executable, "-c", PROGRAM, host, name, str(seed), str(start)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)


def verdict_on(store: Store, graphs: list[str], ours: float, record: dict[str, object]) -> None:
    (one, *_) = store.savings()
    told = {"compile_us": 50_000.0, "autotune_us": ours, **record}
    store.put_verdicts([Verdict(g, one.device, one.environment, "default", (), told) for g in graphs])


def test_two_hosts_of_two_programs_lose_no_step(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(url):
        pass
    began = [
        simulated(url, host, name, seed)
        for seed, (host, name) in enumerate([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")])
    ]
    told = [process.communicate(timeout=500)[0] for process in began]
    assert [process.returncode for process in began] == [0] * 4
    traces = [json.loads(text) for text in told]
    with Store.open(url) as store:
        assert {(s.program, s.week) for s in store.savings()} == {("program-a", WEEK), ("program-b", WEEK)}
        verdict_on(store, ["a" * 64, "A" * 64], 48_000.0, {"target": "a"})
        found = {one.program: one for one in saved(store.savings(), store.verdicts())}
        assert list(damage(store)) == []
    steps = {"program-a": traces[0][WEEK] + traces[2][WEEK], "program-b": traces[1][WEEK] + traces[3][WEEK]}
    assert found["program-a"].steps == steps["program-a"], "two graphs of a step count once"
    assert found["program-a"].measured_h == pytest.approx(steps["program-a"] * 2000 / 3.6e9)
    assert found["program-a"].assumed_h == 0.0
    assert found["program-b"].assumed_h == pytest.approx(2 * steps["program-b"] * 250 / 3.6e9), "both graphs, alone"
    assert app.main(["show", "--saved", "--db", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["saved"]
    assert sum(one["measured_h"] + one["assumed_h"] for one in listed) == pytest.approx(
        sum(one.hours for one in found.values())
    )


def count(store: Store, **changed: object) -> Saving:
    key = put_key(store)
    made = Saving("p" * 32, "g" * 64, key.device, key.environment, "default", WEEK, "train.py", 10, 250.0)
    return replace(made, **changed)  # type: ignore[arg-type]


def test_a_smaller_count_is_ignored_later(url: str) -> None:
    with Store.open(url) as store:
        store.put_savings([count(store, steps=20)])
        store.put_savings([count(store, steps=10)])
        assert [s.steps for s in store.savings()] == [20]
        store.put_savings([count(store, steps=30), count(store, process="q" * 32)])
        assert sum(s.steps for s in store.savings()) == 40


def test_a_device_has_to_exist(url: str) -> None:
    with Store.open(url) as store:
        one = count(store)
        with pytest.raises(ValueError, match="put the device"):
            store.put_savings([replace(one, device="0" * 64)])
        assert store.savings() == []


def test_merging_twice_counts_once(url: str, tmp_path: object) -> None:
    with Store.open(url) as store, Store.open(f"{tmp_path}/other.db") as other:
        store.put_savings([count(store, steps=5)])
        other.put_savings([count(other, steps=7), count(other, process="q" * 32)])
        for _ in range(2):
            merge(store, other)
            assert sorted(s.steps for s in store.savings()) == [7, 10]


@pytest.mark.parametrize("record", [{"cut": True}, {"compile_us": 50.0, "autotune_us": None}])
def test_a_step_that_was_not_timed_or_is_inductors(record: dict[str, object], url: str) -> None:
    with Store.open(url) as store:
        one = count(store)
        store.put_savings([one])
        store.put_verdicts([Verdict(one.graph, one.device, one.environment, "default", (), record)])
        (found,) = saved(store.savings(), store.verdicts())
    timed = "compile_us" in record
    assert found.measured_h == 0.0
    assert found.assumed_h == (0.0 if timed else pytest.approx(10 * 250 / 3.6e9))


def test_weeks_begin_on_mondays() -> None:
    assert monday(MONDAY) == monday(MONDAY + 7 * 86400 - 1) == WEEK
    assert monday(MONDAY - 1) == "2026-11-16"
    assert monday(MONDAY + 7 * 86400) == "2026-11-30"


def test_nothing_counted_and_a_snapshot(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(url):
        pass
    assert app.main(["show", "--saved", "--db", url]) == 0
    assert "AUTOTUNE_SAVINGS=1" in capsys.readouterr().out
    assert app.main(["show", "--saved", "--db", "package:h200"]) == 2
    assert "a snapshot has no counted steps" in capsys.readouterr().err


def test_the_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(url) as store:
        store.put_savings([count(store, steps=3_600_000)])
    assert app.main(["show", "--saved", "--db", url]) == 0
    out = capsys.readouterr().out
    assert "train.py" in out
    assert "0.25 device hours saved, 0% of it measured" in out
