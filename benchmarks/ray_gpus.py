"""Candidates a second of a search on 1, 2, ... GPUs of this host, by Ray and by processes of our own.

    python -m benchmarks.ray_gpus --gpus 1,2 --out benchmarks/results/h200x2/ray_gpus.json

Each search has an empty database, on a separate PostgreSQL server or with ``--db sqlite`` in a file, and the same
workloads, whose kernels are in no cache of the search. The clock runs from the start of the command's search to its
end: actors start in it, finals are compared in it. Inductor's caches are the user's: the first search fills them. With
``--device cpu`` it runs on this host's processor, as a trial of the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.store.store import Store
from autotune.workload import Workload

TARGETS = (
    "layer_norm", "rms_norm", "softmax_mask", "bias_gelu_residual_layer_norm", "bias_gelu_residual_layer_norm_f32",
    "swiglu_rms_norm", "cross_entropy", "bert_layer",
)  # fmt: skip
_OBJECTS = 256 * 2**20


@contextlib.contextmanager
def ray_node(gpus: int) -> Iterator[str]:
    """A cluster of one node with so many GPUs and this host's processors; its address."""
    from ray.cluster_utils import Cluster

    from autotune.device import usable_processors

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    node: dict[str, Any] = {"num_cpus": usable_processors()}  # by itself such a cluster has one
    node |= {"num_gpus": gpus} if gpus else {}
    node["object_store_memory"] = _OBJECTS  # by itself Ray takes a third of the memory, which /dev/shm may not have
    made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node})
    try:
        yield str(made.address)
    finally:
        made.shutdown()


def workloads(names: Sequence[str], device: str) -> list[Workload]:
    """The regions of built-in targets, each once."""
    from autotune.domains.fusion.program_spec import captured

    found = {}
    for name in names:
        for workload, _ in captured(name, None, device, train=False, known=lambda signature: None).workloads:
            found[workload.fingerprint] = workload
    return list(found.values())


@contextlib.contextmanager
def empty_store(kind: str) -> Iterator[Store]:
    """A database that goes with the search: "postgresql" or "sqlite"."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/tuned.db") as store:
            yield store
        return
    from tests.support.postgres import PostgresServer

    with contextlib.closing(PostgresServer(connections=200)) as server:
        server.start()
        with Store.open(server.database()) as store:
            yield store


def searched(works: Sequence[Workload], gpus: int, by_ray: bool, trials: int, database: str) -> dict[str, Any]:
    """One search on so many GPUs, 0 for the processor."""
    from autotune import api

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(empty_store(database))
        options: dict[str, Any] = {}
        if by_ray:
            from autotune.tuner.cluster.cluster import Cluster
            from autotune.tuner.cluster.engine import Engine

            engine = stack.enter_context(contextlib.closing(Engine(stack.enter_context(ray_node(gpus)))))
            options["cluster"] = Cluster(engine, "cuda" if gpus else "cpu")
        devices = [f"cuda:{i}" for i in range(gpus)] or ["cpu"]
        begin = time.time()
        results = api.tune_workloads(works, devices, store, trials=trials, **options)
        took = time.time() - begin
        screened = [m.when for m in store.measurements(stage="screen")]
        first = min(screened) - begin
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the processor"
    return {
        "name": f"{where}, {'Ray' if by_ray else 'processes of this host'}",
        "gpus": gpus,
        "workloads": len(works),
        "ok": sum(result.ok for result in results),
        "candidates": len(screened),
        "seconds": round(took, 1),
        "first_after_s": round(first, 1),
        "candidates_per_s": round(len(screened) / took, 2),
        "candidates_per_s_from_then": round(len(screened) / (took - first), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default="1,2", help="how many, by comma (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is measured on")
    parser.add_argument("--trials", type=int, default=64, help="candidates of a workload (default: %(default)s)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="built-in ones, by comma")
    parser.add_argument("--db", choices=("postgresql", "sqlite"), default="postgresql", help="default: %(default)s")
    parser.add_argument("--ways", default="processes,ray", help="who searches, in this order (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    from autotune.device import identify
    from benchmarks import form

    device = "cuda:0" if args.device == "cuda" else "cpu"
    told = {"suite": "ray_gpus", "database": args.db, "trials": args.trials}
    works = workloads(args.targets.split(","), device)
    cases = []
    for gpus in [int(n) for n in args.gpus.split(",")] if device != "cpu" else [0]:
        for by_ray in [way == "ray" for way in args.ways.split(",")]:
            cases.append(searched(works, gpus, by_ray, args.trials, args.db))
            print(json.dumps(cases[-1]), flush=True)
            if args.out:
                form.write(args.out, identify(device).label, cases, {}, extra=told)
    return 0 if all(case["ok"] == case["workloads"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
