"""Look-ups and overviews that do not grow with the database."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from autotune.cli import app
from autotune.store import Key, Measurement, Store
from autotune.store.models import ScheduleRow, WorkloadRow
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support.rows import ENVIRONMENT, FAR, GPU, NEAR, OTHER_GPU, put_key, workload

FAMILY = "f" * 64


def _extents(store: Store, extent: int, *, limit: int = 3, match: str = "strict", device: str = "") -> list[int]:
    device = device or GPU.fingerprint
    found = store.nearest(FAMILY, device, ENVIRONMENT, extent, match=match, limit=limit)  # type: ignore[arg-type]
    assert all(store.get_workload(near.workload) == workload(near.extent) for near in found)
    return [near.extent for near in found]


def test_the_nearest_by_ratio_come_first(store: Store) -> None:
    for rows in (8, 64, 100, 512, 4096):
        store.put_schedule(schedule(put_key(store, workload(rows)), extent=rows, when=float(rows)))
    assert _extents(store, 64) == [64, 100, 512]
    assert _extents(store, 200, limit=2) == [100, 512]
    assert _extents(store, 1, limit=9) == [8, 64, 100, 512, 4096]
    assert _extents(store, 10**9, limit=2) == [4096, 512]
    assert _extents(store, 64, device=OTHER_GPU.fingerprint) == []
    assert store.nearest("", GPU.fingerprint, ENVIRONMENT, 64, limit=3) == []
    (one,) = store.nearest(FAMILY, GPU.fingerprint, ENVIRONMENT, 500, limit=1)
    assert one.when == 512.0


def test_a_workload_counts_once_and_environments_are_distinguished(store: Store) -> None:
    for env in (ENVIRONMENT, NEAR):
        for policy in "pq":
            key = put_key(store, workload(64), env=env)
            store.put_schedule(schedule(Key(key.workload, key.device, key.environment, policy * 64), extent=64))
    store.put_schedule(schedule(put_key(store, workload(70), env=NEAR), extent=70))
    store.put_schedule(schedule(put_key(store, workload(71), env=FAR), extent=71))
    assert _extents(store, 72, match="loose") == [70, 64]
    assert _extents(store, 72) == [64]


def test_an_index_alone_finds_the_nearest(sqlite_file: Path) -> None:
    """No statement may read or sort the family: SQLite's plan shows it."""
    with Store.open(sqlite_file) as store:
        statements: list[tuple[str, object]] = []
        event.listen(store._engine, "before_cursor_execute", lambda *a: statements.append((a[2], a[3])))
        store.nearest(FAMILY, GPU.fingerprint, ENVIRONMENT, 64, match="loose", limit=3)
        selects = [s for s in statements if s[0].startswith("SELECT")]
        with store.reading() as c:
            plans = [" ".join(r[3] for r in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {q}", p)) for q, p in selects]
    assert len(plans) == 3
    for plan in plans[:2]:
        assert "COVERING INDEX ix_autotune_schedules_nearest (device=? AND family=? AND extent" in plan
        assert "TEMP B-TREE" not in plan
    assert "(workload=?" in plans[2]


def _many(store: Store, count: int) -> None:
    key = put_key(store, workload(1))
    store.put_schedule(schedule(key, extent=1))
    with store.writing() as c:
        row = dict(c.execute(sa.select(ScheduleRow.__table__)).one()._mapping)
        made = [workload(n) for n in range(2, count + 1)]
        c.execute(sa.insert(WorkloadRow), [{**w.to_json(), "fingerprint": w.fingerprint, "created": 1.0} for w in made])
        c.execute(
            sa.insert(ScheduleRow),
            [{**row, "workload": w.fingerprint, "extent": w.extent, "created": 100.0 + w.extent} for w in made],
        )


def test_an_overview_is_of_the_newest(store: Store) -> None:
    _many(store, 1200)
    old = put_key(store, workload(5000), OTHER_GPU)
    store.add_measurement(Measurement(old, {"a": 1}, Status.OK, latency_us=3.0, when=1.0))
    store.add_measurement(Measurement(old, {"a": 2}, Status.TIMEOUT, when=1.0))
    assert store.tuned_count() == 1201
    newest = store.overview(3)
    assert [o.when for o in newest] == [1300.0, 1299.0, 1298.0]
    assert newest[0].workload == workload(1200).fingerprint
    assert (newest[0].best_us, newest[0].speedup, newest[0].baselines["eager"]) == (10.0, 1.5, 40.0)
    every = store.overview()
    assert len(every) == 1201
    assert [o.when for o in every] == sorted((o.when for o in every), reverse=True)
    assert every[:3] == newest
    assert (every[-1].measured, every[-1].failed, every[-1].best_us) == (2, {"timeout": 1}, 3.0)
    assert every[-1].device_name == OTHER_GPU.name
    assert store.stats()["schedules"] == 1200


def test_show_limits_its_table(sqlite_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(sqlite_file) as store:
        _many(store, 220)
    db = ["--db", str(sqlite_file)]
    assert app.main(["show", *db]) == 0
    out = capsys.readouterr().out
    assert out.count("layer_norm") == 200
    assert "These are the newest 200 of 220: --limit N shows more." in out
    for limit, count in (("5", 5), ("0", 220)):
        assert app.main(["show", *db, "--limit", limit]) == 0
        assert capsys.readouterr().out.count("layer_norm") == count
    assert app.main(["show", *db, "--json"]) == 0
    assert capsys.readouterr().out.count("layer_norm") == 220
