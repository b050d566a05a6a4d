"""A domain of one's own: GELU in NumPy, whose blocks of elements stay in the cache from operator to operator.

    export AUTOTUNE_DOMAINS=gelu=examples.blocked_gelu.domain
    autotune search gelu 4194304 --device cpu
    autotune lookup gelu 4194304 --device cpu

An installed package names its domain in pyproject.toml instead, under ``[project.entry-points."autotune.domains"]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.device import usable_processors
from autotune.domain import Domain
from autotune.errors import UserError
from autotune.space import Space, load_space
from autotune.task import Artifact, Bench, Config, Kernel, Task
from autotune.workload import Workload

KIND = "gelu"


class GeluTask(Task):
    """See ``autotune.task.Task``."""

    def __init__(self, workload: Workload, device: str) -> None:
        if device != "cpu":
            raise UserError(f"gelu is of the CPU, not of {device}")
        self.workload, self.device, self.elements = workload, device, int(workload.spec["elements"])

    def space(self, file: str | None = None) -> Space:
        return load_space(KIND, "cpu", file, shipped=Path(__file__).with_name("space.toml"))

    def default(self) -> Config:
        return {"block": 0, "threads": 1}

    def seeds(self) -> Sequence[Config]:
        return [{"block": 16384, "threads": 1}]

    def reject(self, config: Config) -> str | None:
        return "more threads than processors" if int(config["threads"]) > usable_processors() else None

    def normalize(self, config: Config) -> Config:
        whole = int(config["block"]) >= self.elements or not config["block"]
        return config | {"block": 0, "threads": 1} if whole else config

    def build(self, config: Config) -> Artifact:
        return Artifact("cpu", (Kernel(KIND),), generator="numpy")

    def adapt(self, config: Config) -> Config | None:
        return self.normalize(config)


class Gelu(Domain):
    """See ``autotune.domain.Domain``."""

    def open_task(self, workload: Workload, device: str) -> GeluTask:
        return GeluTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> Bench:
        from examples.blocked_gelu.bench import GeluBench

        return GeluBench(workload)

    def targets(self) -> Mapping[str, str]:
        return {str(1 << n): f"GELU of {1 << n} numbers" for n in (16, 20, 22)}

    def workloads_of(self, target: str, inputs: str | None) -> list[tuple[Workload, int]]:
        if inputs or not target.isdecimal() or not 0 < int(target) <= 1 << 30:
            raise UserError(f"{target}: give the number of elements, such as 4194304, and no inputs")
        return [(Workload(KIND, {"elements": int(target)}, family=KIND, extent=int(target), label=f"gelu {target}"), 1)]


DOMAIN = Gelu()
