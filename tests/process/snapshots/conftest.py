"""A database, and a snapshot of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.runtime.deployment import Deployment, use
from autotune.store import Store
from autotune.store.snapshot_writer import export_snapshot
from tests.support.snapshots import filled


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AUTOTUNE_KEY", raising=False)
    use(Deployment())
    yield
    use(Deployment())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.db") as opened:
        filled(opened)
        yield opened


@pytest.fixture
def file(store: Store, tmp_path: Path) -> Path:
    path = tmp_path / "schedules.atdb"
    export_snapshot(store, path)
    return path
