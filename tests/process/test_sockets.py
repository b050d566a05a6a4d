"""Servers of the tests start wherever temporary files are: the path of a Unix socket has 107 bytes at most."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.postgres import PostgresServer
from tests.support.ray_cluster import LocalCluster
from tests.support.runtime.ranks import Ranks

LONGEST = 107


@pytest.fixture(autouse=True)
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("x" * LONGEST)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_postgresql_starts() -> None:
    server = PostgresServer()
    with contextlib.closing(server):
        server.start()
        server.stop()


def test_ray_has_room_for_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
    folders: list[str] = []

    class Nodes:
        def __init__(self, head_node_args: dict[str, str], **options: object) -> None:
            folders.append(head_node_args["temp_dir"])
            self.head_node = None
            self.shutdown = SimpleNamespace

    monkeypatch.setattr(utils, "Cluster", Nodes)
    LocalCluster(0).close()
    (folder,) = folders
    assert len(f"{folder}/session_2026-11-27_20-27-04_706726_4194304/sockets/plasma_store.10") <= LONGEST


def test_ranks_are_met(long_folder: Path) -> None:
    with Ranks(long_folder, ranks=0) as ranks:
        assert ranks.pids == []
