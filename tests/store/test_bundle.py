"""Schedules from one database to another by file, and files that are damaged or something else."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.store import Store
from autotune.store.bundle import export_bundle, import_bundle

from .conftest import NEAR, put_key, workload
from .test_schedules import CPU_ARTIFACT, schedule


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
    assert import_bundle(store, bundle) == {"schedules": 4, "stored": 4}
    with Store.open(bundle.parent / "from.db") as source:
        assert sorted(map(repr, store.schedules(artifacts=True))) == sorted(map(repr, source.schedules(artifacts=True)))
        for w in source.find_workloads():
            found = store.get_workload(w.fingerprint)
            assert found is not None
            assert (found.to_json(), found.label) == (w.to_json(), w.label)
    before = store.stats()["rows"]
    assert import_bundle(store, bundle) == {"schedules": 4, "stored": 0}
    assert store.stats()["rows"] == before
    again = bundle.with_name("again.zip")
    assert export_bundle(store, again) == 4
    assert again.read_bytes() == bundle.read_bytes()


def test_importing_keeps_what_is_faster_here_and_the_label_given_here(store: Store, bundle: Path) -> None:
    import dataclasses

    key = put_key(store, dataclasses.replace(workload(), label="mine"))
    store.put_schedule(schedule(key, 1.0, config={"mine": 1}))
    assert import_bundle(store, bundle) == {"schedules": 4, "stored": 3}
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
            import_bundle(store, bundle)
        assert "\n" not in str(e.value)
        assert sum(store.stats()["rows"].values()) == 0


def test_files_that_are_no_bundle(tmp_path: Path, bundle: Path) -> None:
    whole = bundle.read_bytes()
    with Store.open(tmp_path / "to.db") as store:
        for data in (b"", b"text", whole[: len(whole) // 2], whole[:60] + b"\0" * 200 + whole[260:]):
            bundle.write_bytes(data)
            with pytest.raises(UserError, match=r"bundle|SHA-256"):
                import_bundle(store, bundle)
        with pytest.raises(UserError, match="cannot read"):
            import_bundle(store, tmp_path / "none.zip")
        with pytest.raises(UserError, match="no schedules to export"):
            export_bundle(store, bundle)


def test_export_to_a_place_that_is_not_there(tmp_path: Path, store: Store) -> None:
    store.put_schedule(schedule(put_key(store)))
    with pytest.raises(UserError, match="cannot write the bundle"):
        export_bundle(store, tmp_path / "no" / "b.zip")
    assert not (tmp_path / "no").exists()
