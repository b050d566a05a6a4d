"""Sums over all rows on CUDA: two sums of a row joined at once, partials joined in clusters, and their finish."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import check_group
from torch import Tensor

from autotune.fusion.schemes import scheme_of
from autotune.fusion.target import workloads_of
from autotune.fusion.task import FusionTask

PLAIN = {"keep": "registers", "unroll": 1, "online": False, "blocks_per_sm": 0, "vector_bytes": 4}


def task_of(fn: object, *args: Tensor) -> FusionTask:
    """The task of a function of one region, for a device of three multiprocessors."""
    (work, _), *_ = workloads_of(fn, args)  # type: ignore[arg-type]
    return FusionTask(work, "cuda:0", target="sm_90", sms=3)


def two_sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Two sums, a maximum and a third sum of each row."""
    return x.sum(-1), (x * y).sum(-1), y.amax(-1), (y * y).sum(-1)


def normalised(x: Tensor, y: Tensor) -> Tensor:
    """Two sums that later passes need."""
    return x * x.sum(-1, keepdim=True) + y * (x * y).sum(-1, keepdim=True)


@pytest.mark.parametrize("fn", [two_sums, normalised])
@pytest.mark.parametrize(
    ("threads", "rows"), [(32, 2), (64, 2), (96, 2), (512, 1), (544, 1), (1024, 1)], ids=lambda n: str(n)
)
def test_two_sums_of_a_row(fn: object, threads: int, rows: int) -> None:
    task = task_of(fn, torch.randn(3, 2048), torch.randn(3, 2048))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = task.default() | PLAIN | {"threads_per_row": threads, "rows_per_block": rows}
    made = scheme.emit(group.graph, config, 3)
    assert any("upper" in line for line in made.sources[0].body) == (threads > 32)
    check_group(group.graph, made, seed=threads, special=rows == 1)
