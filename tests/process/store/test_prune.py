"""``autotune db prune`` and ``autotune db merge``."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from autotune.cli import app
from autotune.errors import UserError
from autotune.store import Calibration, Effort, Key, Measurement, Store, Verdict
from autotune.store.bundles import merge as merging
from autotune.store.bundles.merge import merge
from autotune.store.health.prune import Limits, prune
from autotune.store.health.verify import damage
from autotune.task import Status
from tests.process.store.test_schedules import ARTIFACT, schedule
from tests.support.hostile import execute
from tests.support.rows import GPU, put_key, workload


def fill(store: Store) -> tuple[Key, Key]:
    """A key whose schedule is decided and one whose is not, with old and new rows of everything."""
    decided, open_ = put_key(store, workload(1)), put_key(store, workload(2))
    store.put_schedule(schedule(decided, config={"best": 1}))
    for when in (100.0, 200.0):
        for key in (decided, open_):
            store.add_measurement(Measurement(key, {"lost": when}, Status.OK, latency_us=20.0, when=when))
            store.add_measurement(Measurement(key, {"failed": when}, Status.CRASHED, when=when))
        store.add_miss(workload(int(when)), GPU.fingerprint, "why")
    for stage in ("screen", "final"):
        store.add_measurement(Measurement(decided, {"best": 1}, Status.OK, stage, latency_us=10.0, when=100.0))
    for command in ("a", "a", "b"):
        store.finish_run(store.start_run(command).id)
    store.start_run("a")
    return decided, open_


def test_what_goes_and_what_stays(store: Store) -> None:
    decided, open_ = fill(store)
    limits = Limits(runs=True, failures=150.0, candidates=150.0)
    before = store.stats()["rows"]
    would = prune(store, limits, dry=True)
    assert would == {"runs": 2, "failures": 2, "candidates": 2}, "a failure of a decided key is both"
    assert store.stats()["rows"] == before
    assert prune(store, limits, dry=False) == {
        "runs": 2, "failures": 2, "candidates": 1, "configurations": 1, "artifacts": 0, "kernels": 0
    }  # fmt: skip
    left = {(m.key.workload, *m.config, m.when) for m in store.measurements()}
    assert left == {(decided.workload, "best", 100.0), (decided.workload, "lost", 200.0),
                    (decided.workload, "failed", 200.0), (open_.workload, "lost", 100.0),
                    (open_.workload, "lost", 200.0), (open_.workload, "failed", 200.0)}  # fmt: skip
    assert [r.command for r in store.runs()] == ["a", "b"]
    assert store.get_schedule(decided.workload, decided.device) == schedule(decided, config={"best": 1})
    assert list(damage(store)) == []
    assert set(prune(store, limits, dry=False).values()) == {0}


def test_misses_and_what_nothing_refers_to(store: Store) -> None:
    decided, _ = fill(store)
    store.put_artifact(ARTIFACT)
    store.put_schedule(schedule(decided, 1.0, config=None, artifact=None, winner="eager"), replace=True)
    found = prune(store, Limits(misses=time.time() + 1), dry=False)
    assert found == {"misses": 2, "configurations": 0, "artifacts": 1, "kernels": 2}
    assert store.stats()["rows"]["autotune_blobs"] == 0
    assert store.misses() == []


def test_pruning_beside_a_search_costs_it_nothing(postgres_url: str) -> None:
    """A configuration is written before what refers to it: it never goes in between."""
    with Store.open(postgres_url) as store:
        key = put_key(store)
        over, errors = threading.Event(), []

        def search() -> None:
            try:
                for n in range(150):
                    store.add_measurement(Measurement(key, {"n": n % 5}, Status.CRASHED, when=1.0))
            except BaseException as e:
                errors.append(e)
            over.set()

        thread = threading.Thread(target=search)
        thread.start()
        while not over.is_set():
            prune(store, Limits(failures=2.0), dry=False)
        thread.join()
        assert errors == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = str(tmp_path / "x.db")
    with Store.open(db) as store:
        fill(store)
    assert app.main(["db", "prune", "--db", db]) == 2
    assert "nothing is named to go" in capsys.readouterr().err
    for wrong in ("soon", "30", "2026-13-01", "9" * 400 + "d"):
        with pytest.raises(SystemExit):
            app.main(["db", "prune", "--db", db, "--misses", wrong])
        assert "is no date as 2026-01-31 and no age as 30d" in capsys.readouterr().err
    assert app.main(["db", "prune", "--db", db, "--failures", "1d", "--runs"]) == 0
    assert "2 runs, 4 failures would go; --yes removes it" in capsys.readouterr().out
    assert app.main(["db", "prune", "--db", db, "--failures", "1970-01-03", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == 4


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Another database: a faster schedule, a slower one, a measurement that differs, and rows of everything."""
    with Store.open(tmp_path / "other.db") as store:
        first, second = put_key(store, workload(1)), put_key(store, workload(2))
        store.put_schedule(schedule(first, 5.0, config={"theirs": 1}))
        store.put_schedule(schedule(second, 50.0, config={"theirs": 2}))
        store.put_schedule(schedule(put_key(store, workload(3)), config=None, artifact=None, winner="eager"))
        store.add_measurement(Measurement(first, {"m": 1}, Status.OK, latency_us=7.0, when=1.0))
        store.add_measurement(Measurement(first, {"m": 2}, Status.CRASHED, when=1.0))
        store.add_measurement(Measurement(first, {"m": 3}, Status.OK, latency_us=7.0, when=1.0))
        store.add_effort(Effort(first, "s" * 64, 9.0, 2.0, True))
        store.put_calibration(Calibration(first.device, "fusion", {"copy_gbs": 2.0}))
        store.put_verdicts([Verdict("a" * 64, first.device, first.environment, "default", (), {})])
        store.add_miss(workload(9), GPU.fingerprint, "why")
        store.finish_run(store.start_run("theirs").id)
    return str(tmp_path / "other.db")


