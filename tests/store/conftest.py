"""Databases for the tests: SQLite files, and databases on a real PostgreSQL server that the tests start themselves."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from autotune.device import DeviceIdentity, Environment
from autotune.store import Key, Store
from autotune.workload import Workload

ROOT = Path(__file__).resolve().parents[2]


def _postgres_bin() -> Path | None:
    """The folder of initdb and postgres, which distributions keep out of the PATH."""
    folders = [Path(p).parent for p in [shutil.which("initdb")] if p]
    if shutil.which("pg_config"):
        told = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
        folders.append(Path(told))
    folders += [Path(p) for p in sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)]
    return next((f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None)


def _unprivileged() -> dict[str, object]:
    """Arguments for subprocess: PostgreSQL refuses to run as root, so root runs it as someone else."""
    if os.geteuid() != 0:
        return {}
    import pwd

    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")


class PostgresServer:
    """A PostgreSQL server of our own on a Unix socket in ``folder``. Skips the test where there is none."""

    def __init__(self) -> None:
        binaries = _postgres_bin()
        if binaries is None:
            pytest.skip("no PostgreSQL server is installed (initdb and postgres were not found)")
        pytest.importorskip("psycopg", reason="psycopg is not installed")
        self._who = _unprivileged()
        # Not under pytest's folder: that is closed to other users, and too long a name for a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="autotune-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        if self._who:
            os.chown(self.folder, int(str(self._who["user"])), int(str(self._who["group"])))
        data = self.folder / "data"
        init = [str(binaries / "initdb"), "-D", str(data), "-U", "autotune", "-A", "trust", "-E", "UTF8", "--no-sync",
                "--locale=C"]  # fmt: skip
        made = subprocess.run(init, capture_output=True, text=True, check=False, cwd=self.folder, **self._who)  # type: ignore[call-overload]
        if made.returncode:
            self.close()
            pytest.skip(f"initdb failed: {made.stderr.strip()[-300:]}")
        self._run = [str(binaries / "postgres"), "-D", str(data), "-k", str(self.folder), "-c", "listen_addresses=",
                     "-c", "fsync=off", "-c", "max_connections=60", "-c", "shared_buffers=16MB"]  # fmt: skip

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._run, stdout=log, stderr=log, cwd=self.folder, **self._who)  # type: ignore[call-overload]
        _wait_until_ready(self.folder, self._process)

    def stop(self) -> None:
        if self._process is None:
            return
        self.go_on()
        self._process.send_signal(signal.SIGINT)  # "fast": SIGTERM would wait for clients to leave
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """Stop every process of the server where it is: connections are accepted by the kernel, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        import psutil

        assert self._process is not None
        mother = psutil.Process(self._process.pid)
        for process in (mother, *mother.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(host=str(self.folder), user="autotune", dbname="postgres", autocommit=True) as c:
            c.execute(f"CREATE DATABASE {name}")
        return f"postgresql://autotune@/{name}?host={self.folder}"

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


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


def _wait_until_ready(folder: Path, server: subprocess.Popen[bytes]) -> None:
    import psycopg

    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(host=str(folder), user="autotune", dbname="postgres").close()
            return
        except psycopg.OperationalError as e:
            if server.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log").read_text(errors="replace")[-500:]
                pytest.skip(f"PostgreSQL did not start: {e} {log}")
        time.sleep(0.05)


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """An empty database on the server; the server goes at the end of the session, and every database with it."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(host=postgres_server, user="autotune", dbname="postgres", autocommit=True) as c:
        c.execute(f"CREATE DATABASE {name}")
    return f"postgresql://autotune@/{name}?host={postgres_server}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once for each dialect."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tune.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Path:
    return tmp_path / "tune.db"


GPU = DeviceIdentity("cuda", "NVIDIA Test", 132, 143360, "9.0")
OTHER_GPU = DeviceIdentity("cuda", "NVIDIA Other", 108, 81920, "8.0")
ENVIRONMENT = Environment(
    "cuda", torch="2.11.0+cu130", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1"
)
NEAR = Environment("cuda", torch="2.11.1+cu130", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.2")
FAR = Environment("cuda", torch="2.13.0+cu130", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")


def workload(rows: int = 64, *, family: str = "f" * 64) -> Workload:
    """A workload of one family; ``rows`` is its extent."""
    spec = {"rows": rows, "family": family[:4]}
    return Workload(
        "fusion", spec, family=family, extent=rows, label=f"layer_norm f32 {rows}x8", source={"calls": [rows]}
    )


def put_key(
    store: Store, w: Workload | None = None, device: DeviceIdentity = GPU, env: Environment = ENVIRONMENT
) -> Key:
    """Store what a key refers to, and make it."""
    w = w or workload()
    return Key(store.put_workload(w), store.put_device(device), store.put_environment(env), "p" * 64)


@pytest.fixture
def key(store: Store) -> Key:
    return put_key(store)


@pytest.fixture
def spawn(started: list[subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start Python code in a process of its own, which sees this copy of autotune; killed at the end if still there."""

    def start(code: str, *args: str, prefix: Sequence[str] = (), **options: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process: subprocess.Popen[str] = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,  # type: ignore[call-overload]
        )  # fmt: skip
        started.append(process)
        return process

    return start
