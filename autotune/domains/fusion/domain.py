"""Fusion as a domain: the memory-intensive regions of PyTorch programs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.charts import Exhibit
from autotune.device import DeviceIdentity
from autotune.domain import Command, Domain
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.domains.fusion.bench import FusionBench
    from autotune.domains.fusion.task import FusionTask


class Fusion(Domain):
    """See :class:`autotune.domain.Domain`."""

    def open_task(self, workload: Workload, device: str) -> FusionTask:
        from autotune.domains.fusion.task import FusionTask

        return FusionTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> FusionBench:
        from autotune.domains.fusion.bench import FusionBench

        return FusionBench(workload, device)

    def compile_baselines(self, workload: Workload, device: str) -> None:
        from autotune.domains.fusion.bench import compile_ahead

        compile_ahead(workload, device)

    def bytes_moved(self, workload: Workload) -> int:
        from autotune.ir.graph import Graph

        return Graph.from_json(workload.spec).bytes_moved

    def bytes_held(self, workload: Workload) -> int:
        from autotune.ir.graph import Graph

        return Graph.from_json(workload.spec).bytes_held

    def damage(self, workload: Workload) -> str | None:
        from autotune.domains.fusion.inspection import check_graph, check_source

        return check_graph(workload) or check_source(workload)

    def targets(self) -> Mapping[str, str]:
        from autotune.domains.fusion.builtin import BUILTIN

        return {name: target.about for name, target in BUILTIN.items()}

    def add_arguments(self, command: str, parser: argparse.ArgumentParser) -> None:
        from autotune.domains.fusion import cli

        cli.add_arguments(command, parser)

    def command(self, name: str) -> Command | None:
        from autotune.domains.fusion import cli

        commands: Mapping[str, Command] = {"search": cli.search, "lookup": cli.lookup, "calibrate": cli.calibrate}
        return commands.get(name)

    def exhibits(self, workload: Workload, config: Any, schedule: Any, device: DeviceIdentity) -> Sequence[Exhibit]:
        from autotune.domains.fusion import picture

        return picture.exhibits(workload, config, schedule, device)


DOMAIN = Fusion()
