"""Every test of a store runs on both dialects: a SQLite file, and a database of the run's PostgreSQL server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from autotune.store import Key, Store
from tests.support import ROOT
from tests.support.rows import put_key


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


@pytest.fixture
def key(store: Store) -> Key:
    return put_key(store)


@pytest.fixture
def spawn(started: list[subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start Python code in a separate process, which sees this copy of autotune; killed at the end if still running."""

    def start(code: str, *args: str, prefix: Sequence[str] = (), **options: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process: subprocess.Popen[str] = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,  # type: ignore[call-overload]
        )  # fmt: skip
        started.append(process)
        return process

    return start
