"""Failures of databases: each is one clear line, and deployment survives it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.files import default_database
from autotune.store import Key, Measurement, Store
from autotune.store.connection.faults import reason
from autotune.store.connection.urls import parse_url
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support.rows import GPU, put_key, workload


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://root@host/x", "'mysql' are not supported"),
        ("://", "not a database URL"),
        ("", "is not the name of a database"),
        ("sqlite://", "in-memory"),
        (":memory:", "is not the name of a database"),
        ("sqlite:///:memory:", "in-memory"),
        ("sqlite:////x.db?mode=ro&uri=true", r"^/x.db: .* takes no options \(mode=ro&uri=true\)"),
        ("sqlite:///file:x.db?mode=ro&uri=true", "takes no options"),
        ("postgresql://autotune@localhost:1/x", "cannot use the database"),
        ("postgresql://u:secret@localhost:1/x", "cannot use the database"),
        ("postgresql+psycopg2://localhost/x", "no driver"),
        ("/proc/nowhere/tune.db", "cannot create the folder"),
    ],
)
def test_bad_urls(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as e:
        Store.open(url)
    assert "secret" not in one_line(e)


def test_paths_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    absolute = parse_url("a.db")
    assert absolute.database == str(tmp_path / "a.db")
    assert parse_url("sqlite:///a.db") == parse_url(tmp_path / "a.db") == absolute
    assert parse_url("~/x.db").database == str(Path.home() / "x.db")
    assert parse_url(None).database == str(default_database())
    monkeypatch.setenv("AUTOTUNE_DB", "b.db")
    assert parse_url(None).database == str(tmp_path / "b.db")
    for text in ("postgresql://h/n", "postgres://h/n"):
        assert parse_url(text).drivername == "postgresql+psycopg"


@pytest.mark.parametrize("name", ["with space.db", "per%20cent.db", "quest?ion.db", "ha#sh.db", "ünï.db"])
def test_odd_file_names(tmp_path: Path, name: str) -> None:
    with Store.open(tmp_path / name) as store:
        key = put_key(store)
        with Store.open(store.url) as again:
            assert again.get_workload(key.workload) == workload()
    assert {p.name for p in tmp_path.iterdir()} <= {name, name + "-wal", name + "-shm"}


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database at all, but long enough to be looked at " * 40)
    for options in ({}, {"readonly": True}):
        with pytest.raises(UserError, match="not a database") as e:
            Store.open(file, **options)
        assert str(file) in one_line(e)
    assert file.read_text().startswith("not a database")


def test_a_truncated_database(sqlite_file: Path) -> None:
    with Store.open(sqlite_file) as store:
        for i in range(50):
            store.put_workload(workload(i))
    sqlite_file.write_bytes(sqlite_file.read_bytes()[:9000])
    with pytest.raises(UserError) as e, Store.open(sqlite_file) as store:
        store.find_workloads()
    assert str(sqlite_file) in one_line(e)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        Store.open(tmp_path)


def test_reading_a_missing_database(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no database"):
        Store.open(tmp_path / "none.db", readonly=True)
    assert Store.attach(tmp_path / "none.db") is None
    assert list(tmp_path.iterdir()) == []


def test_a_readonly_store_reads_and_never_writes(url: str) -> None:
    with Store.open(url) as store:
        key = put_key(store)
        store.put_schedule(schedule(key))
    with Store.open(url, readonly=True) as store:
        assert store.get_schedule(key.workload, key.device) == schedule(key)
        assert store.add_miss(workload(2), GPU.fingerprint, "x") is False
        with pytest.raises(UserError, match="reading only"):
            store.put_workload(workload(2))
        assert store.stats()["rows"]["autotune_misses"] == 0


AS_ANOTHER = """
import sys
from pathlib import Path
from autotune.errors import UserError
from autotune.store import Store
from autotune.workload import Workload
file, fingerprint, device = sys.argv[1:]
try: Store.open(file)
except UserError as e: print("open:", e)
store = Store.attach(file)
missed = store.add_miss(Workload("x", {}), device, "y")
print(store.readonly, store.get_schedule(fingerprint, device).latency_us, missed)
try: Store.open(str(Path(file).parent / "new.db"))
except UserError as e: print("new:", e)
"""


@pytest.fixture
def readonly_file() -> Iterator[Path]:
    """A database that another user may read but not write, in a folder of which the same is true."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-ro-"))
    try:
        yield folder / "tune.db"
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_file_that_cannot_be_written(readonly_file: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    with Store.open(readonly_file) as store:
        key = put_key(store)
        store.put_schedule(schedule(key))
    assert [p.name for p in readonly_file.parent.iterdir()] == ["tune.db"], "the log was not merged on closing"
    readonly_file.chmod(0o444)
    readonly_file.parent.chmod(0o555)
    # Root may write anything, unless it gives that up.
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if prefix and not shutil.which("setpriv"):
        pytest.skip("run by root, who may write any file, and there is no setpriv to change that")
    process = spawn(AS_ANOTHER, str(readonly_file), key.workload, key.device, prefix=prefix)
    out, error = process.communicate(timeout=550)
    assert process.returncode == 0, error
    opened, attached, new = out.splitlines()
    assert opened.startswith(f"open: cannot write the database {readonly_file}")
    assert attached == "True 10.0 False"
    assert new.startswith("new: cannot write the database")


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_deployment_reads_a_database_on_a_full_disk(
    sqlite_file: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    with Store.open(sqlite_file) as store:
        key = put_key(store)
    real = os.statvfs(sqlite_file.parent)
    state = os.statvfs_result((real.f_bsize, 1, real.f_blocks, free, free, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: state)

    def no_log(path: Path, *_: object) -> None:
        raise UserError(reason(parse_url(path), sqlite3.OperationalError("disk I/O error")))

    monkeypatch.setattr("autotune.store.connection.sqlite._prepare_sqlite_file", no_log)
    with pytest.raises(UserError, match="is full .*: free some space" if free == 0 else ": disk I/O error$") as e:
        Store.open(sqlite_file)
    one_line(e)
    if free:
        with pytest.raises(UserError, match="disk I/O error"):
            Store.attach(sqlite_file)
        return
    store = Store.attach(sqlite_file)
    assert store is not None
    with store:
        assert store.readonly
        assert store.get_workload(key.workload) == workload()


def test_a_locked_database_is_an_error_in_time_and_deployment_goes_on(sqlite_file: Path) -> None:
    with Store.open(sqlite_file, timeout_s=0.1) as store:
        key = put_key(store)
        other = sqlite3.connect(sqlite_file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UserError, match="locked by another process") as e:
            store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))
        one_line(e)
        assert store.add_miss(workload(2), GPU.fingerprint, "x") is False
        assert store.get_workload(key.workload) == workload()  # readers never wait
        other.execute("ROLLBACK")
        other.close()
        assert store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))


