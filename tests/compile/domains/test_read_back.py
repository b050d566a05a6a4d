"""A plan whose second kernel reads a result of the first: built for a GPU, audited, and run for real on this CPU."""

from __future__ import annotations

import pytest
import torch

from autotune.compiler.assemble import foreign
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from autotune.task import Config
from tests.support.read_back import cut, mixer_norm, stream_norm, workload_of
from tests.support.zoo import BF16

SIZES = (2, 24, 64)


def configured(task: FusionTask, plan: str) -> Config:
    made = task.plan_of({"plan": plan})
    return task.joined(made, [on.default(g.graph) for on, g in task.sides(made)])


def test_a_gpu_s_kernels_pass_the_result_itself() -> None:
    task = FusionTask(workload_of(mixer_norm, *SIZES), "cuda:0", target="sm_90", sms=132)
    config = configured(task, cut(task.graph))
    artifact = task.build(config)
    first, second = ([tuple(ref) for ref in kernel.launch["args"]] for kernel in artifact.kernels)
    assert ("output", 0) in first
    assert {("output", 0), ("output", 1)} <= set(second)
    assert artifact.scratch == ()
    assert foreign(artifact, task.graph, config, 132) == ""
    assert foreign(artifact, task.graph, {**config, "plan": cut(task.graph).replace("b0", "o0")}, 132)


def test_a_gpu_s_kernels_pass_a_copy_of_its_type() -> None:
    task = FusionTask(workload_of(stream_norm, *SIZES), "cuda:0", target="sm_90", sms=132)
    config = configured(task, cut(task.graph))
    artifact = task.build(config)
    first, second = ([tuple(ref) for ref in kernel.launch["args"]] for kernel in artifact.kernels)
    assert {("output", 0), ("scratch", 0)} <= set(first)
    assert ("output", 0) not in second
    assert ("scratch", 0) in second
    assert artifact.scratch == (("bfloat16", 2 * 24 * 64),)
    assert foreign(artifact, task.graph, config, 132) == ""


@pytest.mark.parametrize("fn", [mixer_norm, stream_norm])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_cpu_runs_it(fn, dtype: torch.dtype) -> None:
    work = workload_of(fn, *SIZES, dtype)
    task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
    config = configured(task, cut(task.graph))
    verdict = bench.verify(bench.load(config, task.build(config)), 5)
    assert verdict.ok, verdict.detail
