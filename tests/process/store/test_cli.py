"""``autotune db`` and ``autotune show``, as the command line calls them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from autotune.cli.commands import db, show
from autotune.errors import UserError
from autotune.store import Measurement, Store
from autotune.store.models import SCHEMA_REVISION
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support.rows import GPU, put_key, workload


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    db.add_parser(commands)
    show.add_parser(commands)
    args = parser.parse_args([str(a) for a in argv])
    return int(args.run(args))


@pytest.fixture
def filled(sqlite_file: Path) -> Path:
    with Store.open(sqlite_file) as store:
        key = put_key(store)
        store.add_measurement(Measurement(key, {"threads": 32}, Status.OK, latency_us=10.0))
        store.add_measurement(Measurement(key, {"threads": 64}, Status.WRONG_RESULT, reason="off by one"))
        store.put_schedule(schedule(key))
        store.add_miss(workload(99), GPU.fingerprint, "no schedule")
    return sqlite_file


def test_upgrade_and_current(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("db", "current", "--db", url) == 0
    assert "no autotune tables" in capsys.readouterr().out
    assert run("db", "upgrade", "--db", url) == 0
    assert f"empty -> {SCHEMA_REVISION}" in capsys.readouterr().out
    assert run("db", "upgrade", "--db", url) == 0
    assert "already" in capsys.readouterr().out
    assert run("db", "current", "--db", url, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["revision"] == data["head"] == SCHEMA_REVISION


def test_stats(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("db", "stats", "--db", filled) == 0
    text = capsys.readouterr().out
    assert "measurements  2, 1 ok, 1 wrong_result" in text
    assert "1.50x in the geometric mean" in text
    assert run("db", "stats", "--db", filled, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"]["autotune_measurements"] == 2
    assert data["speedup_best"] == pytest.approx(1.5)


def test_export_and_import(filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, to = tmp_path / "b.zip", tmp_path / "to.db"
    assert run("db", "export", bundle, "--db", filled) == 0
    assert run("db", "import", bundle, "--db", to) == 0
    assert capsys.readouterr().out.splitlines() == [f"{bundle}: 1 schedules", f"{bundle}: 1 schedules, 1 stored"]
    assert run("db", "import", bundle, "--db", to, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(bundle), "schedules": 1, "stored": 0}
    with Store.open(to) as store:
        assert len(store.schedules()) == 1


def test_show(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--db", filled) == 0
    text = capsys.readouterr().out
    line = next(row for row in map(str.strip, text.splitlines()) if row.startswith("layer_norm"))
    assert line.split()[:3] == ["layer_norm", "f32", "64x8"]
    assert workload().fingerprint[:8] in line
    assert line.split()[-8:] == ["2", "1", "10", "us", "eager", "40", "us", "1.50x"]
    assert "inductor 15 us" in text
    assert "1 workload was met at deploy time" in text
    assert run("show", "--db", filled, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    (tuned,), (missed,) = data["tuned"], data["missed"]
    assert (tuned["measured"], tuned["failed"], tuned["best_us"]) == (2, {"wrong_result": 1}, 10.0)
    assert tuned["speedup"] == pytest.approx(1.5)
    assert (missed["label"], missed["count"]) == ("layer_norm f32 99x8", 1)


def test_what_a_busy_machine_decided_is_marked(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--db", filled) == 0
    assert "(busy)" not in capsys.readouterr().out
    with Store.open(filled) as store:
        (s,) = store.schedules(artifacts=True)
        store.put_schedule(dataclasses.replace(s, others=1.25), replace=True)
    assert run("show", "--db", filled) == 0
    text = capsys.readouterr().out
    assert "(busy)" in text
    assert "search again on a quiet machine" in text
    assert run("show", "--db", filled, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tuned"][0]["busy"] is True
    assert run("db", "stats", "--db", filled) == 0
    text = capsys.readouterr().out
    assert "busy          1 compared while" in text
    assert "geometric mean" not in text


def test_show_of_an_empty_database_and_of_none(sqlite_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no database"):
        run("show", "--db", sqlite_file)
    assert not sqlite_file.exists()
    Store.open(sqlite_file).close()
    assert run("show", "--db", sqlite_file) == 0
    assert "Nothing is tuned yet" in capsys.readouterr().out
