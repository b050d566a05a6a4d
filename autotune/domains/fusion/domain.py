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


_SAVED = (0.2, 0.35, 1.0)
_COMPUTED = 0.35
_GATHERED = 0.6
"""Time that winners save relative to a copy of the region's bytes, by the number of sets of reduced axes (the last for
two and more); at least ``_COMPUTED`` with a function such as ``exp``, ``_GATHERED`` with a sum over gathered elements.
Medians and means of 427 regions of models on an H200, torch 2.11 (the packaged schedules)."""
_FUNCTIONS = frozenset({"erf", "exp", "log", "tanh", "sin", "cos", "sigmoid", "xor"})
"""``xor`` is of random numbers."""


class Fusion(Domain):
    """See :class:`autotune.domain.Domain`."""

    def open_task(self, workload: Workload, device: str) -> FusionTask:
        from autotune.domains.fusion.task import FusionTask

        return FusionTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> FusionBench:
        from autotune.domains.fusion.bench import FusionBench

        return FusionBench(workload, device)

    def compile_baselines(self, workload: Workload, device: str) -> None:
        from autotune.domains.fusion.bench import compile_baselines

        compile_baselines(workload, device)

    def sample(self, number: int) -> Workload:
        from autotune.domains.fusion.builtin import sample_region

        return sample_region(64 + number)

    def bytes_moved(self, workload: Workload) -> int:
        from autotune.ir.graph import Graph

        return Graph.from_json(workload.spec).bytes_moved

    def bytes_saved(self, workload: Workload) -> float:
        from autotune.ir.graph import REDUCTIONS, Graph

        graph = Graph.from_json(workload.spec)
        ops = {v.op for v in graph.values}
        overs = len({v.over for v in graph.values if v.op in REDUCTIONS})
        share = _SAVED[min(overs, len(_SAVED) - 1)]
        if ops & _FUNCTIONS:
            share = max(share, _COMPUTED)
        if overs and "gather" in ops:
            share = max(share, _GATHERED)
        return share * graph.bytes_moved

    def alike(self, workload: Workload) -> str:
        from autotune.ir.canonical import without_constants
        from autotune.ir.graph import Graph

        return without_constants(Graph.from_json(workload.spec))

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
