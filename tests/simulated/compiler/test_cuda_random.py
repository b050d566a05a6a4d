"""Random programs as CUDA kernels in the simulator, by default and under random configurations, against the oracle."""

from __future__ import annotations

import pytest

from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.domains.fusion.task import FusionTask
from tests.support.random_programs.checks import regions_of
from tests.support.random_programs.families import program
from tests.support.simulator.groups import check_group
from tests.support.zoo import random_configs

SMALL = 300
"""Elements of a tensor: a thousand threads take about a second."""


@pytest.mark.programs(0.4)
def test_kernels_agree_with_the_oracle(seed: int) -> None:
    """Each group alone, on random inputs, and on inputs with NaN and infinities."""
    p = program(seed, SMALL)
    for region in regions_of(p):
        if region.workload is None:
            continue
        task = FusionTask(region.workload, "cuda:0", target="sm_90", sms=3)
        for config in [task.default(), *random_configs(task, 1, seed)]:
            if task.reject(config) is not None:
                continue
            plan = task.plan_of(config)
            for group, own in zip(plan.groups, group_configs(plan, config), strict=True):
                made = scheme_of(group.graph).emit(group.graph, own, 3)
                for special in (False, True):
                    try:
                        check_group(group.graph, made, seed=seed, special=special)
                    except AssertionError as error:
                        raise AssertionError(f"{error}\n{own}\n{p}\n{region.submodule.code}") from error
