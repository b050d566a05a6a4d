"""Many processes on one server: who may do what, copies to read, connections that idle or are inherited."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from autotune.cli import app
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import Key, LostConnection, Measurement, Store
from autotune.store.connection import engine, migrate
from autotune.store.connection.faults import Conflict
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support import ROOT
from tests.support.postgres import PostgresServer
from tests.support.rows import ENVIRONMENT, GPU, put_key, workload


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    use(Deployment())


def statements() -> list[str]:
    """The statements of docs/how-to/fleet.md for the owner."""
    (text,) = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "how-to" / "fleet.md").read_text(), re.DOTALL)
    return [s.strip() for s in text.split(";") if s.strip()]


@pytest.fixture(scope="module")
def roles(postgres_server: str) -> Callable[[str, str], str]:
    """A database's URL for a user with one of the documented roles."""
    import psycopg

    def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(url, autocommit=True)

    def user(url: str, role: str) -> str:
        with connect(url) as c:
            for statement in statements():
                if statement.startswith("CREATE ROLE"):
                    name = statement.split()[2]
                    if c.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name]).fetchone():
                        continue
                    c.execute(statement.encode())
                    c.execute(f"CREATE ROLE {name}_user LOGIN IN ROLE {name}".encode())
                else:
                    c.execute(statement.encode())
        return url.replace("autotune@", f"autotune_{role}_user@")

    return user


@pytest.fixture
def served(postgres_url: str) -> tuple[str, Key]:
    assert app.main(["db", "upgrade", "--db", postgres_url]) == 0
    with Store.open(postgres_url) as store:
        key = put_key(store)
        store.put_schedule(schedule(key))
        store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))
    return postgres_url, key


