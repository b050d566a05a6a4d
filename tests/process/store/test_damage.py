"""Rows that are damaged on disk: everything else is read, each has a line, ``db verify`` finds all."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cli import app
from autotune.errors import UserError
from autotune.store import Calibration, Effort, Key, Measurement, Store, Verdict
from autotune.store.snapshot_writer import export_snapshot
from autotune.store.upkeep import damage
from autotune.task import Status
from autotune.tuner.seeds import winners
from tests.process.store.test_schedules import schedule
from tests.support.rows import ENVIRONMENT, FAR, GPU, put_key, workload
from tests.support.snapshots import Imported, import_file


@pytest.fixture(scope="module")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows, to be copied."""
    file = tmp_path_factory.mktemp("empty") / "tune.db"
    Store.open(file).close()
    return file


@pytest.fixture(scope="module")
def filled_file(tmp_path_factory: pytest.TempPathFactory, empty_file: Path) -> tuple[Path, Key]:
    """Two of everything, of which the first will be damaged; to be copied."""
    file = tmp_path_factory.mktemp("filled") / "tune.db"
    shutil.copy(empty_file, file)
    with Store.open(file) as store:
        for rows in (1, 2):
            key, run = put_key(store, workload(rows)), store.start_run(f"run {rows}").id
            for stage in ("screen", "final"):
                config = {"threads": 32 * rows}
                store.add_measurement(
                    Measurement(key, config, Status.OK, stage, latency_us=10.0, samples=(9.0, 11.0), noise=0.1, run=run)
                )
            store.put_schedule(schedule(key, 10.0 * rows, config={"threads": 32 * rows}, extent=rows))
            store.add_effort(Effort(key, "s" * 64, 1.0, 2.0, True))
            store.add_miss(workload(rows + 10), GPU.fingerprint, "why")
            store.claim(key, {"threads": 5}, "screen", "me", 1e6)
        store.put_calibration(Calibration(key.device, "fusion", {"copy_gbs": 1.0}))
        for graph in "ab":
            family = {"workload": "w" * 64, "label": "softmax", "count": 2, "gain_us": None, "gain_of": "step"}
            record = {"compile_us": 2.0, "autotune_us": 1.0, "families": [{**family, "kept": True}], "target": graph}
            store.put_verdicts([Verdict(graph * 64, key.device, key.environment, "default", ("x",), record)])
        first = put_key(store, workload(1))
    return file, first


@pytest.fixture
def filled(filled_file: tuple[Path, Key], sqlite_file: Path) -> tuple[Path, Key]:
    shutil.copy(filled_file[0], sqlite_file)
    return sqlite_file, filled_file[1]


W1 = "fingerprint = (SELECT fingerprint FROM autotune_workloads WHERE extent = 1)"
S1 = "workload = (SELECT fingerprint FROM autotune_workloads WHERE extent = 1)"
C1 = "fingerprint IN (SELECT config FROM autotune_schedules WHERE extent = 1)"
DEEP = "[" * 100_000
RUN1 = "command = 'run 1'"


def _record(changed: str) -> str:
    return f"UPDATE autotune_verdicts SET record = {changed} WHERE graph LIKE 'a%'"


