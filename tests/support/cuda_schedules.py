"""Schedules of CUDA with real cubins, for sm_90. No GPU is needed to compile them."""

from __future__ import annotations

import functools

import torch

from autotune.domains.fusion.task import FusionTask
from autotune.task import Artifact, Config
from tests.support.hostile import normalised, softmax, workload_of


def both(x: torch.Tensor) -> torch.Tensor:
    """Column maxima, then row sums of the differences: several plans."""
    y = x - x.amax(0)
    return y / y.sum(1, keepdim=True)


@functools.cache
def built(name: str = "softmax") -> tuple[FusionTask, Config, Artifact]:
    fn = {"softmax": softmax, "normalised": normalised, "both": both}[name]
    task = FusionTask(workload_of(fn, torch.ones(64, 256)), "cuda:0", "sm_90", 132)
    config = task.default()
    return task, config, task.build(config)


@functools.cache
def cut() -> tuple[FusionTask, Config, Artifact]:
    """A region under a plan of several launches, with scratch between."""
    task, _, _ = built("both")
    plan = next(p for p in (task.plan_of({"plan": c.name}) for c in task.compositions(8)) if p.scratch)
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    return task, config, task.build(config)
