"""Kernels that read a result of the launch before, by the fake machine: right where storing rounds, and on NaN."""

from __future__ import annotations

import pytest
import torch

from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from tests.support.many_parts import run_plan
from tests.support.read_back import cut, mixer_norm, stream_norm, workload_of
from tests.support.zoo import BF16, F16


@pytest.mark.parametrize("fn", [mixer_norm, stream_norm])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("dtype", "sizes"), [(BF16, (2, 24, 64)), (torch.float32, (2, 9, 65)), (F16, (3, 40, 32))], ids=str
)
def test_a_norm_reads_the_stored_sum(fn, dtype: torch.dtype, sizes: tuple[int, int, int], special: bool) -> None:
    work = workload_of(fn, *sizes, dtype)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    assert len(run_plan(task, cut(Graph.from_json(work.spec)), special=special)) == 2