DAMAGE = {
    "spec no json": f"UPDATE autotune_workloads SET spec = '{{' WHERE {W1}",
    "spec deep": f"UPDATE autotune_workloads SET spec = '{DEEP}' WHERE {W1}",
    "spec a number": f"UPDATE autotune_workloads SET spec = '5' WHERE {W1}",
    "spec another": f"UPDATE autotune_workloads SET spec = '{{}}' WHERE {W1}",
    "spec not utf-8": f"UPDATE autotune_workloads SET spec = CAST(x'ff7b' AS TEXT) WHERE {W1}",
    "source null": f"UPDATE autotune_workloads SET source = 'null' WHERE {W1}",
    "extent a text": f"UPDATE autotune_workloads SET extent = 'many' WHERE {W1}",
    "identity a list": "UPDATE autotune_devices SET identity = '[]'",
    "identity another": "UPDATE autotune_devices SET identity = replace(identity, '132', '133')",
    "identity units": "UPDATE autotune_devices SET identity = replace(identity, '132', '\"x\"')",
    "versions": "UPDATE autotune_environments SET versions = '{'",
    "versions another": "UPDATE autotune_environments SET versions = replace(versions, '580', '581')",
    "loose": "UPDATE autotune_environments SET loose = 'x'",
    "config no json": f"UPDATE autotune_configs SET params = '{{' WHERE {C1}",
    "config a list": f"UPDATE autotune_configs SET params = '[]' WHERE {C1}",
    "config another": f"UPDATE autotune_configs SET params = '{{\"threads\": 1}}' WHERE {C1}",
    "config long number": f"UPDATE autotune_configs SET params = '{{\"a\": {'9' * 5000}}}' WHERE {C1}",
    "config gone": f"DELETE FROM autotune_configs WHERE {C1}",
    "latency a text": f"UPDATE autotune_schedules SET latency_us = 'fast' WHERE {S1}",
    "latency below 0": f"UPDATE autotune_schedules SET latency_us = -1 WHERE {S1}",
    "latency infinite": f"UPDATE autotune_schedules SET latency_us = 9e999 WHERE {S1}",
    "baselines a list": f"UPDATE autotune_schedules SET baselines = '[1]' WHERE {S1}",
    "baselines texts": f'UPDATE autotune_schedules SET baselines = \'{{"eager": "x"}}\' WHERE {S1}',
    "baselines no json": f"UPDATE autotune_schedules SET baselines = 'x' WHERE {S1}",
    "schedule time": f"UPDATE autotune_schedules SET created = 'now' WHERE {S1}",
    "schedule others": f"UPDATE autotune_schedules SET others = 'many' WHERE {S1}",
    "code": "UPDATE autotune_blobs SET code = x'00'",
    "code a text": "UPDATE autotune_blobs SET code = 'text'",
    "code gone": "DELETE FROM autotune_blobs",
    "artifact target": "UPDATE autotune_artifacts SET target = 'x'",
    "artifact kernels": "UPDATE autotune_artifacts SET kernels = '5'",
    "artifact kernels no json": "UPDATE autotune_artifacts SET kernels = '['",
    "artifact gone": "DELETE FROM autotune_artifacts",
    "workload gone": f"DELETE FROM autotune_workloads WHERE {W1}",
    "device gone": "DELETE FROM autotune_devices",
    "environment gone": "DELETE FROM autotune_environments",
    "status": f"UPDATE autotune_measurements SET status = 'fine' WHERE {S1}",
    "measured latency": f"UPDATE autotune_measurements SET latency_us = NULL WHERE {S1}",
    "samples": f"UPDATE autotune_measurements SET samples = '{{' WHERE {S1}",
    "samples texts": f"UPDATE autotune_measurements SET samples = '[\"x\"]' WHERE {S1}",
    "metrics a list": f"UPDATE autotune_measurements SET metrics = '[]' WHERE {S1}",
    "metrics texts": f'UPDATE autotune_measurements SET metrics = \'{{"GB/s": "x"}}\' WHERE {S1}',
    "metrics no json": f"UPDATE autotune_measurements SET metrics = '{{' WHERE {S1}",
    "measured when": f"UPDATE autotune_measurements SET created = 'now' WHERE {S1}",
    "effort": f"UPDATE autotune_efforts SET seconds = 'long' WHERE {S1}",
    "calibration": "UPDATE autotune_calibrations SET figures = '[]'",
    "calibration figure": "UPDATE autotune_calibrations SET figures = '{\"copy_gbs\": null}'",
    "verdict": "UPDATE autotune_verdicts SET \"left\" = '{' WHERE graph LIKE 'a%'",
    "verdict left": "UPDATE autotune_verdicts SET \"left\" = '[1]' WHERE graph LIKE 'a%'",
    "verdict record": "UPDATE autotune_verdicts SET record = '[]' WHERE graph LIKE 'a%'",
    "verdict time": "UPDATE autotune_verdicts SET created = 'now' WHERE graph LIKE 'a%'",
    "miss": "UPDATE autotune_misses SET count = 'often'",
    "miss of nothing": "DELETE FROM autotune_workloads WHERE extent > 10",
    "run": f"UPDATE autotune_runs SET summary = '[' WHERE {RUN1}",
    "run began": f"UPDATE autotune_runs SET started = 'early' WHERE {RUN1}",
    **{
        f"verdict record, {name} {value}": _record(f"json_set(record, '$.{name}', json('{value}'))")
        for name, value in (
            ("compile_us", "-5"), ("compile_us", "0"), ("compile_us", '"2"'), ("compile_us", "1e308"),
            ("autotune_us", "[]"), ("ratio", "true"), ("noise", "-1"), ("tries", "0.5"), ("cut", "1"),
            ("train", "[1]"), ("families", "5"), ("families", "{}"), ("families", "[5]"), ("target", "5"),
            ("families[0].label", "[]"), ("families[0].count", "-1"), ("families[0].gain_us", '"x"'),
            ("families[0].kept", '"x"'), ("families[0].workload", "null"), ("command", "{}"), ("others_busy", "null"),
            ("numerics", "5"), ("numerics", '{"tf32": {}}'), ("numerics", '{"tf32": null}'),
        )
    },
    **{
        f"verdict record, {name} {why}": _record(f"replace(record, '2.0', '{value}')")
        for name, value, why in (
            ("compile_us", "1" + 400 * "0", "huge"), ("compile_us", "1e999", "infinite"), ("compile_us", "NaN", "NaN"),
        )
    },
    "verdict record, half of a pair": _record("""replace(record, '"a"', '"\\ud800"')"""),
    **{
        f"{table} {column} {value[:12]}": f"UPDATE autotune_{table} SET {column} = {value} WHERE {where}"
        for value in ("'now'", "x'ff00'", "1e308", "-1", "9e999")
        for table, column, where in (
            ("measurements", "created", S1), ("measurements", "latency_us", S1), ("schedules", "created", S1),
            ("schedules", "latency_us", S1), ("runs", "started", RUN1), ("runs", "finished", RUN1),
            ("verdicts", "created", "graph LIKE 'a%'"), ("efforts", "created", S1), ("claims", "expires", "1"),
            ("calibrations", "created", "1"), ("misses", "created", "1"), ("workloads", "created", W1),
        )
    },
}  # fmt: skip


