"""``--ray``: parts of a command that need a device run on a node that has it, where the command names a cluster."""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster, Kind


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add ``--ray``."""
    about = (
        "search on all devices of the Ray cluster at ADDRESS (HOST:PORT of its head, or auto on one of its nodes),"
        " with --device auto, cpu or cuda; on several hosts --db is PostgreSQL (extra `ray`)"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help=about)


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[Cluster | None]:
    """The cluster that the command names, or None.

    Raises:
        UserError: Ray is not installed, no cluster answers there, or none of its nodes has the device.
    """
    if args.ray is None:
        yield None
        return
    from autotune.tuner.cluster.cluster import Cluster
    from autotune.tuner.cluster.engine import Engine

    with contextlib.redirect_stdout(sys.stderr):  # Ray tells there which nodes have gone
        engine = Engine(args.ray)
        try:
            yield Cluster(engine, args.device)
        finally:
            engine.close()


def at(
    cluster: Cluster | None,
    function: Any,
    args: argparse.Namespace,
    device: str,
    store: Store,
    *more: Any,
    kind: Kind | None = None,
    gpus: int = 1,
) -> Any:
    """``function(args, device, store, *more)``: here, or on a node of the cluster that has the device.

    Args:
        function: of a module, so that a node finds it.
        kind: of the device; None for any.
        gpus: that it needs, where the devices are such.
    """
    if cluster is None:
        return function(args, device, store, *more)
    sent = copy.copy(args)
    sent.db = sent.run = None  # the one is in the store's own URL, the other means this host
    return cluster.call(function, sent, store, *more, kind=kind, gpus=gpus)


def nodes_told(cluster: Cluster) -> str:
    """The cluster, in words."""
    nodes = cluster.nodes()
    gpus = f", {sum(node.gpus for node in nodes)} GPUs" if cluster.device != "cpu" else ""
    many = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
    return f"{many} of the Ray cluster at {cluster.address}{gpus}"


def warn(text: object) -> None:
    """A line on stderr."""
    print(f"autotune: WARNING: {text}", file=sys.stderr)
