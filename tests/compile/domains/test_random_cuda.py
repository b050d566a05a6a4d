"""Random programs compiled for a GPU, without one: the default and other schedules become cubins that fit a block."""

from __future__ import annotations

import os

import pytest

from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.task import Artifact, Config
from tests.support.random_programs.checks import regions_of
from tests.support.random_programs.families import program
from tests.support.zoo import random_configs

NO_KERNEL = (
    "a group with a single element a row",
    "an output without a column axis in a flat kernel",
)
"""Groups that the CUDA printers may refuse whatever the configuration; their regions run as they did."""
BOUND = int(os.environ.get("AUTOTUNE_TEST_CONFIGS", "0"))


def built(task: FusionTask, config: Config) -> tuple[Artifact | None, str]:
    """The artifact, or None and why there is none."""
    try:
        return task.build(config), ""
    except BuildError as error:
        return None, str(error)


@pytest.mark.programs(0.35)
def test_kernels_compile(seed: int) -> None:
    """The default always compiles; another may exceed the device's limits, with a message."""
    p = program(seed)
    regions = [r for r in regions_of(p) if r.workload is not None]
    for r in regions[: None if BOUND else 2]:
        assert r.workload is not None
        task = FusionTask(r.workload, "cuda:0", target="sm_90", sms=132)
        default = task.default()
        refused = task.reject(default)
        if refused:
            assert refused in NO_KERNEL, f"{refused}\n{p}"
            continue
        for config in [default, *random_configs(task, BOUND or int(seed % 4 == 0), seed)]:
            artifact, why = built(task, config)
            if artifact is None:
                assert config != default, f"{why}\n{p}"
                assert any(w in why for w in ("spills", "registers", "shared memory")), f"{why}\n{config}\n{p}"
                continue
            assert artifact.target == "sm_90"
            assert len(artifact.kernels) >= 1
            for kernel in artifact.kernels:
                used = kernel.resources
                assert kernel.entry.encode() in kernel.code, "the cubin has no such entry"
                assert used["threads"] == kernel.launch["block"] <= 1024
                assert used["registers"] * used["threads"] * used["blocks_per_sm"] <= 65536, "more than an SM has"
