"""``autotune db`` and ``autotune show``, as the command line calls them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from autotune.cli.commands import db, show
from autotune.domains.fusion.domain import Fusion
from autotune.errors import UserError
from autotune.store import Measurement, Store, Verdict
from autotune.store.models import SCHEMA_REVISION
from autotune.task import Status
from autotune.workload import Workload
from tests.process.store.test_schedules import schedule
from tests.support.rows import GPU, put_key, workload


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
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


def test_export_and_import(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, to = tmp_path / "s.zip", tmp_path / "to.db"
    monkeypatch.setattr("autotune.cli.commands.db._refuse", lambda *args: "")  # its kernels are none of ours
    assert run("db", "export", file, "--db", filled) == 0
    assert run("db", "import", file, "--db", to) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{file}: 1 schedule, ")
    assert second == f"{file}: 1 schedule, 1 stored in {to}"
    assert run("db", "import", file, "--db", to, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(file), "database": str(to), "schedules": 1, "stored": 0, "conflicts": []
    }  # fmt: skip
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
    assert "1 missed workload: `autotune search --missed --db" in text
    assert run("show", "--db", filled, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    (tuned,), (missed,) = data["tuned"], data["missed"]
    assert (tuned["measured"], tuned["failed"], tuned["best_us"]) == (2, {"wrong_result": 1}, 10.0)
    assert tuned["speedup"] == pytest.approx(1.5)
    assert (missed["label"], missed["count"]) == ("layer_norm f32 99x8", 1)


def test_decisions_of_a_busy_machine_are_marked(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "busy          1 schedule, disturbed by" in text
    assert "geometric mean" not in text


def test_other_objectives_are_shown_in_the_unit_of_their_domain(
    filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objective is no time here; one workload's specification does not fit its domain."""
    assert run("show", "--db", filled) == 0
    assert "figures" not in capsys.readouterr().out
    with Store.open(filled) as store:
        key = put_key(store)
        store.put_schedule(schedule(key), replace=True)
        figures = {"GB/s": 1234.56, "none": float("nan")}
        store.add_measurement(
            Measurement(key, schedule(key).config or {}, Status.OK, "final", latency_us=10.0, metrics=figures)
        )
        odd = put_key(store, workload(128))
        store.put_schedule(schedule(odd))

    def figure(self: Fusion, workload: Workload, cost: float) -> tuple[float, str]:
        if workload.extent == 128:
            raise KeyError("objective")
        return 1 / cost, "[red]J"

    monkeypatch.setattr(Fusion, "figure", figure)
    assert run("show", "--db", filled) == 0
    lines = {line.split()[2]: line for line in capsys.readouterr().out.splitlines() if "layer_norm" in line}
    assert "0.1 [red]J" in lines["64x8"]
    assert "1235 GB/s" in lines["64x8"]
    assert " us" not in lines["64x8"]
    assert "10 us" in lines["128x8"]
    assert run("show", "--db", filled, "--json") == 0
    tuned = {line["label"].split()[-1]: line for line in json.loads(capsys.readouterr().out)["tuned"]}
    assert tuned["64x8"]["figure"] == {"value": 0.1, "unit": "[red]J"}
    assert tuned["64x8"]["metrics"] == {"GB/s": 1234.56}
    assert "figure" not in tuned["128x8"]


def test_show_of_an_empty_database_and_of_none(sqlite_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no database"):
        run("show", "--db", sqlite_file)
    assert not sqlite_file.exists()
    Store.open(sqlite_file).close()
    assert run("show", "--db", sqlite_file) == 0
    assert "has no schedules yet" in capsys.readouterr().out


def test_show_names_searches_in_programs_and_leaves_out_untimed_ones(
    sqlite_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searched = {"command": "search in the program", "budget_s": 30.0}
    timed = {**searched, "compile_us": 3000.0, "autotune_us": 2000.0}
    with Store.open(sqlite_file) as store:
        key = put_key(store)
        store.put_verdicts([Verdict("graph", key.device, key.environment, "default", record=searched)])
        store.add_miss(workload(99), GPU.fingerprint, "no schedule")
    assert run("show", "--db", sqlite_file) == 0
    text = capsys.readouterr().out
    assert "steps" not in text
    assert "has no schedules yet.\n" in text, "the line on misses has the command"
    assert "`autotune search --missed" in text
    with Store.open(sqlite_file) as store:
        store.put_verdicts([Verdict("graph", key.device, key.environment, "default", record=timed)])
    assert run("show", "--db", sqlite_file) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "1.50x" in line)
    assert line.split() == ["search", "in", "the", "program", "default", "3", "ms", "2", "ms", "1.50x", "–", "–"]