def _damage(file: Path, name: str) -> None:
    c = sqlite3.connect(file)
    c.execute("PRAGMA foreign_keys = OFF")
    assert c.execute(DAMAGE[name]).rowcount > 0
    c.commit()
    c.close()


@pytest.mark.parametrize("name", DAMAGE)
def test_one_damaged_row_stops_nothing(
    filled: tuple[Path, Key], empty_file: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, key = filled
    _damage(file, name)
    second = workload(2).fingerprint
    with Store.open(file) as store:
        for loose in ("loose", "strict"):
            store.get_schedule(key.workload, key.device, ENVIRONMENT, match=loose)  # type: ignore[arg-type]
            store.nearest("f" * 64, key.device, ENVIRONMENT, 3, match=loose, limit=9)  # type: ignore[arg-type]
            store.family_schedules("f" * 64, key.device, ENVIRONMENT, match=loose)  # type: ignore[arg-type]
        store.get_workload(key.workload)
        store.get_device(key.device)
        store.get_environment(key.environment)
        store.get_effort(key, "s" * 64)
        store.get_calibration(key.device, "fusion")
        if name.startswith("verdict"):
            assert store.get_verdict("a" * 64, key.device, ENVIRONMENT, "default") is None
            assert [v.graph for v in store.verdicts()] == ["b" * 64]
        assert store.state()
        assert store.activity()
        assert "run 2" in {r.command for r in store.runs(limit=2)}
        store.best(key)
        store.status_counts(key)
        store.neighbours("f" * 64, key.device)
        winners(store, key)
        winners(store, replace(key, environment=FAR.strict))
        if name.startswith("metrics"):
            assert key.workload in {line.workload for line in store.overview() if line.winner}
        store.captured("x")
        spoiled = ("code", "artifact", "environment", "device", "versions", "identity", "loose")
        if not name.startswith(spoiled):
            assert store.get_schedule(second, key.device, ENVIRONMENT) is not None
        count = 0
        with contextlib.suppress(UserError):  # the device of both schedules may be the damaged row
            count = export_snapshot(store, tmp_path / "s.atdb").schedules
        assert count or name.startswith(spoiled)
        if count:
            with Store.open(shutil.copy(empty_file, tmp_path / "to.db")) as other:
                assert import_file(other, tmp_path / "s.atdb") == Imported(count, count, [])
        found = list(damage(store))
        assert found, "verify finds it"
        assert all("\n" not in line and len(line) <= 500 for line in found)
    for command in (
        ["show"], ["show", "--json"], ["db", "stats"], ["db", "stats", "--json"], ["watch", "--once"],
        ["watch", "--once", "--json"], ["report", "-o", str(tmp_path / "report")],
    ):  # fmt: skip
        alone = command[0] == "report" and name.startswith(("identity", "device"))  # nothing is left to report
        assert app.main([*command, "--db", str(file)]) == (2 if alone else 0), command
    assert "Traceback" not in capfd.readouterr().err


def test_verify_finds_nothing_in_a_sound_database(store: Store, key: Key) -> None:
    store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0, samples=(1.0,), noise=0.1))
    store.add_measurement(Measurement(key, {"a": 2}, Status.WRONG_RESULT, error=float("inf"), reason="off"))
    store.add_measurement(Measurement(key, {"a": 3}, Status.TIMEOUT))
    store.put_schedule(schedule(key))
    store.put_schedule(schedule(put_key(store, workload(2)), config=None, artifact=None, winner="eager"))
    store.add_effort(Effort(key, "s", 1.0, 2.0, False))
    store.put_calibration(Calibration(key.device, "fusion", {"copy_gbs": 1.0}))
    store.put_verdicts([Verdict("a" * 64, key.device, key.environment, "default")])
    store.add_miss(workload(9), GPU.fingerprint, "why")
    store.finish_run(store.start_run("c").id)
    store.claim(key, {"a": 4}, "screen", "me", 60)
    assert list(damage(store)) == []


