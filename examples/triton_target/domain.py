"""A third target, registered: fusion's regions as Triton kernels, searched and stored as a separate domain.

    export AUTOTUNE_DOMAINS=triton=examples.triton_target.domain
    autotune search triton layer_norm

Without a GPU, ``TRITON_INTERPRET=1`` and ``--device cpu`` run the kernels in Triton's interpreter, slowly. What is
found is stored and shown. ``torch.compile(backend="autotune")`` deploys schedules of fusion's own targets only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.passes import build_program
from autotune.domain import Domain
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.program_spec import captured
from autotune.errors import BuildError, Unsupported, UserError
from autotune.ir.graph import Graph
from autotune.space import Space, load_space
from autotune.task import Artifact, Config, Kernel, Task
from autotune.workload import Workload, digest
from examples.triton_target.run import TritonExecutor, sources

KIND = "triton"
MOST = 1 << 14
"""Numbers of a block that a program has registers for."""


class TritonTask(Task):
    """See ``autotune.task.Task``.

    Raises:
        Unsupported: a group of the region is neither flat nor row-wise.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device, self.side = workload, device, device.partition(":")[0]
        if self.side == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError("Triton has no CPU target: set TRITON_INTERPRET=1, or give --device cuda")
        self.plan = make_plan(Graph.from_json(workload.spec), "cpu")
        self.programs = [build_program(g.graph) for g in self.plan.groups]
        sources(self.plan, self.default())

    def space(self, file: str | None = None) -> Space:
        return load_space(KIND, self.side, file, shipped=Path(__file__).with_name("space.toml"))

    def default(self) -> Config:
        return {"rows": 1, "block": 1024, "num_warps": 4}

    def seeds(self) -> Sequence[Config]:
        space, widest = self.space(), max(p.n_cols for p in self.programs)
        changes: list[Config] = [{"block": n} for n in space["block"].choices if int(n) >= widest][:1]
        changes += [{"rows": 4}, {"num_warps": 8}]
        found = [self.normalize(self.default() | c) for c in changes]
        return [c for c in found if space.contains(c) and self.reject(c) is None]

    def normalize(self, config: Config) -> Config:
        return config | {"rows": 1} if all(p.pointwise for p in self.programs) else config

    def reject(self, config: Config) -> str | None:
        numbers = int(config["rows"]) * int(config["block"])
        return f"blocks of {numbers} numbers" if numbers > MOST else None

    def build(self, config: Config) -> Artifact:
        try:
            made = sources(self.plan, config)
        except Unsupported as error:
            raise BuildError(str(error)) from error
        return Artifact(KIND, tuple(Kernel(f"{KIND}_{k}") for k in range(len(made))), generator="triton-1")

    def adapt(self, config: Config) -> Config | None:
        fitted = self.space().project(config)
        return None if fitted is None else self.normalize(fitted)


class TritonBench(FusionBench):
    """Fusion's inputs, oracle and baselines, with Triton kernels as candidates; see ``autotune.task.Bench``."""

    def __init__(self, workload: Workload, device: str) -> None:
        super().__init__(replace(workload, kind="fusion"), device)

    def executor(self, config: Config, artifact: Artifact) -> TritonExecutor:
        return TritonExecutor(self.graph, config, self.device)


class Triton(Domain):
    """See ``autotune.domain.Domain``."""

    def open_task(self, workload: Workload, device: str) -> TritonTask:
        return TritonTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> TritonBench:
        return TritonBench(workload, device)

    def workloads_of(self, target: str, inputs: str | None) -> list[tuple[Workload, int]]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = captured(target, inputs, device).workloads
        return [(replace(w, kind=KIND, family=w.family and digest([KIND, w.family])), n) for w, n in found]


DOMAIN = Triton()
