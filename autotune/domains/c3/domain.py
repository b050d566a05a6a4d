"""C3 as a domain; see :class:`autotune.task.Domain`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from autotune.errors import UserError
from autotune.workload import Workload

COMMANDS = {name: f"autotune.domains.c3.cli.{name}" for name in ("search", "lookup")}


def __getattr__(name: str) -> Any:
    if name not in ("open_task", "open_bench", "open_measurer", "place", "policy"):
        raise AttributeError(name)
    from autotune.domains.c3 import task

    return getattr(task, name)


def devices(workload: Workload) -> int:
    return int(workload.spec["ranks"])


def bytes_held(workload: Workload) -> int:
    from autotune.domains.c3.scenario import Scenario

    return Scenario.from_json(workload.spec).bytes_held


def damage(workload: Workload) -> str | None:
    from autotune.domains.c3.cli.search import check_program
    from autotune.domains.c3.scenario import Scenario

    try:
        check_program(Scenario.from_json(workload.spec))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, UserError) as error:
        return str(error)
    return None


def targets() -> Mapping[str, str]:
    from autotune.domains.c3.named import load

    return {name: entry.label for name, entry in load().items()}


def case_problems(case: object) -> list[str]:
    from autotune.domains.c3.report.form import c3_problems

    return c3_problems(case)


def exhibits(workload: Any, config: Any, schedule: Any, device: Any) -> Any:
    from autotune.domains.c3.report import exhibits as shown

    return shown.exhibits(workload, config, schedule, device)


def case_exhibits(case: Mapping[str, Any]) -> Any:
    from autotune.domains.c3.report import exhibits as shown

    return shown.case_exhibits(case)


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    from autotune.domains.c3.cli import arguments

    arguments.add_arguments(command, parser)


def refuse(command: str, args: argparse.Namespace) -> None:
    from autotune.domains.c3.cli import arguments

    arguments.refuse(command, args)
