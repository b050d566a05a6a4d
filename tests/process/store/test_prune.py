"""``autotune db prune``."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from autotune.cli import app
from autotune.store import Key, Measurement, Store
from autotune.store.upkeep import Limits, damage, prune
from autotune.task import Status
from tests.process.store.test_schedules import schedule
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


def test_pruned_and_kept_rows(store: Store) -> None:
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


def test_misses_and_unreferenced_rows(store: Store) -> None:
    decided, _ = fill(store)
    store.put_schedule(schedule(decided, 1.0, config=None, artifact=None, winner="eager"), replace=True)
    found = prune(store, Limits(misses=time.time() + 1), dry=False)
    assert found == {"misses": 2, "configurations": 0, "artifacts": 1, "kernels": 2}
    assert store.stats()["rows"]["autotune_blobs"] == 0
    assert store.misses() == []


def test_pruning_during_a_search_costs_it_nothing(postgres_url: str) -> None:
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
    assert "name what to delete" in capsys.readouterr().err
    for wrong in ("soon", "30", "2026-13-01", "9" * 400 + "d"):
        with pytest.raises(SystemExit):
            app.main(["db", "prune", "--db", db, "--misses", wrong])
        assert "is not a date such as 2026-01-31 or an age such as 30d" in capsys.readouterr().err
    assert app.main(["db", "prune", "--db", db, "--failures", "1d", "--runs"]) == 0
    assert "would delete 2 runs, 4 failures; add --yes to delete" in capsys.readouterr().out
    assert app.main(["db", "prune", "--db", db, "--failures", "1970-01-03", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == 4
