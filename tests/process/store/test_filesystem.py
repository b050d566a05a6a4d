"""SQLite files on file systems that machines share, which the kernel is made to list."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.store import Measurement, Store
from autotune.store.connection import sqlite as filesystem
from autotune.store.connection import sqlite as opening
from autotune.store.connection.sqlite import shared_type
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support.rows import put_key


def mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: str) -> None:
    listed = tmp_path.parent / f"{tmp_path.name}-mounts"
    listed.write_text("".join(f"{line} rw,relatime 0 0\n" for line in ("/dev/sda1 / ext4", *lines)))
    monkeypatch.setattr(filesystem, "MOUNTS", listed)
    monkeypatch.setattr(opening, "_warned", set())


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("nfs", True), ("nfs4", True), ("cifs", True), ("smb3", True), ("9p", True), ("lustre", True), ("gpfs", True),
     ("fuse.sshfs", True), ("fuse.s3fs", True), ("ceph", True), ("ext4", False), ("xfs", False), ("tmpfs", False),
     ("overlay", False), ("fuseblk", False), ("fuse.encfs", False), ("zfs", False)],
)  # fmt: skip
def test_types(kind: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, tmp_path, f"server:/x {tmp_path} {kind}")
    assert shared_type(tmp_path / "not" / "there.db") == (kind if shared else None)
    assert shared_type(tmp_path.parent / "beside.db") is None


def test_the_innermost_and_the_last_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "with space"
    odd.mkdir()
    written = str(odd).replace(" ", "\\040")
    link = tmp_path / "link"
    link.symlink_to(odd)
    mount(monkeypatch, tmp_path, f"a {written} nfs4", f"b {tmp_path} xfs")
    assert shared_type(odd / "x.db") == "nfs4"
    assert shared_type(link / "x.db") == "nfs4"
    assert shared_type(tmp_path / "x.db") is None
    mount(monkeypatch, tmp_path, f"a {written} nfs4", f"b {written} xfs", "torn")
    assert shared_type(odd / "x.db") is None
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "none")
    assert shared_type(odd / "x.db") is None


def journal(file: Path) -> str:
    c = sqlite3.connect(file)
    try:
        return str(c.execute("PRAGMA journal_mode").fetchone()[0])
    finally:
        c.close()


def test_there_a_file_is_written_without_a_log(
    sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(sqlite_file) as store:
        key = put_key(store)
        store.put_schedule(schedule(key))
    assert journal(sqlite_file) == "wal"
    mount(monkeypatch, tmp_path, f"server:/x {tmp_path} nfs4")
    for n in range(2):
        with Store.open(sqlite_file) as store, Store.attach(sqlite_file) as deployed:  # type: ignore[union-attr]
            assert store.add_measurement(Measurement(key, {"n": n}, Status.OK, latency_us=1.0))
            assert deployed.get_schedule(key.workload, key.device) is not None
            assert {p.name for p in tmp_path.iterdir()} == {sqlite_file.name}, "no log and no shared memory"
    assert journal(sqlite_file) == "delete"
    (line,) = [r.getMessage() for r in caplog.records]
    assert "is on nfs4: autotune writes it without a write-ahead log" in line
    with Store.open(sqlite_file, readonly=True) as store:
        assert store.get_schedule(key.workload, key.device) is not None
    mount(monkeypatch, tmp_path)
    Store.open(sqlite_file).close()
    assert journal(sqlite_file) == "wal", "back on a disk of its own"


def test_a_log_that_another_machine_writes_is_refused(
    sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(sqlite_file) as local:
        put_key(local)
        mount(monkeypatch, tmp_path, f"server:/x {tmp_path} nfs")
        assert os.path.getsize(f"{sqlite_file}-wal") > 0
        for options in ({"timeout_s": 0.1}, {"readonly": True}):
            with pytest.raises(UserError, match="is on nfs, and a process writes it with a write-ahead log") as e:
                Store.open(sqlite_file, **options)
            assert "\n" not in str(e.value)
    with Store.open(sqlite_file, readonly=True) as store:
        assert len(store.find_workloads()) == 1
    assert [p.name for p in tmp_path.iterdir()] == [sqlite_file.name]
