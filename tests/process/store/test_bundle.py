"""Schedules from one database to another by file, and files that are damaged or something else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from autotune.errors import UserError
from autotune.store import Store, Verdict
from autotune.store.bundles.bundle import export_bundle
from autotune.store.snapshots.merge import Imported
from autotune.task import config_key
from tests.process.store.test_schedules import ARTIFACT, CPU_ARTIFACT, schedule
from tests.support.rows import GPU, NEAR, put_key, workload
from tests.support.snapshots import import_file


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Four schedules: a cubin, another environment, a CPU kernel, and a baseline that won."""
    with Store.open(tmp_path / "from.db") as store:
        store.put_schedule(schedule(put_key(store)))
        store.put_schedule(schedule(put_key(store, env=NEAR), 11.0, others=0.5, space="a" * 64))
        store.put_schedule(schedule(put_key(store, workload(2)), artifact=CPU_ARTIFACT))
        store.put_schedule(schedule(put_key(store, workload(3)), config=None, artifact=None, winner="eager"))
        assert export_bundle(store, tmp_path / "b.zip") == 4
    return tmp_path / "b.zip"


def test_a_bundle_carries_everything_and_twice_changes_nothing(store: Store, bundle: Path) -> None:
    assert import_file(store, bundle) == Imported(4, 4, ())
    with Store.open(bundle.parent / "from.db") as source:
        assert sorted(map(repr, store.schedules(artifacts=True))) == sorted(map(repr, source.schedules(artifacts=True)))
        for w in source.find_workloads():
            found = store.get_workload(w.fingerprint)
            assert found is not None
            assert (found.to_json(), found.label) == (w.to_json(), w.label)
    before = store.stats()["rows"]
    assert import_file(store, bundle) == Imported(4, 0, ())
    assert store.stats()["rows"] == before
    again = bundle.with_name("again.zip")
    assert export_bundle(store, again) == 4
    assert again.read_bytes() == bundle.read_bytes()


def test_verdicts_go_with_the_schedules_of_their_steps(store: Store, bundle: Path) -> None:
    with Store.open(bundle.parent / "from.db") as source:
        key = put_key(source)
        families = [{"workload": key.workload, "kept": True}]
        whole = Verdict("a" * 64, key.device, key.environment, "default", (key.workload,), {"families": families}, 5.0)
        elsewhere = dataclasses.replace(whole, graph="b" * 64, left=("x" * 64,))
        source.put_verdicts([whole, elsewhere])
        export_bundle(source, bundle)
    assert import_file(store, bundle) == Imported(4, 4, ())
    assert store.verdicts() == [whole]
    newer = dataclasses.replace(whole, left=(), when=6.0)
    store.put_verdicts([newer])
    import_file(store, bundle)
    assert store.verdicts() == [newer], "what was decided later stays"


@pytest.mark.parametrize(
    "broken",
    [
        {"left": "all"}, {"left": [5]}, {"record": []}, {"mode": "m" * 65}, {"device": "d"}, {"when": 1e308},
        {"record": {"compile_us": -5}}, {"record": {"all_us": 10**400}}, {"record": {"later": 10**400}},
        {"record": {"train": [1]}}, {"record": {"numerics": 5}},
        {"record": {"families": 5}}, {"record": {"target": "\ud800"}},
    ],
)  # fmt: skip
def test_a_bundle_with_a_broken_verdict_is_refused(store: Store, bundle: Path, broken: dict[str, Any]) -> None:
    key = put_key(store)
    row = {"graph": "a" * 64, "device": key.device, "environment": key.environment, "mode": "default", "left": [],
           "record": {}, "when": 1.0, **broken}  # fmt: skip

    def add(members: dict[str, bytes]) -> None:
        data = members["verdicts.jsonl"] = (json.dumps(row) + "\n").encode()
        manifest = json.loads(members["manifest.json"])
        manifest["members"]["verdicts.jsonl"] = hashlib.sha256(data).hexdigest()
        members["manifest.json"] = json.dumps(manifest).encode()

    _rewrite(bundle, add)
    with pytest.raises(UserError, match="damaged bundle"):
        import_file(store, bundle)
    assert store.schedules() == []
    assert store.verdicts() == []