def test_a_reader_needs_select_only(
    served: tuple[str, Key],
    roles: Callable[[str, str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, url = served[1], roles(served[0], "reader")
    monkeypatch.setattr("autotune.cli.commands.db._refuse", lambda *args: "")  # the kernels are invented
    for command in (["show"], ["db", "stats"], ["db", "verify"], ["db", "current"],
                    ["export", str(tmp_path / "s.atdb")]):  # fmt: skip
        assert app.main([*command, "--db", url]) == 0, capsys.readouterr().err
    deployed = deployment().store(url)
    assert deployed is not None
    assert deployed.readonly
    assert deployed.get_schedule(key.workload, key.device, ENVIRONMENT) == schedule(key)
    assert deployment().record_misses([(workload(5), "why")], "cpu", url, identity=GPU) == 0
    assert caplog.messages == [], "that is how it is meant"
    for command in (["db", "import", str(tmp_path / "s.atdb")], ["db", "forget"]):
        capsys.readouterr()
        assert app.main([*command, "--db", url]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "rights to grant: docs/how-to/fleet.md" in err


def test_a_deployer_notes_misses_and_nothing_else(served: tuple[str, Key], roles: Callable[[str, str], str]) -> None:
    url = roles(served[0], "deployer")
    deployed = deployment().store(url)
    assert deployed is not None
    assert not deployed.readonly
    assert deployment().record_misses([(workload(5), "why")], "cpu", url, identity=GPU) == 1
    assert [m.workload for m in deployed.misses()] == [workload(5).fingerprint]
    with pytest.raises(UserError, match="does not let its user do this"):
        deployed.put_schedule(schedule(served[1], 1.0))


def test_a_searcher_makes_no_tables(served: tuple[str, Key], roles: Callable[[str, str], str]) -> None:
    url = roles(served[0], "searcher")
    with Store.open(url) as store:
        run = store.start_run("search")
        assert store.add_measurement(Measurement(served[1], {"b": 1}, Status.OK, latency_us=2.0))
        assert store.put_schedule(schedule(served[1], 0.5))
        store.finish_run(run.id)
        with pytest.raises(UserError, match="does not let its user do this"), store.writing() as c:
            c.execute(sa.text("CREATE TABLE autotune_x (i int)"))


def test_look_ups_read_the_replica_and_misses_go_to_the_primary(
    served: tuple[str, Key], postgres_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    primary, key = served
    name = primary.split("@/")[1].split("?")[0]
    copy = f"postgresql://autotune@/{name}_copy?host={postgres_server}"
    with psycopg.connect(host=postgres_server, user="autotune", dbname="postgres", autocommit=True) as c:
        c.execute(f"CREATE DATABASE {name}_copy TEMPLATE {name}".encode())
    with Store.open(primary) as store:
        assert store.put_schedule(schedule(key, 1.0))
    monkeypatch.setenv("AUTOTUNE_DB", primary)
    monkeypatch.setenv("AUTOTUNE_DB_READ", copy)
    deployed = deployment().store()
    assert deployed is not None
    found = deployed.get_schedule(key.workload, key.device)
    assert found is not None
    assert found.latency_us == schedule(key).latency_us, "stale, which is fine"
    assert deployment().record_misses([(workload(5), "why")], "cpu", identity=GPU) == 1
    assert deployed.misses() == []
    explicit = deployment().store(primary)
    assert explicit is not None
    assert [m.workload for m in explicit.misses()] == [workload(5).fingerprint]
    faster = explicit.get_schedule(key.workload, key.device)
    assert faster is not None
    assert faster.latency_us == 1.0


def test_a_lost_primary_costs_notes_only(
    own_server: PostgresServer, sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_server.database()
    Store.open(url).close()
    with Store.open(sqlite_file) as store:
        key = put_key(store)
        store.put_schedule(schedule(key))
    own_server.stop()
    monkeypatch.setenv("AUTOTUNE_DB", url)
    monkeypatch.setenv("AUTOTUNE_DB_READ", str(sqlite_file))
    for _ in range(2):
        deployed = deployment().store()
        assert deployed is not None
        assert deployed.get_schedule(key.workload, key.device) is not None
        assert deployment().record_misses([(workload(5), "why")], "cpu", identity=GPU) == 0


def test_a_replica_that_is_missing_is_reported(sqlite_file: Path, tmp_path: Path) -> None:
    Store.open(sqlite_file).close()
    assert Store.attach(sqlite_file, tmp_path / "none.db") is None
    with pytest.raises(LostConnection, match="cannot use the database"):
        Store.attach(sqlite_file, "postgresql://u:secret@127.0.0.1:1/x")


def test_an_idle_deployments_connection_is_ended_by_the_server(
    served: tuple[str, Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    url, key = served
    monkeypatch.setattr(engine, "IDLE_S", 1)
    with Store.attach(url) as deployed, psycopg.connect(url) as other:  # type: ignore[union-attr]
        assert deployed.get_schedule(key.workload, key.device) is not None
        count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
        assert other.execute(count, ["autotune"]).fetchone() == (1,)
        while other.execute(count, ["autotune"]).fetchone() != (0,):
            other.rollback()
            time.sleep(0.1)
        assert deployed.get_schedule(key.workload, key.device) is not None
        assert not deployed.lost


def test_a_deadlock_is_done_again(postgres_url: str) -> None:
    """Two transactions lock two rows in opposite order; the server ends one of them, which then finds its turn."""
    with Store.open(postgres_url) as store:
        keys = [store.put_workload(workload(n)) for n in (1, 2)]
        together, attempts = threading.Barrier(2), []

        def swap(order: list[str]) -> None:
            first = True

            def once() -> None:
                nonlocal first
                attempts.append(1)
                with store.writing() as c:
                    for w in order:
                        c.execute(sa.text("UPDATE autotune_workloads SET extent = extent + 1 WHERE fingerprint = :w"),
                                  {"w": w})  # fmt: skip
                        if first and w == order[0]:
                            first = False
                            together.wait(250)

            store.outlast(once)

        threads = [threading.Thread(target=swap, args=(order,)) for order in (keys, keys[::-1])]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(attempts) == 3
        with store.reading() as c:
            assert sorted(c.scalars(sa.text("SELECT extent FROM autotune_workloads"))) == [3, 4]


def test_a_conflict_that_does_not_end_is_reported(sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda s: None)

    def never() -> None:
        raise Conflict("in the way")

    with Store.open(sqlite_file) as store, pytest.raises(UserError, match="in the way"):
        store.outlast(never)


def test_opening_awaits_a_server_that_was_there(own_server: PostgresServer) -> None:
    url = own_server.database()
    migrate.upgrade(url)
    own_server.stop()
    with pytest.raises(LostConnection):
        Store.open(url)
    later = threading.Timer(1.5, own_server.start)
    later.start()
    try:
        Store.open(url, awaited=True).close()
    finally:
        later.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_childs_log_outlives_its_parents_connections(sqlite_file: Path) -> None:
    """A child that inherited an open connection would hold no separate lock: its parent would remove its log."""
    with Store.open(sqlite_file) as store:
        key = put_key(store)
        (ready, told), (closed, go) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(go)  # the child ends with its parent
                store.measurements()
                os.write(told, b"x")
                os.read(closed, 1)
                for n in range(20):
                    store.add_measurement(Measurement(key, {"n": n}, Status.OK, latency_us=1.0))
                code = 0
            finally:
                os._exit(code)
        os.read(ready, 1)
        store.measurements()
        store.close()
        assert sqlite_file.with_name(sqlite_file.name + "-wal").exists(), "the child still has it open"
        os.write(go, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    c = sqlite3.connect(sqlite_file)
    assert c.execute("SELECT count(*) FROM autotune_measurements").fetchone() == (20,)
    assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    c.close()
