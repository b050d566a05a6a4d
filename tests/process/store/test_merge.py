"""``autotune import`` and ``autotune db merge``: both dialects take over what a file or a database holds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from autotune.cli import app
from autotune.errors import UserError
from autotune.store import Calibration, Effort, Measurement, Store, Verdict
from autotune.store import merge as merging
from autotune.store.merge import merge
from autotune.store.records import PREDICTED
from autotune.store.snapshot import packed
from autotune.store.snapshot_writer import export_snapshot
from autotune.store.upkeep import damage
from autotune.task import Status, config_key
from tests.process.store.test_schedules import ARTIFACT, CPU_ARTIFACT, schedule
from tests.support.hostile import execute
from tests.support.rows import GPU, NEAR, put_key, workload
from tests.support.snapshots import Imported, import_file, resealed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Four schedules: a cubin, another environment, a CPU kernel, and a baseline that won."""
    with Store.open(tmp_path / "from.db") as store:
        store.put_schedule(schedule(put_key(store)))
        store.put_schedule(schedule(put_key(store, env=NEAR), 11.0, others=0.5, space="a" * 64))
        store.put_schedule(schedule(put_key(store, workload(2)), artifact=CPU_ARTIFACT))
        store.put_schedule(schedule(put_key(store, workload(3)), config=None, artifact=None, winner="eager"))
        assert export_snapshot(store, tmp_path / "s.atdb", programs=True).schedules == 4
    return tmp_path / "s.atdb"


def test_a_snapshot_carries_everything_and_twice_changes_nothing(store: Store, file: Path) -> None:
    assert import_file(store, file) == Imported(4, 4, [])
    with Store.open(file.parent / "from.db") as source:
        assert sorted(map(repr, store.schedules(artifacts=True))) == sorted(map(repr, source.schedules(artifacts=True)))
        for w in source.find_workloads():
            found = store.get_workload(w.fingerprint)
            assert found is not None
            assert (found.to_json(), found.label) == (w.to_json(), w.label), "its program too"
    before, state = store.stats()["rows"], store.state()
    assert import_file(store, file) == Imported(4, 0, [])
    assert (store.stats()["rows"], store.state()) == (before, state)


def test_verdicts_go_with_the_schedules_of_their_steps(store: Store, file: Path) -> None:
    with Store.open(file.parent / "from.db") as source:
        key = put_key(source)
        families = [{"workload": key.workload, "kept": True}]
        record = {"families": families, "target": "m:f", "command": "autotune search m:f"}
        whole = Verdict("a" * 64, key.device, key.environment, "default", (key.workload,), record, 5.0)
        unexported = {**record, "families": [*families, {"workload": "x" * 64, "kept": True}]}
        elsewhere = dataclasses.replace(whole, graph="b" * 64, record=unexported)
        source.put_verdicts([whole, elsewhere])
        export_snapshot(source, file, programs=True)
    assert import_file(store, file) == Imported(4, 4, [])
    assert store.verdicts() == [whole], "its target too, by which `autotune compare` finds it"
    newer = dataclasses.replace(whole, left=(), when=6.0)
    store.put_verdicts([newer])
    import_file(store, file)
    assert store.verdicts() == [newer], "what was decided later stays"


def test_importing_keeps_faster_schedules_and_labels_of_the_database(store: Store, file: Path) -> None:
    key = put_key(store, dataclasses.replace(workload(), label="mine"))
    store.put_schedule(schedule(key, 1.0, config={"mine": 1}))
    told = import_file(store, file)
    assert (told.schedules, told.stored, len(told.conflicts)) == (4, 3, 1)
    found = store.get_schedule(key.workload, key.device)
    assert found is not None
    assert found.config == {"mine": 1}
    assert store.find_workloads("mine") == [workload()]


def test_an_import_mends_code_that_was_damaged_here(store: Store, file: Path) -> None:
    import_file(store, file)
    with store.writing() as c:
        c.exec_driver_sql("UPDATE autotune_blobs SET code = ''")
        c.exec_driver_sql("UPDATE autotune_artifacts SET target = 'x'")
    assert list(damage(store))
    assert import_file(store, file).stored == 0
    assert list(damage(store)) == []


