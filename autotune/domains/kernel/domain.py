"""The domain of users' own kernels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.domain import Command, Domain
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.domains.kernel.bench import KernelBench
    from autotune.domains.kernel.task import KernelTask


class Kernels(Domain):
    """See :class:`autotune.domain.Domain`. Missed kernels are not searched: names from a database are not imported."""

    own_missed = True

    def open_task(self, workload: Workload, device: str) -> KernelTask:
        from autotune.domains.kernel.task import KernelTask

        return KernelTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> KernelBench:
        from autotune.domains.kernel.bench import open_bench

        return open_bench(workload, device)

    def bytes_moved(self, workload: Workload) -> int:
        return int(workload.source.get("bytes", 0))

    def confined(self, workload: Workload) -> Any:
        """The space that the current code declares; a change to its choices or default starts a new search."""
        from autotune.domains.kernel.declare import kernel_of

        space = kernel_of(workload).space
        constraints = [c.text for c in space.constraints]
        return [space.space.fingerprint, space.default, list(space.points), constraints, workload.source.get("left")]

    def figure(self, workload: Workload, cost: float) -> tuple[float, str] | None:
        objective = workload.spec.get("objective")
        return (cost if objective["direction"] == "min" else 1 / cost, str(objective["unit"])) if objective else None

    def damage(self, workload: Workload) -> str | None:
        from autotune.domains.kernel.declare import refused

        return refused(workload)

    def add_arguments(self, command: str, parser: argparse.ArgumentParser) -> None:
        if command not in ("search", "lookup"):
            return
        about = (
            "file with the arguments of the inputs factory for each key: [[shapes]] tables in TOML, or one JSON object"
            " per line (default: shapes= of the declaration)"
        )
        parser.add_argument("--shapes", metavar="FILE", help=about)
        if command == "lookup":
            parser.add_argument("--space", metavar="FILE", help="a TOML file that declares TARGET")

    def command(self, name: str) -> Command | None:
        from autotune.domains.kernel import cli

        commands: Mapping[str, Command] = {"search": cli.search, "lookup": cli.lookup}
        return commands.get(name)


DOMAIN = Kernels()
