"""A snapshot answers as its database does, holds nothing else, and appears whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.store import Snapshot, Store, Verdict, attach
from autotune.store.connection import migrate
from autotune.store.reading import Match, Reader
from autotune.store.snapshot_form import is_snapshot
from autotune.store.snapshot_writer import export_snapshot
from tests.support.rows import ENVIRONMENT, FAR, GPU, NEAR, OTHER_GPU, workload
from tests.support.snapshots import keys

_FITS = [(env, match) for env in (ENVIRONMENT, NEAR, FAR) for match in ("strict", "loose", "ignore")]
_FITS = [pair for pair in _FITS if pair not in ((FAR, "strict"), (FAR, "loose"))]


@pytest.mark.parametrize("match", ["strict", "loose", "ignore"])
@pytest.mark.parametrize("env", [ENVIRONMENT, NEAR, FAR], ids=["equal", "near", "far"])
def test_it_answers_as_its_database(store: Store, file: Path, env: object, match: Match) -> None:
    snapshot = Snapshot(file)

    def answers(reader: Reader) -> list[object]:
        found: list[object] = []
        for device in (GPU, OTHER_GPU):
            for rows in (7, 32, 33, 64, 512):
                found.append(reader.get_schedule(workload(rows).fingerprint, device.fingerprint, env, match=match))  # type: ignore[arg-type]
            for rows in (1, 33, 10_000):
                near = reader.nearest("f" * 64, device.fingerprint, env, rows, match=match, limit=3)  # type: ignore[arg-type]
                found.append([n[:2] for n in near])
            for extents in (None, (30.0, 70.0)):
                listed = reader.family_schedules("f" * 64, device.fingerprint, env, match=match, extents=extents)  # type: ignore[arg-type]
                found.append(listed)
            verdict = reader.get_verdict("g" * 64, device.fingerprint, env, "default", match=match)  # type: ignore[arg-type]
            found.append(verdict and (verdict.left, verdict.when))
            found.append(reader.get_device(device.fingerprint))
        found.append(sorted(reader.tuned_under(workload(32).fingerprint)))
        found += [reader.fingerprints(workload(32).fingerprint[:n], 9) for n in (0, 8, 64)]
        found += [reader.fingerprints("", 2), reader.fingerprints("x%", 2)]
        found.append({w.label for w in reader.get_workloads([workload(32).fingerprint, "x"]).values()})
        return found

    ours, theirs = answers(snapshot), answers(store)
    assert ours == theirs
    assert any(found for found in ours[:5]) == ((env, match) in _FITS), "the comparison says something"


def test_misfits_are_cached_by_snapshot(store: Store, file: Path, tmp_path: Path) -> None:
    """A look-up caches misfits by the results of ``nearest``."""
    other = tmp_path / "other.atdb"
    export_snapshot(store, other, device=lambda device: device == GPU)
    one, same, two = (
        Snapshot(path).nearest("f" * 64, GPU.fingerprint, ENVIRONMENT, 33, limit=1) for path in (file, file, other)
    )
    assert [near.extent for near in (*one, *two)] == [32, 32]
    assert one == same != two


def test_nothing_else_is_in_it(store: Store, file: Path) -> None:
    text = file.read_bytes()
    assert b"/home/ada" not in text, "where programs lay"
    assert b"autotune search" not in text
    assert str(file.parent).encode() not in text, "where the database lay"
    assert os.uname().nodename.encode() not in text
    snapshot = Snapshot(file)
    assert snapshot.get_workload(workload(32).fingerprint).source == {}  # type: ignore[union-attr]
    assert snapshot.about["driver"] == "580.1, 580.2"
    assert snapshot.about["schedules"] == "6"
    assert snapshot.about["generator"] == "cuda-test"


def test_export_filters_by_device_domain_and_refusal(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "part.atdb"
    assert export_snapshot(store, path, device=lambda d: d == OTHER_GPU).schedules == 1
    assert [d.name for d in Snapshot(path).devices] == ["NVIDIA Other"]
    assert export_snapshot(store, path, domain="fusion").schedules == 6
    with pytest.raises(UserError, match="no matching schedule"):
        export_snapshot(store, path, domain="c3")
    refused = export_snapshot(store, path, refuse=lambda s, w, d: "too slow" if s.extent == 64 else "")
    assert refused.schedules == 5
    assert len(refused.left_out) == 1
    assert "too slow" in refused.left_out[0]


def test_a_verdict_leaves_regions_without_a_schedule(store: Store, tmp_path: Path) -> None:
    """A search in a program that lost its comparison leaves all regions, those that it did not reach among them."""
    known, missed = workload(32).fingerprint, "0" * 64
    families = [{"workload": known}, {"workload": missed}]
    cases = {"a": ((known, missed), {}, True), "b": ((missed,), {"families": families}, True),
             "c": ((), {"families": families}, False), "d": ((missed,), {}, False)}  # fmt: skip
    for graph, (left, record, _) in cases.items():
        store.put_verdicts([Verdict(graph * 64, GPU.fingerprint, ENVIRONMENT.strict, "default", left, record, 60.0)])
    path = tmp_path / "left.atdb"
    export_snapshot(store, path)
    reader = Snapshot(path)
    for graph, (left, _, stays) in cases.items():
        found = reader.get_verdict(graph * 64, GPU.fingerprint, ENVIRONMENT, "default")
        assert (found.left if found else None) == (left if stays else None), graph


def test_only_the_best(store: Store, tmp_path: Path) -> None:
    import dataclasses

    (old,) = [s for s in store.schedules(artifacts=True) if s.extent == 512]
    newer = dataclasses.replace(old, key=dataclasses.replace(old.key, policy="q" * 64), latency_us=900.0, when=9000.0)
    store.put_schedule(newer)
    path = tmp_path / "best.atdb"
    assert export_snapshot(store, path).schedules == 7
    assert export_snapshot(store, path, only_best=True).schedules == 6
    found = Snapshot(path).get_schedule(old.key.workload, GPU.fingerprint, ENVIRONMENT)
    assert found == newer, "what the policy that decided last found"


def test_a_damaged_schedule_stays_at_home(store: Store, tmp_path: Path) -> None:
    from tests.support.hostile import execute

    execute(tmp_path / "tuned.db", "UPDATE autotune_blobs SET code = ? WHERE sha256 IN (SELECT sha256 FROM"
            " autotune_blobs LIMIT 1)", (b"broken",))  # fmt: skip
    found = export_snapshot(store, tmp_path / "sound.atdb")
    assert 0 < found.schedules < 6
    assert found.left_out


def test_files_of_others_are_left_alone(store: Store, tmp_path: Path) -> None:
    for name, make in (
        ("text", lambda p: p.write_text("my thesis")),
        ("thesis.atdb", lambda p: p.write_text("my thesis")),
        ("link", lambda p: p.symlink_to(tmp_path / "tuned.db")),
        ("folder", lambda p: p.mkdir()),
        ("pipe", os.mkfifo),
    ):
        path = tmp_path / name
        make(path)
        kept = path.read_text() if path.is_file() and not path.is_symlink() else None
        with pytest.raises(UserError, match=str(name)):
            export_snapshot(store, path)
        assert kept is None or path.read_text() == kept
    with pytest.raises(UserError, match="cannot write"):
        export_snapshot(store, tmp_path / "no" / "folder.atdb")
    with pytest.raises(UserError, match="exists and is not a snapshot"):
        export_snapshot(store, tmp_path / "tuned.db")


def test_an_export_that_fails_leaves_the_old_file(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autotune.store.snapshot_writer._write", full)
    with pytest.raises(UserError, match="No space left"):
        export_snapshot(store, file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir() if p.name.startswith(".autotune")] == []


def test_it_is_read_without_being_written(file: Path) -> None:
    file.chmod(stat.S_IRUSR)
    file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        before = file.read_bytes()
        snapshot = Snapshot(file)
        assert snapshot.get_schedule(workload(32).fingerprint, GPU.fingerprint, ENVIRONMENT) is not None
        assert snapshot.readonly
        assert {p.name for p in file.parent.iterdir()} == {"tuned.db", "tuned.db-wal", "tuned.db-shm", file.name}
        assert file.read_bytes() == before
    finally:
        file.parent.chmod(stat.S_IRWXU)


def test_a_replaced_file_does_not_disturb_readers_of_the_old_one(store: Store, file: Path) -> None:
    snapshot = Snapshot(file)
    export_snapshot(store, file, device=lambda d: d == OTHER_GPU)
    assert snapshot.get_schedule(workload(512).fingerprint, GPU.fingerprint, ENVIRONMENT) is not None
    assert Snapshot(file).get_schedule(workload(512).fingerprint, GPU.fingerprint, ENVIRONMENT) is None


def test_threads_and_forked_processes_share_it(file: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    snapshot = Snapshot(file)

    def ask(n: int) -> bool:
        found = snapshot.get_schedule(workload((32, 64, 512)[n % 3]).fingerprint, GPU.fingerprint, ENVIRONMENT)
        return found is not None and found.artifact is not None

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))
    child = os.fork()
    if not child:
        os._exit(0 if ask(0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_database_is_none_and_a_snapshot_is_no_database(store: Store, file: Path, tmp_path: Path) -> None:
    assert is_snapshot(file)
    assert not is_snapshot(tmp_path / "tuned.db")
    assert isinstance(attach(file), Snapshot)
    assert isinstance(attach(tmp_path / "tuned.db"), Store)
    before = file.read_bytes()
    for use in (Store.open, migrate.upgrade, migrate.current):
        with pytest.raises(UserError, match="is a snapshot"):
            use(file)
    assert file.read_bytes() == before
    with pytest.raises(UserError, match="there is no snapshot"):
        attach(tmp_path / "missing.atdb")


def test_signatures(store: Store, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = keys(tmp_path)
    _, foreign = keys(tmp_path, "other")
    with pytest.raises(UserError, match="is not signed"):
        Snapshot(file, key=str(theirs))
    signed = tmp_path / "signed.atdb"
    export_snapshot(store, signed, key=mine)
    assert Snapshot(signed, key=str(theirs)).trusted
    assert Snapshot(signed, key=theirs.read_text()).trusted, "the key's text"
    unchecked = Snapshot(signed)
    assert unchecked.signed
    assert not unchecked.trusted
    with pytest.raises(UserError, match="another key"):
        Snapshot(signed, key=str(foreign))
    for wrong in (mine, tmp_path / "nothing", signed):
        with pytest.raises(UserError, match="key"):
            Snapshot(signed, key=str(wrong))
    for wrong in (theirs, tmp_path / "nothing"):
        with pytest.raises(UserError, match="key"):
            export_snapshot(store, tmp_path / "unsigned.atdb", key=wrong)
    assert not (tmp_path / "unsigned.atdb").exists()
    whole = signed.read_bytes()
    signed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="its signature is wrong"):
        Snapshot(signed, key=str(theirs))
    monkeypatch.setenv("AUTOTUNE_KEY", str(theirs))
    with pytest.raises(UserError, match="which a database does not have"):
        attach(tmp_path / "tuned.db")
    signed.write_bytes(whole)
    found = attach(signed)
    assert found is not None
    assert found.trusted