def _changed(table: str, change: Callable[[dict[str, Any]], object]) -> Callable[[sqlite3.Connection], None]:
    """Change a row's JSON and, where it has one, its checksum, key and number."""

    def run(c: sqlite3.Connection) -> None:
        (text,) = c.execute(f"SELECT data FROM {table} ORDER BY 1 DESC").fetchone()
        data = json.loads(text)
        change(data)
        new = json.dumps(data)
        sha256 = hashlib.sha256(new.encode()).hexdigest()
        c.execute(f"UPDATE {table} SET data = ?, sha256 = ? WHERE data = ?", (new, sha256, text))
        if table == "schedules":
            c.execute("UPDATE schedules SET policy = ? WHERE data = ?", (data["key"][3], new))

    return run


def _kind(c: sqlite3.Connection) -> None:
    """A workload of a domain whose name is too long, with the right fingerprint, under which its schedule comes."""
    w = dataclasses.replace(workload(3), kind="k" * 33)
    c.execute("UPDATE workloads SET fingerprint = ?, data = ? WHERE fingerprint = ?",
              (w.fingerprint, packed(w.to_json()), workload(3).fingerprint))  # fmt: skip
    (text,) = c.execute("SELECT data FROM schedules WHERE workload = ?", (workload(3).fingerprint,)).fetchone()
    new = text.replace(workload(3).fingerprint, w.fingerprint)
    sha256 = hashlib.sha256(new.encode()).hexdigest()
    c.execute("UPDATE schedules SET workload = ?, data = ?, sha256 = ? WHERE data = ?",
              (w.fingerprint, new, sha256, text))  # fmt: skip