def test_importing_keeps_what_is_faster_here_and_the_label_given_here(store: Store, bundle: Path) -> None:
    import dataclasses

    key = put_key(store, dataclasses.replace(workload(), label="mine"))
    store.put_schedule(schedule(key, 1.0, config={"mine": 1}))
    found = import_file(store, bundle)
    assert (found.schedules, found.stored, len(found.conflicts)) == (4, 3, 1)
    found = store.get_schedule(key.workload, key.device)
    assert found is not None
    assert found.config == {"mine": 1}
    assert store.find_workloads("mine") == [workload()]


def _rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _code(members: dict[str, bytes]) -> None:
    name = next(n for n in members if n.startswith("code/"))
    members[name] = members[name][:-1] + b"?"


def _launch_with_a_new_sum(members: dict[str, bytes]) -> None:
    """Launch data changed and the manifest made to agree: the artifact's own fingerprint still tells."""
    import hashlib

    members["artifacts.jsonl"] = members["artifacts.jsonl"].replace(b'"rows",4', b'"rows",9')
    manifest = json.loads(members["manifest.json"])
    manifest["members"]["artifacts.jsonl"] = hashlib.sha256(members["artifacts.jsonl"]).hexdigest()
    members["manifest.json"] = json.dumps(manifest).encode()


def _workloads_gone(members: dict[str, bytes]) -> None:
    import hashlib

    members["workloads.jsonl"] = b""
    manifest = json.loads(members["manifest.json"])
    manifest["members"]["workloads.jsonl"] = hashlib.sha256(b"").hexdigest()
    members["manifest.json"] = json.dumps(manifest).encode()


def _later(members: dict[str, bytes]) -> None:
    members["manifest.json"] = members["manifest.json"].replace(b'"version":1', b'"version":2')


def _other_form(members: dict[str, bytes]) -> None:
    members["manifest.json"] = b'{"form": "something"}'


def _manifest_gone(members: dict[str, bytes]) -> None:
    del members["manifest.json"]


def _member_gone(members: dict[str, bytes]) -> None:
    del members["schedules.jsonl"]


def _manifest_a_list(members: dict[str, bytes]) -> None:
    members["manifest.json"] = b"[]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_code, "fails its SHA-256"),
        (_launch_with_a_new_sum, "damaged bundle"),
        (_workloads_gone, "refers to what the bundle does not hold"),
        (_later, "version 2"),
        (_other_form, "not an autotune bundle"),
        (_manifest_gone, "not an autotune bundle"),
        (_member_gone, "not an autotune bundle"),
        (_manifest_a_list, "not an autotune bundle"),
    ],
)
def test_a_damaged_bundle_changes_nothing(
    tmp_path: Path, bundle: Path, change: Callable[[dict[str, bytes]], None], words: str
) -> None:
    _rewrite(bundle, change)
    with Store.open(tmp_path / "to.db") as store:
        with pytest.raises(UserError, match=words) as e:
            import_file(store, bundle)
        assert "\n" not in str(e.value)
        assert sum(store.stats()["rows"].values()) == 0


