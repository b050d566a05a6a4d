"""Kernels of users as a domain; see :class:`autotune.task.Domain`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from autotune.workload import Workload

COMMANDS = {name: f"autotune.domains.kernel.cli.{name}" for name in ("search", "lookup")}


def open_task(workload: Workload, device: str) -> Any:
    from autotune.domains.kernel.task import KernelTask

    return KernelTask(workload, device)


def open_bench(workload: Workload, device: str) -> Any:
    from autotune.domains.kernel.measuring.bench import open_bench

    return open_bench(workload, device)


def bytes_moved(workload: Workload) -> int:
    return int(workload.source.get("bytes", 0))


def confined(workload: Workload) -> Any:
    """What the code at hand lets a search try: other choices, or another default, are another search."""
    from autotune.domains.kernel.target import kernel_of

    space = kernel_of(workload).space
    told = [c.text for c in space.constraints]
    return [space.space.fingerprint, space.default, list(space.points), told, workload.source.get("left")]


def figure(workload: Workload, cost: float) -> tuple[float, str] | None:
    from autotune.domains.kernel.cli.report import objective_of

    objective = objective_of(workload.spec)
    return None if objective is None else (objective.figure(cost), objective.unit)


def targets() -> Mapping[str, str]:
    return {}


def damage(workload: Workload) -> str | None:
    from autotune.domains.kernel.target import refused

    return refused(workload)


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    from autotune.domains.kernel.cli.arguments import add_arguments

    add_arguments(command, parser)


def refuse(command: str, args: argparse.Namespace) -> None:
    from autotune.domains.kernel.cli.arguments import refuse

    refuse(command, args)
