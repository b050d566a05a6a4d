"""Benchmarks of programs with several ranks: torchrun starts them, a GPU each, and rank 0 writes their cases."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser, ranks: int) -> None:
    """Add what :func:`start` and :func:`run_cases` read to a benchmark's arguments; ``ranks`` is the default."""
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=ranks, help=f"processes, a GPU each (default: {ranks})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins after so many")
    parser.add_argument("--db", help="database (default: one that is deleted)")
    parser.add_argument("--out", type=Path)


def is_rank() -> bool:
    """True in a process that torchrun started."""
    return "RANK" in os.environ


def start(module: str, args: argparse.Namespace, argv: Sequence[str] | None) -> tuple[int, dict[str, Any]]:
    """Run a benchmark's module in ``args.ranks`` processes.

    Returns:
        their exit code, and the ``device`` and ``cases`` that :func:`run_cases` wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cases.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command += ["-m", module, *(sys.argv[1:] if argv is None else argv), "--out", str(out)]
        # A stream that waits for a peer must not hold back another that shares a hardware queue with it.
        own = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "AUTOTUNE_DB": args.db or str(Path(folder) / "ranks.db")}
        if sys.platform == "linux":
            own["GLOO_SOCKET_IFNAME"] = "lo"
        code = subprocess.run(command, env=os.environ | own, check=False).returncode
        return code, json.loads(out.read_text()) if out.exists() else {"cases": []}


def run_cases(
    args: argparse.Namespace,
    cases: Iterable[T],
    measure: Callable[[Group, T], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Measure cases on this rank; rank 0 shows each result, and writes all of them to ``args.out``."""
    import gc

    import torch
    import torch.distributed as dist

    from autotune.domains.c3.group import deploy_group

    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    group = deploy_group(None, device)
    results: list[dict[str, Any]] = []
    begin = time.monotonic()
    for case in cases:
        if group.largest([time.monotonic() - begin])[0] > args.seconds:
            break
        results.append(measure(group, case))
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if group.rank == 0:
            done = {"device": torch.cuda.get_device_name() if cuda else "cpu", "cases": results}
            args.out.write_text(json.dumps(done))
            show(results[-1])
    group.barrier()
    dist.destroy_process_group()