def test_a_damaged_row_is_named_once(filled: tuple[Path, Key], caplog: pytest.LogCaptureFixture) -> None:
    file, key = filled
    _damage(file, "latency a text")
    with Store.open(file) as store, caplog.at_level(logging.WARNING, "autotune.store"):
        for _ in range(3):
            assert store.get_schedule(key.workload, key.device) is None
            assert len(store.schedules()) == 1
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1
    assert key.workload[:12] in told[0]
    assert "its latency is 'fast'" in told[0]


def test_a_name_that_is_no_text_stops_nothing(filled: tuple[Path, Key]) -> None:
    """SQLite keeps bytes in a column of texts; names are sorted before they are asked for."""
    file, key = filled
    with contextlib.closing(sqlite3.connect(file)) as c, c:
        c.execute("PRAGMA foreign_keys = OFF")
        c.execute(
            "UPDATE autotune_schedules SET device = ? WHERE rowid = (SELECT max(rowid) FROM autotune_schedules)",
            (b"\xff\x00",),
        )
    with Store.open(file) as store:
        assert set(store.get_devices([key.device, b"\xff\x00"])) == {key.device}  # type: ignore[list-item]
        assert store.overview()
        assert any(line.startswith("schedule") for line in damage(store))
    for form in ([], ["--json"]):
        assert app.main(["show", *form, "--db", str(file)]) in (0, 2)


def test_the_command(filled: tuple[Path, Key], capsys: pytest.CaptureFixture[str]) -> None:
    file, key = filled
    assert app.main(["db", "verify", "--db", str(file)]) == 0
    assert "0 damaged rows" in capsys.readouterr().out
    _damage(file, "baselines a list")
    _damage(file, "config another")
    assert app.main(["db", "verify", "--db", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("configs ") for line in lines) == 1
    assert sum(line.startswith(f"schedules {key.workload[:12]}") for line in lines) == 1
    assert sum(line.startswith("measurements ") for line in lines) == 2, "those of that configuration are not used"
    assert lines[-1].endswith("4 damaged rows")
    assert app.main(["db", "verify", "--db", str(file), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 4