def test_merge(store: Store, other: str) -> None:
    first, second = put_key(store, workload(1)), put_key(store, workload(2))
    store.put_schedule(schedule(first, 10.0, config={"ours": 1}))
    store.put_schedule(schedule(second, 10.0, config={"ours": 2}))
    for n, us in ((1, 9.0), (2, 8.0), (3, 6.0)):
        store.add_measurement(Measurement(first, {"m": n}, Status.OK, latency_us=us, when=2.0))
    with Store.open(other, readonly=True) as there:
        found = merge(store, there)
        assert found.left_out == []
        assert len([c for c in found.conflicts if c.startswith("schedule")]) == 2
        assert len([c for c in found.conflicts if c.startswith("measurement")]) == 3
        rows = store.stats()["rows"]
        again = merge(store, there)
        assert again.rows["schedules"] == again.rows["measurements"] == again.rows["runs"] == 0
        assert store.stats()["rows"] == rows, "what is merged again changes nothing"
        with pytest.raises(UserError, match="the same database"):
            merge(there, there)
    for key, config in ((first, {"theirs": 1}), (second, {"ours": 2})):
        s = store.get_schedule(key.workload, key.device)
        assert s is not None
        assert s.config == config
        assert s.artifact == ARTIFACT
    assert store.schedules(workload=workload(3).fingerprint)[0].winner == "eager"
    kept = {next(iter(m.config.items())): m.latency_us for m in store.measurements()}
    assert kept == {("m", 1): 7.0, ("m", 2): 8.0, ("m", 3): 6.0, ("ours", 1): 10.0, ("theirs", 2): 50.0}
    assert [m.workload for m in store.misses()] == [workload(9).fingerprint]
    assert store.runs()[0].command == "theirs"
    assert store.get_effort(first, "s" * 64) is not None
    assert len(store.verdicts()) == 1
    assert list(damage(store)) == []


def test_a_merge_that_was_stopped_goes_on(store: Store, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merging._write
    calls = []

    def stopped(*args: object) -> object:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return whole(*args)  # type: ignore[arg-type]

    with Store.open(other, readonly=True) as there:
        monkeypatch.setattr(merging, "_write", stopped)
        with pytest.raises(KeyboardInterrupt):
            merge(store, there)
        assert list(damage(store)) == []
        monkeypatch.setattr(merging, "_write", whole)
        merge(store, there)
        assert len(store.schedules(artifacts=True)) == 3
        assert len(store.measurements()) == 3


def test_damaged_rows_stay_over_there(tmp_path: Path, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    execute(Path(other), "UPDATE autotune_configs SET params = '{}' WHERE params LIKE '%theirs%1%'")
    execute(Path(other), "UPDATE autotune_workloads SET spec = '[' WHERE extent = 2")
    db = str(tmp_path / "here.db")
    assert app.main(["db", "merge", other, "--db", db]) == 0
    out = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("left out: ") for line in out) == 4
    assert out[-1].endswith("0 conflicts")
    assert app.main(["db", "verify", "--db", db]) == 0
    assert app.main(["db", "merge", other, "--db", db, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["conflicts"] == []
    assert app.main(["db", "merge", str(tmp_path / "none.db"), "--db", db]) == 2
