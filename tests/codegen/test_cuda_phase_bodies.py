"""The bodies of a launch of several phases: how their blocks are shared out, and how many functions they may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_cuda_phases import EVERYTHING, schedule, softmax_of_everything, task_of

from autotune.compiler.assemble import phased
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.phases import STEPS, Phase, in_phases
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.errors import Unsupported


def test_blocks_are_shared_out_without_dividing_numbers_of_64_bits() -> None:
    """Which takes a hundred instructions in every thread, and registers for all phases."""
    task = task_of(softmax_of_everything(64, 512))
    plan = make_plan(task.graph, "cuda", EVERYTHING)
    source, _, _ = phased(plan, plan.launches[0], schedule(task, EVERYTHING), 3, len(plan.scratch))
    assert any(line.startswith("for b") for line in source.body)
    assert "div.s64" not in compile_ptx(source, "sm_90")[0]


def test_a_phase_keeps_to_its_numbers_of_functions() -> None:
    """Ten packed bodies would have a function of the name that the phase itself has."""
    text = "def f0(p0, tid):\n    st_f32_1_d(p0, tid, float32(1))"
    launch = {"dynamic": False, "inner": 1, "per_block": 1, "blocks_per_sm": 0, "shared": 0, "align": [4]}
    body = CudaSource((text,), ("tid = int32(cuda.threadIdx.x)", "f0(p0, tid)"), ("f32",), launch, 32, 0)
    phases = [Phase(body, (("output", 0),), 1), Phase(body, (("output", 1),), 1)]
    in_phases(phases, ("scratch", 0), 3)
    for number in (STEPS - 1, STEPS):
        many = replace(body, functions=(text.replace("f0", f"f{number}"),))
        with pytest.raises(Unsupported, match="device functions in one phase"):
            in_phases([phases[0], replace(phases[1], source=many)], ("scratch", 0), 3)
