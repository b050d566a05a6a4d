"""Runs a region's groups through Triton, one kernel each, in the order of a plan."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import torch

from autotune.compiler.planner.groups import Plan
from autotune.compiler.planner.plan import make_plan
from autotune.ir.graph import Graph
from autotune.task import Config
from examples.triton_target.kernel import Emitter


def sources(plan: Plan, config: Config) -> list[tuple[str, int]]:
    """The kernel of each group of a plan under a configuration, and how many programs run it.

    Raises:
        Unsupported: a group is neither flat nor row-wise.
    """
    return [Emitter(g.graph, int(config["rows"]), int(config["block"])).source() for g in plan.groups]


def compiled(text: str) -> Any:
    """The kernel that a module's text defines; Triton reads the text again, through ``linecache``."""
    name = f"<triton {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    module: dict[str, Any] = {"__name__": "autotune_triton"}
    exec(compile(text, name, "exec"), module)
    return module["kernel"]


class TritonExecutor:
    """A region's kernels on flat tensors; see ``autotune.domains.fusion.bench.Runs``."""

    def __init__(self, graph: Graph, config: Config, device: torch.device) -> None:
        self.graph, self.device, self.warps = graph, device, int(config["num_warps"])
        self.plan = make_plan(graph, "cpu")
        self.kernels = [(compiled(text), n) for text, n in sources(self.plan, config)]

    def call(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = self._made([(o.dtype, self.graph.output_numel(k)) for k, o in enumerate(self.graph.outputs)])
        self.run_into(inputs, outputs)
        return outputs

    def run_into(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        of = {"input": inputs, "output": outputs, "scratch": self._made(self.plan.scratch_numel(self.graph))}
        for (kernel, programs), group in zip(self.kernels, self.plan.groups, strict=True):
            tensors = [of[kind][n] for kind, n in (*group.inputs, *group.outputs)]
            kernel[(programs,)](*tensors, num_warps=self.warps)

    def _made(self, kinds: Sequence[tuple[str, int]]) -> list[torch.Tensor]:
        return [torch.empty(n, dtype=getattr(torch, dtype), device=self.device) for dtype, n in kinds]
