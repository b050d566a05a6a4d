"""The toy domain, whose bad candidates are what workers have to survive; deadlines that no load of the host reaches;
and one PostgreSQL server a run."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import task
from autotune.measure.policy import Policy
from tests.support.clock import STUCK, Patience, watch_deadlines
from tests.support.postgres import PostgresServer
from tests.support.toy import lane_domain, toy_domain
from tests.support.toy.policy import QUICK


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy domain; the spawning code passes it on to children."""
    monkeypatch.setitem(task.DOMAINS, toy_domain.KIND, toy_domain.__name__)


@pytest.fixture(scope="session")
def stuck_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of marks of stuck processes."""
    folder = tmp_path_factory.mktemp("stuck")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STUCK, str(folder))
        yield folder


@pytest.fixture(autouse=True)
def patience(stuck_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Patience:
    """Deadlines of processes pass where one is stuck, and never for lack of processors."""
    made = Patience(stuck_folder)
    watch_deadlines(made, monkeypatch.setattr)
    return made


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy domain, and workloads made of its workloads, measured by a formula (:mod:`lane_domain`)."""
    for kind, module in lane_domain.KINDS.items():
        monkeypatch.setitem(task.DOMAINS, kind, module)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The file to which a workload with ``log`` in its spec writes its measurements."""
    return tmp_path / "measured"


@pytest.fixture
def policy() -> Policy:
    return QUICK


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The folder of the socket of a server for the whole session; it goes at the end, and every database with it."""
    server = PostgresServer()
    with contextlib.closing(server):
        server.start()
        yield str(server.folder)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A running server for one test, to be stopped and frozen."""
    server = PostgresServer()
    with contextlib.closing(server):
        server.start()
        yield server


@pytest.fixture(scope="session")
def emptied() -> list[str]:
    """Databases of the server that are empty again."""
    return []


@pytest.fixture
def postgres_url(postgres_server: str, emptied: list[str]) -> Iterator[str]:
    """An empty database on the server; the server goes at the end of the session, and every database with it.

    An earlier test's that nobody is connected to any more is emptied: to make one takes the server 0.1 seconds.
    """
    import psycopg

    def connected(name: str) -> psycopg.Connection[tuple[int]]:
        return psycopg.connect(host=postgres_server, user="autotune", dbname=name, autocommit=True)

    if not emptied:
        emptied.append(f"t{uuid.uuid4().hex}")
        with connected("postgres") as c:
            c.execute(f"CREATE DATABASE {emptied[-1]}")  # type: ignore[call-overload]
    name = emptied.pop()
    yield f"postgresql://autotune@/{name}?host={postgres_server}"
    with contextlib.suppress(psycopg.OperationalError), connected(name) as c:
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid != pg_backend_pid()"
        if c.execute(others, (name,)).fetchone() == (0,):
            c.execute("DROP SCHEMA public CASCADE")
            c.execute("CREATE SCHEMA public")
            c.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")  # as in a new one
            emptied.append(name)
