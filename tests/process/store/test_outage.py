"""A PostgreSQL server that goes away or freezes: a search waits for it, a deployment does not."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.runtime import database
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import LostConnection, Measurement, Store
from autotune.store.connection import faults as outage
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support.clock import Clock
from tests.support.postgres import PostgresServer
from tests.support.rows import GPU, put_key, workload


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    use(Deployment())


@pytest.fixture
def dead_server() -> Iterator[socket.socket]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of calls that lost their server; those that waited for it did so for two seconds."""
    seen: list[str] = []
    call = outage.Patience.call

    def counted(self: outage.Patience, action: Callable[[], Any]) -> Any:
        def tried() -> Any:
            try:
                return action()
            except LostConnection as e:
                seen.append(str(e))
                raise

        return call(self, tried)

    monkeypatch.setattr(outage.Patience, "call", counted)
    return seen


def test_a_search_waits_for_its_server(own_server: PostgresServer, capfd: pytest.CaptureFixture[str]) -> None:
    with Store.open(own_server.database()) as store:
        key = put_key(store)
        own_server.stop()
        later = threading.Timer(2.5, own_server.start)
        later.start()
        try:
            assert store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))
        finally:
            later.join()
        assert len(store.measurements()) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert "cannot use the database" in lines[0]
    assert "waiting for it" in lines[0]
    assert "answers again" in lines[1]


def test_a_server_that_restarts_between_two_calls_is_not_noticed(
    own_server: PostgresServer, capfd: pytest.CaptureFixture[str]
) -> None:
    url = own_server.database()
    with Store.open(url) as store, Store.attach(url) as deployed:  # type: ignore[union-attr]
        key = put_key(store)
        assert deployed.get_workload(key.workload) is not None
        own_server.stop()
        own_server.start()
        assert store.put_schedule(schedule(key))
        assert deployed.get_schedule(key.workload, key.device) is not None
        own_server.stop()
        own_server.start()
        assert deployed.state() == store.state()
        assert not deployed.lost
    assert capfd.readouterr().err == ""


def test_a_connection_that_breaks_within_a_transaction(own_server: PostgresServer) -> None:
    import psycopg

    url = own_server.database()
    with Store.open(url) as store:
        key = put_key(store)
        attempts = []

        def one() -> bool:
            with store.writing() as c:
                attempts.append(1)
                if len(attempts) == 1:
                    pid = c.exec_driver_sql("SELECT pg_backend_pid()").scalar()
                    with psycopg.connect(host=str(own_server.folder), user="autotune", dbname="postgres") as other:
                        other.execute("SELECT pg_terminate_backend(%s)", [pid])
                store._put_workload(c, workload(7))
            return True

        assert store.outlast(one)
        assert len(attempts) == 2
        assert store.get_workload(workload(7).fingerprint) == workload(7)
        assert store.get_workload(key.workload) is not None


def test_patience_ends(
    own_server: PostgresServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with Store.open(own_server.database(), patience_s=100.0) as store:
        own_server.stop()
        monkeypatch.setattr(outage, "time", clock)
        with pytest.raises(LostConnection, match="cannot use the database") as e:
            store.captured("any")  # calls other methods, which wait for it too
        assert "\n" not in str(e.value)
        assert clock.monotonic() == pytest.approx(100.0)
        assert store.lost
    assert capfd.readouterr().err.count("waiting") == 1


def test_deployment_waits_once_for_a_server_that_never_answers(
    dead_server: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"postgresql://autotune:secret@127.0.0.1:{dead_server.getsockname()[1]}/x"
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert deployment().store(url) is None
            assert deployment().record_misses([(workload(), "why")], "cpu", url) == 0
    dead_server.accept()[0].close()
    with pytest.raises(BlockingIOError):
        dead_server.accept()  # nobody asked again
    warned = [r.getMessage() for r in caplog.records if r.name == "autotune"]
    assert len(warned) == 1
    assert "secret" not in caplog.text


def test_a_server_that_was_lost_is_tried_again_after_a_while(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_server.database()
    Store.open(url).close()
    own_server.stop()
    assert deployment().store(url) is None
    own_server.start()
    assert deployment().store(url) is None, "it is left alone"
    now = time.monotonic()
    monkeypatch.setattr(database.time, "monotonic", lambda: now + database.RETRY_S + 1)
    assert deployment().store(url) is not None


def test_deployment_from_a_frozen_server_goes_on(own_server: PostgresServer, losses: list[str]) -> None:
    url = own_server.database()
    with Store.open(url) as store:
        key = put_key(store)
        store.put_schedule(schedule(key))
    deployed = deployment().store(url)
    assert deployed is not None
    assert deployed.get_schedule(key.workload, key.device) is not None
    own_server.freeze()
    with pytest.raises(UserError, match="did not answer within 2 s"):
        deployed.get_schedule(key.workload, key.device)
    for _ in range(4):
        assert deployment().store(url) is None
        assert deployment().record_misses([(workload(5), "why")], "cpu", url) == 0
    assert len(losses) == 1


def test_deployment_state_changes_with_schedules_and_without_a_server(
    own_server: PostgresServer, losses: list[str]
) -> None:
    url = own_server.database()
    with Store.open(url) as store:
        key = put_key(store)
        empty = deployment().state(url)
        store.put_schedule(schedule(key))
    stored = deployment().state(url)
    assert len({empty, stored, b"none"}) == 3
    assert deployment().state(url) == stored
    own_server.freeze()
    for _ in range(4):
        assert deployment().state(url) == b"none"
    assert len(losses) == 1


def test_misses_wait_for_a_frozen_server_once(own_server: PostgresServer, losses: list[str]) -> None:
    url = own_server.database()
    Store.open(url).close()
    assert deployment().store(url) is not None
    own_server.freeze()
    assert deployment().record_misses([(workload(n), "why") for n in range(5)], "cpu", url, identity=GPU) == 0
    assert deployment().record_misses([(workload(9), "why")], "cpu", url, identity=GPU) == 0
    assert len(losses) == 1


def test_misses_wait_for_a_locked_file_once(sqlite_file: object, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[DeviceIdentity] = []
    monkeypatch.setattr(Store, "add_miss", lambda self, *args: bool(calls.append(GPU)))
    assert deployment().record_misses([(workload(n), "why") for n in range(5)], "cpu", str(sqlite_file)) == 0
    assert len(calls) == 1
