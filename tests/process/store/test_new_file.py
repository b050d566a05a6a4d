"""An SQLite database that is not there yet: it appears whole, or not at all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.store import Store
from autotune.store.connection import migrate
from autotune.store.snapshot_writer import export_snapshot
from tests.process.store.test_schedules import schedule
from tests.support.rows import put_key, workload


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Do something once, between the creation of a file and its tables."""
    upgrade = migrate.command.upgrade

    def set_up(action: Callable[[], object]) -> None:
        def upgraded(*args: Any, **options: Any) -> None:
            monkeypatch.setattr(migrate.command, "upgrade", upgrade)
            action()
            upgrade(*args, **options)

        monkeypatch.setattr(migrate.command, "upgrade", upgraded)

    return set_up


def test_no_process_sees_a_file_without_tables(
    sqlite_file: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    seen: list[object] = []
    meanwhile(lambda: seen.append(Store.attach(sqlite_file)))
    Store.open(sqlite_file).close()
    assert seen == [None], "a deployment finds no database, as before"
    assert [p.name for p in sqlite_file.parent.iterdir()] == [sqlite_file.name]


def test_who_comes_first_stays(sqlite_file: Path, meanwhile: Callable[[Callable[[], object]], None]) -> None:
    def other() -> None:
        with Store.open(sqlite_file) as store:
            store.put_workload(workload(3))

    meanwhile(other)
    with Store.open(sqlite_file) as store:
        assert store.get_workload(workload(3).fingerprint) is not None


def test_store_fill_repeats_into_a_file_created_meanwhile(sqlite_file: Path) -> None:
    filled = []

    def fill(store: Store) -> None:
        filled.append(store.name)
        store.put_workload(workload(1))
        if len(filled) == 1:
            with Store.open(sqlite_file) as first:
                first.put_workload(workload(2))

    Store.fill(sqlite_file, fill)
    assert len(filled) == 2
    with Store.open(sqlite_file) as store:
        assert len(store.find_workloads()) == 2


def test_a_file_system_without_links(sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with Store.open(sqlite_file) as store:
        store.put_workload(workload(1))


def test_opening_without_creating_tables_makes_no_file(sqlite_file: Path) -> None:
    with pytest.raises(UserError, match="there is no database"):
        Store.open(sqlite_file, migrate=False)
    assert not sqlite_file.exists()


FULL = """
import resource, signal, sys
from autotune.cli import app
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(app.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("command", ["upgrade", "import", "merge"])
@pytest.mark.parametrize("limit", [0, 60_000, 300_000])
def test_a_full_disk_leaves_no_part_of_a_new_file(
    tmp_path: Path, command: str, limit: int, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    words = ["db", command, "--db", str(full / "new.db")]
    if command != "upgrade":
        with Store.open(tmp_path / "from.db") as store:
            for rows in range(200):
                store.put_schedule(schedule(put_key(store, workload(rows))))
            export_snapshot(store, tmp_path / "s.atdb")
        words.append(str(tmp_path / ("s.atdb" if command == "import" else "from.db")))
    child = spawn(FULL, str(limit), *words)
    _, said = child.communicate(timeout=120)
    if command == "upgrade" and limit == 300_000:
        assert child.returncode == 0, said
        return
    assert child.returncode == 2, said
    assert len(said.splitlines()) == 1, said
    assert str(full / "new.db") in said
    assert list(full.iterdir()) == []