def test_files_that_are_no_bundle(tmp_path: Path, bundle: Path) -> None:
    whole = bundle.read_bytes()
    with Store.open(tmp_path / "to.db") as store:
        for data in (b"", b"text", whole[: len(whole) // 2], whole[:60] + b"\0" * 200 + whole[260:]):
            bundle.write_bytes(data)
            with pytest.raises(UserError, match=r"bundle|SHA-256"):
                import_file(store, bundle)
        with pytest.raises(UserError, match="cannot read"):
            import_file(store, tmp_path / "none.zip")
        with pytest.raises(UserError, match="no schedules to export"):
            export_bundle(store, tmp_path / "new.zip")


def test_export_to_a_place_that_is_not_there(tmp_path: Path, store: Store) -> None:
    store.put_schedule(schedule(put_key(store)))
    with pytest.raises(UserError, match="cannot write the bundle"):
        export_bundle(store, tmp_path / "no" / "b.zip")
    assert not (tmp_path / "no").exists()


def test_export_replaces_nothing_but_a_bundle(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes, link, pipe = Path("notes.txt"), Path("link.zip"), Path("pipe.zip")
    notes.write_text("mine")
    link.symlink_to(bundle)
    Path("dangling.zip").symlink_to("nowhere")
    os.mkfifo(pipe)
    with zipfile.ZipFile("other.zip", "w") as archive:
        archive.writestr("manifest.json", "{}")
    Path("folder").mkdir()
    before = {p: p.lstat().st_mtime_ns for p in tmp_path.iterdir()}
    with Store.open("from.db", readonly=True) as store:
        for name in ("notes.txt", "link.zip", "dangling.zip", "pipe.zip", "other.zip", "folder", "/dev/null"):
            with pytest.raises(UserError, match=r"is no bundle|is a link|is a folder|a device or a pipe") as e:
                export_bundle(store, name)
            assert "\n" not in str(e.value)
        assert {p: p.lstat().st_mtime_ns for p in tmp_path.iterdir() if "db" not in p.name} == {
            p: time for p, time in before.items() if "db" not in p.name
        }
        assert export_bundle(store, bundle) == 4, "an earlier bundle is replaced"


def _tables(path: Path, change: Callable[[dict[str, list[Any]]], None]) -> None:
    """Rewrite a bundle's rows, with checksums that agree."""

    def rewrite(members: dict[str, bytes]) -> None:
        names = [n for n in members if n.endswith(".jsonl")]
        rows = {n.removesuffix(".jsonl"): [json.loads(line) for line in members[n].splitlines()] for n in names}
        change(rows)
        for n in names:
            own = rows[n.removesuffix(".jsonl")]
            members[n] = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in own).encode(
                errors="surrogatepass"
            )
        manifest = json.loads(members["manifest.json"])
        manifest["members"].update({n: hashlib.sha256(members[n]).hexdigest() for n in names})
        members["manifest.json"] = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()

    _rewrite(path, rewrite)


def _set(table: str, column: str, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    """The last row of a table gets another value, so that those before it would be written already."""
    return lambda rows: rows[table][-1].__setitem__(column, value)


DEEP = "[" * 100_000 + "]" * 100_000
BAD = {
    "latency text": _set("schedules", "latency_us", "fast"),
    "latency nan": _set("schedules", "latency_us", float("nan")),
    "latency zero": _set("schedules", "latency_us", 0),
    "latency huge": _set("schedules", "latency_us", 10**400),
    "extent huge": _set("schedules", "extent", 2**63),
    "extent fraction": _set("schedules", "extent", 1.5),
    "workload extent": _set("workloads", "extent", 2**70),
    "policy long": _set("schedules", "policy", "p" * 65),
    "policy nul": _set("schedules", "policy", "p\0"),
    "winner number": _set("schedules", "winner", 3),
    "winner surrogate": _set("schedules", "winner", "\ud800"),
    "label nul": _set("workloads", "label", "a\0b"),
    "label surrogate": _set("workloads", "label", "\udfff"),
    "kind long": _set("workloads", "kind", "k" * 33),
    "baselines list": _set("schedules", "baselines", [1]),
    "baselines infinite": _set("schedules", "baselines", {"eager": float("inf")}),
    "config list": _set("schedules", "config", [1]),
    "config nested": _set("schedules", "config", {"a": {"b": 1}}),
    "config nan": _set("schedules", "config", {"a": float("nan")}),
    "others text": _set("schedules", "others", "many"),
    "when": _set("schedules", "when", None),
    "artifact": _set("schedules", "artifact", "0" * 64),
    "device units": _set("devices", "units", "many"),
    "device twice": lambda rows: rows["devices"].append(rows["devices"][0]),
    "schedule twice": lambda rows: rows["schedules"].append(rows["schedules"][0]),
    "source a text": _set("workloads", "source", "text"),
    "deep row": lambda rows: rows["schedules"].append(DEEP),
    "deep spec": lambda rows: rows["workloads"].append('{"kind": "x", "spec": ' + DEEP + "}"),
    "long number": lambda rows: rows["schedules"].append("9" * 5000),
    "no json": lambda rows: rows["schedules"].append("{"),
    "not utf-8": lambda rows: rows["schedules"].append('{"a": "\udc80"}'),
    "a list": lambda rows: rows["schedules"].append([]),
    "key gone": lambda rows: rows["schedules"][-1].pop("family"),
    "environment gone": lambda rows: rows["environments"].clear(),
    "kernel a text": lambda rows: rows["artifacts"][-1].__setitem__("kernels", ["x"]),
    "scratch": lambda rows: rows["artifacts"][-1].__setitem__("scratch", [1]),
}


def test_a_bad_row_changes_nothing(store: Store, bundle: Path) -> None:
    good = bundle.read_bytes()
    for name, change in BAD.items():
        bundle.write_bytes(good)
        _tables(bundle, change)
        with pytest.raises(UserError, match="damaged bundle") as e:
            import_file(store, bundle)
        assert "\n" not in str(e.value), name
        assert len(str(e.value)) < 600, name
        assert sum(store.stats()["rows"].values()) == 0, name


def test_what_the_database_refuses_in_the_end_changes_nothing(
    store: Store, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last statement of the transaction fails: what went before it is taken back."""
    from autotune.store.bundles import bundle as module

    def refuse(new: Any) -> Any:
        raise OverflowError("too much")

    monkeypatch.setattr(module, "better", refuse)
    with pytest.raises(UserError, match="nothing was changed"):
        import_file(store, bundle)
    assert sum(store.stats()["rows"].values()) == 0


def test_files_without_an_end_are_refused(tmp_path: Path, store: Store) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(UserError, match="no regular file"):
            import_file(store, name)
    with pytest.raises(UserError, match=r"Is a directory|no regular file"):
        import_file(store, tmp_path)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(UserError, match="larger than 4 GiB"):
        import_file(store, tmp_path / "sparse")


def test_a_database_is_for_merge(store: Store, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "other.db")):
        pass
    with pytest.raises(UserError, match="is a database, neither a snapshot nor a bundle: autotune db merge takes it"):
        import_file(store, tmp_path / "other.db")


def test_names_that_occur_twice(tmp_path: Path, store: Store, bundle: Path) -> None:
    with zipfile.ZipFile(bundle, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("schedules.jsonl", "")
    with pytest.raises(UserError, match="one name"):
        import_file(store, bundle)


def test_an_import_clears_the_misses_that_asked_for_it(store: Store, bundle: Path) -> None:
    for rows in (2, 99):
        store.add_miss(workload(rows), GPU.fingerprint, "why")
    import_file(store, bundle)
    assert [m.workload for m in store.misses()] == [workload(99).fingerprint]


def test_what_is_exported_can_be_imported(tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture) -> None:
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
    assert export_bundle(store, tmp_path / "b.zip") == 1
    for key in keys[:6]:
        assert caplog.text.count(key.workload[:12]) >= 1
    with Store.open(tmp_path / "to.db") as other:
        assert import_file(other, tmp_path / "b.zip") == Imported(1, 1, ())


def test_many_schedules_take_seconds(tmp_path: Path, store: Store) -> None:
    """Four thousand in a few seconds at most, on a slow machine: a statement for each row would take a minute."""
    with Store.open(tmp_path / "from.db") as source:
        key = put_key(source)
        source.put_schedule(schedule(key))
        export_bundle(source, tmp_path / "b.zip")

    def many(rows: dict[str, list[Any]]) -> None:
        for n in range(1000, 5000):
            w = workload(n)
            rows["workloads"].append(w.to_json())
            rows["schedules"].append({**rows["schedules"][0], "workload": w.fingerprint, "extent": n})

    _tables(tmp_path / "b.zip", many)
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    assert import_file(store, tmp_path / "b.zip") == Imported(4001, 4001, ())
    assert len(statements) < 60
    assert import_file(store, tmp_path / "b.zip") == Imported(4001, 0, ())


def test_a_table_that_is_not_the_one_written_is_refused(store: Store, bundle: Path, tmp_path: Path) -> None:
    """Changed as a whole archive, so that the archive's own checksums are right."""
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"\n" if name == "workloads.jsonl" else b""))
    with pytest.raises(UserError, match="fails its SHA-256"):
        import_file(store, changed)
