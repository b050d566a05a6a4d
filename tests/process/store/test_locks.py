"""A process's other accesses to a database's file leave SQLite's locks alone."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.store.connection import sqlite
from autotune.store.opening import attach, named_snapshot, sqlite_file
from autotune.store.snapshot_form import is_snapshot, kind_of
from autotune.store.store import Store

ANOTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("INSERT INTO notes VALUES ('another')")
connection.commit()
connection.close()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "a database #1?.db"
    monkeypatch.setenv("AUTOTUNE_DB", str(path))
    with Store.open(path):
        pass
    return path


def looks(path: Path) -> None:
    assert kind_of(path) == "database"
    assert not is_snapshot(path)
    assert named_snapshot() is None
    assert sqlite_file() == path
    assert sqlite._has_log(path)


def opens(path: Path) -> None:
    for store in (Store.open(path), attach(path)):
        assert store is not None
        store.close()


@pytest.mark.parametrize("does", [looks, opens])
def test_another_process_is_not_the_last_one_with_the_database(file: Path, does: object) -> None:
    """SQLite's last connection deletes the write-ahead log: the others would read and write a deleted one."""
    assert callable(does)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE notes (text)")
        connection.commit()
        does(file)
        subprocess.run([sys.executable, "-c", ANOTHER, str(file)], check=True)
        assert os.path.exists(f"{file}-wal")
        assert connection.execute("SELECT * FROM notes").fetchall() == [("another",)]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "other"), (b"text" * 100, "other"), (b"PK\3\4" + bytes(100), "bundle"), (None, "missing")],
)
def test_other_files_are_unchanged(tmp_path: Path, content: bytes | None, kind: str) -> None:
    path = tmp_path / "x.db"
    if content is not None:
        path.write_bytes(content)
    assert kind_of(path) == kind
    assert kind_of(tmp_path) == "unreadable"
    assert kind_of("a\0b") == "unreadable"


def test_a_closed_store_is_whole_without_its_log(tmp_path: Path) -> None:
    """A search in a process whose deployment reads the file until the end: users copy the file alone."""
    path, copy = tmp_path / "own.db", tmp_path / "copy.db"
    with Store.open(str(path)):
        pass
    reader = Store.open(str(path), readonly=True)
    assert reader.runs() == []
    with Store.open(str(path)) as writer:
        run = writer.start_run("a search", owner="test")
    copy.write_bytes(path.read_bytes())
    with Store.open(str(copy), readonly=True) as alone:
        assert [found.id for found in alone.runs()] == [run.id]
    reader.close()
