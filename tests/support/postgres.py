"""Databases for the tests: SQLite files, and databases on a real PostgreSQL server that the tests start themselves."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from tests.support import SOCKETS


def binaries() -> Path | None:
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

    def __init__(self, connections: int = 60) -> None:
        folder = binaries()
        if folder is None:
            pytest.skip("no PostgreSQL server is installed (initdb and postgres were not found)")
        pytest.importorskip("psycopg", reason="psycopg is not installed")
        self._who = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="autotune-pg-", dir=SOCKETS))
        self._process: subprocess.Popen[bytes] | None = None
        if self._who:
            os.chown(self.folder, int(str(self._who["user"])), int(str(self._who["group"])))
        data = self.folder / "data"
        init = [str(folder / "initdb"), "-D", str(data), "-U", "autotune", "-A", "trust", "-E", "UTF8", "--no-sync",
                "--locale=C"]  # fmt: skip
        made = subprocess.run(init, capture_output=True, text=True, check=False, cwd=self.folder, **self._who)  # type: ignore[call-overload]
        if made.returncode:
            self.close()
            pytest.skip(f"initdb failed: {made.stderr.strip()[-300:]}")
        settings = ("listen_addresses=", "fsync=off", f"max_connections={connections}", "shared_buffers=16MB")
        self._run = [str(folder / "postgres"), "-D", str(data), "-k", str(self.folder)]
        self._run += [word for setting in settings for word in ("-c", setting)]

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._run, stdout=log, stderr=log, cwd=self.folder, **self._who)  # type: ignore[call-overload]
        _wait_until_ready(self.folder, self._process)

    @property
    def pid(self) -> int:
        """Of the server, whose children serve the connections."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        if self._process is None:
            return
        self.go_on()
        self._process.send_signal(signal.SIGINT)  # "fast": SIGTERM would wait for clients to leave
        try:
            self._process.wait(250)
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


def _wait_until_ready(folder: Path, server: subprocess.Popen[bytes]) -> None:
    import psycopg

    deadline = time.monotonic() + 250
    while True:
        try:
            psycopg.connect(host=str(folder), user="autotune", dbname="postgres").close()
            return
        except psycopg.OperationalError as e:
            if server.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log").read_text(errors="replace")[-500:]
                pytest.skip(f"PostgreSQL did not start: {e} {log}")
        time.sleep(0.05)
