"""The same bits in every call, however the threads of a CPU kernel share its work."""

from __future__ import annotations

import pytest
import torch

from autotune.domain import open_task
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from tests.support.hostile import workload_of


def columns(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over rows and over columns."""
    return (x * g).sum(0), torch.softmax(x, -1).sum(-1)


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_bits(seed: int) -> None:
    workload = workload_of(columns, torch.ones(3000, 70), torch.ones(3000, 70))
    task, bench = open_task(workload, "cpu"), FusionBench(workload, "cpu")
    assert isinstance(task, FusionTask)
    config = task.default()
    run = bench.load(config, task.build(config))
    first = [t.clone() for t in run()]  # type: ignore[attr-defined]
    assert any(t.abs().sum() > 0 for t in first)
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))  # type: ignore[call-overload]
