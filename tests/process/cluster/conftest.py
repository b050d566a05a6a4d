"""One Ray cluster of three nodes for all tests here, and a database on a PostgreSQL server for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from autotune.store import Store
from autotune.tuner.cluster.cluster import Cluster
from autotune.tuner.cluster.engine import Engine
from tests.support.ray_cluster import LocalCluster, local_cluster

NODES = 3


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[LocalCluster]:
    """Ends with the last test here, since its processes take processor time while nothing is asked of them."""
    with local_cluster(NODES) as cluster:
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
