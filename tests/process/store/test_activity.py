"""Running searches as the database shows them."""

from __future__ import annotations

import time

import pytest

from autotune.store import Measurement, Store
from autotune.task import Status
from tests.support.rows import put_key, workload


def measure(store: Store, run: str, rows: int, threads: int, us: float | None, stage: str = "screen") -> None:
    key = put_key(store, workload(rows))
    status = Status.TIMEOUT if us is None else Status.OK
    store.add_measurement(Measurement(key, {"threads": threads}, status, stage=stage, latency_us=us, run=run))


def test_progress_of_a_running_search(store: Store) -> None:
    assert store.activity() == []
    earlier = store.start_run("autotune search earlier")
    store.finish_run(earlier.id)
    run = store.start_run("autotune search fusion layer_norm")
    assert [a.run for a in store.activity()] == [run.id]  # the finished one is left out
    measure(store, run.id, 64, 1, 30.0)
    measure(store, run.id, 64, 1, 25.0, stage="repeat")  # the same candidate again
    measure(store, run.id, 64, 2, None)
    measure(store, run.id, 128, 1, 70.0)
    measure(store, "another", 128, 2, 1.0)
    (now,) = store.activity()
    assert (now.state, now.measured, now.failed) == ("running", 3, 1)
    assert now.host
    assert [(w.label, w.measured, w.failed, w.best_us) for w in now.workloads] == [
        ("layer_norm f32 64x8", 2, 1, 25.0),
        ("layer_norm f32 128x8", 1, 0, 70.0),
    ]
    assert now.rate >= 3.0  # a minute, of a run that has just begun
    store.finish_run(run.id, "interrupted")
    (ended,) = store.activity()
    assert (ended.run, ended.state, ended.rate) == (run.id, "interrupted", 0.0)
    assert ended.finished == pytest.approx(time.time(), abs=60)


def test_a_run_whose_process_died_is_lost_and_several_run_at_once(store: Store) -> None:
    from autotune.store.tables.measurements import owner_name

    host = owner_name().rsplit(":", 2)[0]
    dead = store.start_run("autotune search dead", owner=f"{host}:999999999:x")
    assert [a.state for a in store.activity()] == ["lost"]
    # Another host's processes cannot be seen, so what they say counts.
    away = store.start_run("autotune search away", owner="elsewhere:1:x")
    here = store.start_run("autotune search here")
    found = {a.run: (a.state, a.host) for a in store.activity()}
    assert dead.id not in found
    assert found[away.id] == ("running", "elsewhere")
    assert found[here.id][0] == "running"