BAD: dict[str, Callable[[sqlite3.Connection], object]] = {
    "policy long": _changed("schedules", lambda d: d["key"].__setitem__(3, "p" * 65)),
    "policy nul": _changed("schedules", lambda d: d["key"].__setitem__(3, "p\0")),
    "winner long": _changed("schedules", lambda d: d.update(winner="w" * 33)),
    "space surrogate": _changed("schedules", lambda d: d.update(space="\ud800")),
    "latency huge": _changed("schedules", lambda d: d.update(latency_us=10**400)),
    "kind long": _kind,
    "a device twice": lambda c: c.execute("INSERT INTO devices SELECT number + 10, fingerprint, identity FROM devices"),
    "software twice": lambda c: c.execute(
        "INSERT INTO environments SELECT number + 10, fingerprint, versions FROM environments"
    ),
    "a workload missing": lambda c: c.execute(
        "DELETE FROM workloads WHERE fingerprint = ?", (workload(3).fingerprint,)
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_changes_nothing(store: Store, file: Path, name: str) -> None:
    resealed(file, BAD[name])
    with pytest.raises(UserError, match=r"snapshot .* is damaged") as e:
        import_file(store, file)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 600
    assert sum(store.stats()["rows"].values()) == 0


def test_a_refusal_of_the_database_at_the_end_changes_nothing(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last statement of the transaction fails: what went before it is taken back."""

    def refuse(new: Any) -> Any:
        raise OverflowError("too much")

    monkeypatch.setitem(merging._BETTER, merging.ScheduleRow, refuse)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="nothing was changed"):
        import_file(store, file)
    assert sum(store.stats()["rows"].values()) == 0


def test_files_of_other_forms_are_one_line(store: Store, tmp_path: Path, file: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("manifest.json", '{"form":"autotune-bundle","version":1}')
    with Store.open(str(tmp_path / "other.db")):
        pass
    (tmp_path / "text").write_text("text")
    with (tmp_path / "sparse").open("wb") as out:
        out.truncate(5 << 30)
    for name, words in (
        ("bundle.zip", "is a bundle of an earlier version, which this version cannot read: run `autotune export"),
        ("other.db", "is a database, not a snapshot: run `autotune db merge"),
        ("text", "is not a snapshot"),
        ("sparse", "is not a snapshot"),
        ("nothing", "there is no snapshot"),
        (".", "is not a file"),
        ("/dev/zero", "is not a file"),
    ):
        with pytest.raises(UserError, match=words) as e:
            import_file(store, tmp_path / name)
        assert "\n" not in str(e.value)
    assert sum(store.stats()["rows"].values()) == 0


def test_an_import_clears_the_misses_that_asked_for_it(store: Store, file: Path) -> None:
    for rows in (2, 99):
        store.add_miss(workload(rows), GPU.fingerprint, "why")
    import_file(store, file)
    assert [m.workload for m in store.misses()] == [workload(99).fingerprint]


def test_a_predicted_schedule_leaves_its_miss_and_a_searched_one_clears_it(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "from.db") as source:
        source.put_schedule(schedule(put_key(source, workload(2)), space=PREDICTED))
        source.put_schedule(schedule(put_key(source, workload(3))))
        for rows in (2, 3):
            store.add_miss(workload(rows), GPU.fingerprint, "why")
        merge(store, source)
    assert len(store.schedules()) == 2
    assert [m.workload for m in store.misses()] == [workload(2).fingerprint]


def test_exported_rows_can_be_imported(tmp_path: Path, store: Store) -> None:
    """Damage of every kind in the source: what is left out is named, what is written is sound."""
    keys = [put_key(store, workload(n)) for n in range(1, 8)]
    for n, key in enumerate(keys):
        config = {"threads": n}
        store.put_schedule(schedule(key, config=config, artifact=dataclasses.replace(ARTIFACT, generator=str(n))))
    with store.writing() as c:
        for statement in (
            f"UPDATE autotune_workloads SET spec = '{{}}' WHERE fingerprint = '{keys[0].workload}'",
            f"UPDATE autotune_schedules SET latency_us = -1 WHERE workload = '{keys[1].workload}'",
            f"UPDATE autotune_schedules SET baselines = '[]' WHERE workload = '{keys[2].workload}'",
            f"UPDATE autotune_configs SET params = '{{}}' WHERE fingerprint = '{config_key({'threads': 3})}'",
            "UPDATE autotune_artifacts SET target = 'x' WHERE generator = '4'",
            f"UPDATE autotune_workloads SET source = '3' WHERE fingerprint = '{keys[5].workload}'",
        ):
            c.exec_driver_sql(statement)
    if store.url.startswith("sqlite"):  # a server's columns take no more than their length
        store.put_schedule(schedule(put_key(store, workload(8)), winner="w" * 33))
    found = export_snapshot(store, tmp_path / "s.atdb")
    assert found.schedules == 1
    for n in (*range(1, 7), *([8] if store.url.startswith("sqlite") else [])):
        assert any(workload(n).fingerprint[:12] in line for line in found.left_out)
    with Store.open(tmp_path / "to.db") as other:
        assert import_file(other, tmp_path / "s.atdb") == Imported(1, 1, [])


def test_many_schedules_take_seconds(tmp_path: Path, store: Store) -> None:
    """Four thousand in a few seconds at most, on a slow machine: a statement for each row would take a minute."""
    from autotune.store.snapshot_writer import Contents, write_snapshot
    from tests.support.rows import ENVIRONMENT

    found = {w.fingerprint: w for w in map(workload, range(1000, 5000))}
    with Store.open(tmp_path / "from.db") as source:
        base = schedule(put_key(source))
    every = [
        dataclasses.replace(base, key=dataclasses.replace(base.key, workload=name), extent=w.extent)
        for name, w in found.items()
    ]
    contents = Contents(every, found, {GPU.fingerprint: GPU}, {ENVIRONMENT.strict: ENVIRONMENT})
    write_snapshot(tmp_path / "s.atdb", contents)
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    assert import_file(store, tmp_path / "s.atdb") == Imported(4000, 4000, [])
    assert len(statements) < 100
    assert import_file(store, tmp_path / "s.atdb") == Imported(4000, 0, [])


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
        with pytest.raises(UserError, match="cannot be merged into itself"):
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

    def stopped(*args: object, **how: object) -> object:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return whole(*args, **how)  # type: ignore[arg-type]

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
