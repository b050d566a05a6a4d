"""Fusion as a domain; see :class:`autotune.task.Domain`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from autotune.errors import UserError
from autotune.workload import Workload

COMMANDS = {name: f"autotune.domains.fusion.cli.{name}" for name in ("search", "lookup", "calibrate")}


def open_task(workload: Workload, device: str) -> Any:
    from autotune.domains.fusion.task import FusionTask

    return FusionTask(workload, device)


def open_bench(workload: Workload, device: str) -> Any:
    from autotune.domains.fusion.bench import FusionBench

    return FusionBench(workload, device)


def bytes_moved(workload: Workload) -> int:
    from autotune.ir.graph import Graph

    return Graph.from_json(workload.spec).bytes_moved


def bytes_held(workload: Workload) -> int:
    from autotune.ir.graph import Graph

    return Graph.from_json(workload.spec).bytes_held


def exhibits(workload: Workload, config: Any, schedule: Any, device: Any) -> Any:
    from autotune.domains.fusion.drawing import exhibits as shown

    return shown.exhibits(workload, config, schedule, device)


def damage(workload: Workload) -> str | None:
    from autotune.domains.fusion.rederive import check_graph, check_source

    return check_graph(workload) or check_source(workload)


def targets() -> Mapping[str, str]:
    from autotune.domains.fusion.builtin import BUILTIN

    return {name: target.about for name, target in BUILTIN.items()}


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    if command == "search":
        about = (
            "fusion: search the target at these numbers of rows too, such as 1,64,4096: the inputs' first axis. Other"
            " numbers are deployed by the nearest of them"
        )
        parser.add_argument("--rows", type=_rows, metavar="N,N,...", help=about)


def _rows(text: str) -> list[int]:
    """argparse type: different numbers of rows, by comma."""
    from autotune.cli.options import positive_int

    return list(dict.fromkeys(positive_int(part.strip()) for part in text.split(",")))


def refuse(command: str, args: argparse.Namespace) -> None:
    if command == "lookup" and (args.train or args.precision):
        raise UserError("--train and --precision are of fusion: leave them out")
    own = command == "search" and (
        args.train
        or args.rows
        or args.precision
        or args.plans != "measured"
        or args.ablation != "full"
        or args.caches != "cold"
    )
    if own:
        raise UserError("--train, --rows, --plans, --precision, --ablation and --caches are of fusion: leave them out")
