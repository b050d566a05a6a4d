"""One Ray cluster of four nodes for all tests here, and a database on a PostgreSQL server for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import task
from autotune.store import Store
from autotune.tuner.cluster.cluster import Cluster
from autotune.tuner.cluster.engine import Engine
from tests.support.ray_cluster import LocalCluster, local_cluster
from tests.support.toy import lane_domain


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    with local_cluster(4) as cluster:
        yield cluster


@pytest.fixture
def engine(ray_cluster: LocalCluster) -> Iterator[Engine]:
    with contextlib.closing(Engine(ray_cluster.address)) as opened:
        yield opened


@pytest.fixture
def cluster(engine: Engine) -> Cluster:
    return Cluster(engine, "cpu")


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    with Store.open(postgres_url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, module in lane_domain.KINDS.items():
        monkeypatch.setitem(task.DOMAINS, kind, module)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "measured"
