"""Random programs on the CPU target: every region's kernels against the oracle, by the search's own verification."""

from __future__ import annotations

import pytest

from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from tests.support.random_programs import judge
from tests.support.random_programs.checks import regions_of
from tests.support.random_programs.families import program
from tests.support.zoo import random_configs


@pytest.mark.programs(0.6)
def test_kernels_agree_with_the_oracle(seed: int) -> None:
    """The default configuration, and for every third program also a random one."""
    p = program(seed)
    for r in regions_of(p):
        if r.workload is None:
            continue
        task, bench = FusionTask(r.workload, "cpu"), FusionBench(r.workload, "cpu")
        for config in [task.default(), *random_configs(task, int(seed % 3 == 0), seed)]:
            status, detail = judge.verify(bench, bench.load(config, task.build(config)), seed)
            assert status != "wrong", f"{detail}\n{config}\n{p}\n{r.submodule.code}"
