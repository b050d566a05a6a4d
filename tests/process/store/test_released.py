"""Databases of every released schema, kept as SQL, upgraded: they answer as they did, on both dialects."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command

from autotune.store import Calibration, Effort, Saving, Store, Verdict
from autotune.store.connection import migrate
from autotune.store.connection.engine import create_engine
from autotune.store.connection.urls import parse_url
from autotune.store.models import SCHEMA_REVISION, VERSION_TABLE
from autotune.store.upkeep import damage
from tests.process.store.test_schedules import schedule
from tests.support.rows import ENVIRONMENT, GPU, NEAR, put_key, workload

pytestmark = pytest.mark.usefixtures("migrated_anew")

DUMPS = sorted((Path(__file__).parent / "databases").glob("*.sql"))


def restore(dump: Path, url: str) -> None:
    """Make the database that ``dump`` was taken of: of the file itself on SQLite, of its rows on a server."""
    if url.startswith("sqlite"):
        c = sqlite3.connect(str(parse_url(url).database))
        c.executescript(dump.read_text())
        c.close()
        return
    engine, old = create_engine(parse_url(url)), sqlite3.connect(":memory:")
    old.executescript(dump.read_text())
    with engine.begin() as c:
        config = migrate._config()
        config.attributes["connection"] = c
        command.upgrade(config, dump.stem)
    with engine.begin() as c:
        tables = sa.MetaData()
        tables.reflect(c)
        for table in tables.sorted_tables:
            if table.name == VERSION_TABLE:
                continue
            names = [column.name for column in table.c]
            quoted = ", ".join(f'"{name}"' for name in names)
            for row in old.execute(f"SELECT {quoted} FROM {table.name}"):
                values = dict(zip(names, row, strict=True))
                for column in table.c:
                    if isinstance(column.type, sa.JSON):
                        values[column.name] = json.loads(values[column.name])
                    if isinstance(column.type, sa.Boolean):
                        values[column.name] = bool(values[column.name])
                c.execute(sa.insert(table).values(**values))
    engine.dispose()


def test_there_is_one_of_every_revision() -> None:
    assert [d.stem for d in DUMPS] == [f"{n:04}" for n in range(1, int(SCHEMA_REVISION) + 1)]


@pytest.mark.parametrize("dump", DUMPS, ids=lambda d: d.stem)
def test_an_upgraded_database_answers_as_it_did(dump: Path, url: str) -> None:
    restore(dump, url)
    assert migrate.current(url) == dump.stem
    assert migrate.upgrade(url) == SCHEMA_REVISION
    with Store.open(url, migrate=False) as store:
        key = put_key(store)
        for env, how in ((ENVIRONMENT, "strict"), (NEAR, "loose")):
            found = store.get_schedule(key.workload, key.device, env, match=how)  # type: ignore[arg-type]
            assert found == schedule(key, others=0.5, space="a" * 64)
        assert store.get_schedule(key.workload, key.device, NEAR) is None
        (near,) = store.nearest("f" * 64, key.device, ENVIRONMENT, 200, limit=1)
        assert (near.workload, near.extent) == (workload(128).fingerprint, 128)
        assert [s.winner for s in store.family_schedules("f" * 64, key.device)] == ["autotune", "eager"]
        assert [(m.config["threads"], m.latency_us) for m in store.best(key, n=5)] == [(32, 10.0), (64, 12.0)]
        assert store.status_counts(key) == {"ok": 2, "wrong_result": 1}
        assert math.isinf(store.measurements(status="wrong_result")[0].error or 0)
        assert store.get_effort(key, "s" * 64) == Effort(key, "s" * 64, 1.0, 2.0, True, "settled", 8.0)
        assert store.get_calibration(key.device, "fusion") == Calibration(key.device, "fusion", {"copy_gbs": 1.5}, 9.0)
        assert [(m.workload, m.device) for m in store.misses()] == [(workload(256).fingerprint, GPU.fingerprint)]
        assert store.captured("s") == [(workload(), 2)]
        record = {"compile_us": 2.0}
        verdict = Verdict("a" * 64, key.device, key.environment, "default", (key.workload,), record, 10.0)
        assert store.verdicts() == ([verdict] if dump.stem >= "0003" else [])
        assert [m.metrics for m in store.measurements()] == [{"GB/s": 2.5} if dump.stem >= "0004" else {}, {}, {}]
        counted = Saving(
            "c" * 32, "a" * 64, key.device, key.environment, "default", "2026-11-23", "train.py", 1000, 12.5
        )
        assert store.savings() == ([counted] if dump.stem >= "0005" else [])
        assert list(damage(store)) == []
        assert store.put_schedule(schedule(key, 5.0))