def test_a_locked_row_on_a_server(postgres_url: str) -> None:
    import psycopg

    with Store.open(postgres_url, timeout_s=0.2) as store:
        key = put_key(store)
        plain = parse_url(postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain) as other:
            other.execute("LOCK TABLE autotune_measurements IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(UserError, match="locked by another process"):
                store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))
        assert store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))


def test_threads_share_a_store(store: Store, key: Key) -> None:
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(10):
                store.add_measurement(Measurement(key, {"n": n, "i": i}, Status.OK, latency_us=1.0 + i))
                store.best(key)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert len(store.measurements()) == 80


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_separate_connections(store: Store, key: Key) -> None:
    store.measurements()
    child = os.fork()
    if child == 0:
        try:
            store.add_measurement(Measurement(key, {"child": 1}, Status.OK, latency_us=1.0))
            store.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.add_measurement(Measurement(key, {"parent": 1}, Status.OK, latency_us=1.0))
    assert len(store.measurements()) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_transactions_of_other_threads(store: Store, key: Key) -> None:
    """The child would inherit SQLite's record of their locks, and find the database locked for ever."""
    begun = threading.Event()

    def write() -> None:
        with store.writing():
            begun.set()
            time.sleep(0.3)

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        try:
            with Store.open(store.url, timeout_s=250.0) as own:
                own.add_measurement(Measurement(key, {"child": 1}, Status.OK, latency_us=1.0))
            os._exit(0)
        except BaseException:
            os._exit(1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.add_measurement(Measurement(key, {"parent": 1}, Status.OK, latency_us=1.0))
    assert len(store.measurements()) == 2


def test_records_need_no_sql(spawn: Callable[..., subprocess.Popen[str]]) -> None:
    code = (
        "import sys; from autotune.store import Key, Schedule; from autotune.device import identify\n"
        "assert not {'sqlalchemy', 'torch', 'numba', 'optuna', 'alembic'} & set(sys.modules)"
    )
    process = spawn(code)
    assert process.wait(550) == 0, process.communicate()[1]


def test_deployment_imports_no_alembic(sqlite_file: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    Store.open(sqlite_file).close()
    code = (
        "import sys; from autotune.store import Store; s = Store.attach(sys.argv[1]); s.get_schedule('a', 'b')\n"
        "assert not {'alembic', 'torch', 'numba', 'optuna'} & set(sys.modules)"
    )
    process = spawn(code, str(sqlite_file))
    assert process.wait(550) == 0, process.communicate()[1]
