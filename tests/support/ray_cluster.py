"""A Ray cluster of several nodes on this machine, each of one processor."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import ROOT, SOCKETS

_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB
_NODES: list[Any] = []
"""All nodes so far. From Python 3.13 on a forked child of multiprocessing drops the handlers at exit, and with them the
nodes that nothing else refers to. Their clients would wait for threads that the child lacks."""


class LocalCluster:
    """Nodes of this machine; they pretend to be hosts. Skips the test where Ray is not installed."""

    def __init__(self, nodes: int) -> None:
        pytest.importorskip("ray", reason="Ray is not installed")
        from ray.cluster_utils import Cluster

        self.folder = tempfile.mkdtemp(prefix="ray-", dir=SOCKETS)
        os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)  # Ray notes the address there
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": self.folder}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": _STORE_BYTES})
        _NODES.append(self._cluster.head_node)
        self.nodes = [self.add() for _ in range(nodes)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, **resources: Any) -> Any:
        """Another node."""
        _NODES.append(self._cluster.add_node(object_store_memory=_STORE_BYTES, **{"num_cpus": 1, **resources}))
        return _NODES[-1]

    def kill(self, node: Any) -> None:
        """End a node as a power failure does."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def local_cluster(nodes: int) -> Iterator[LocalCluster]:
    """A cluster whose processes find what the tests import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token to the user's home
        cluster = LocalCluster(nodes)
        with contextlib.closing(cluster):
            yield cluster


def until(true: Callable[[], object]) -> bool:
    """Wait until something becomes true, until pytest's limit."""
    while not true():
        time.sleep(0.1)
    return True
