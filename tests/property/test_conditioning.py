"""A wrong kernel is told from a program that magnifies rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conditioning import sensitivity, verify
from torch import Tensor

from autotune.fusion.target import workloads_of
from autotune.fusion.task import FusionBench, FusionTask


def loaded(fn: Callable[..., Any], *args: Tensor) -> tuple[FusionBench, Any]:
    ((work, _),) = workloads_of(fn, args)
    task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
    config = task.default()
    return bench, bench.load(config, task.build(config))


def test_a_slightly_wrong_kernel_is_wrong() -> None:
    bench, run = loaded(lambda x: torch.softmax(torch.tanh(x), -1), torch.randn(20, 100))
    assert verify(bench, run, 1) == ("right", "")
    real = run.executor

    class Spoiled:
        def run_into(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
            real.run_into(inputs, outputs)
            outputs[0].view(-1)[777] *= 1 + 1e-4

    run.executor = Spoiled()
    status, detail = verify(bench, run, 1)
    assert status == "wrong"
    assert "output 0 on random inputs" in detail


def test_cancellation_is_blurred() -> None:
    bench, run = loaded(lambda x, y: (torch.exp(x) * 1e5 + y) - torch.exp(x) * 1e5, torch.randn(900), torch.randn(900))
    status, detail = verify(bench, run, 1)
    assert status == "blurred", detail
    assert sensitivity(bench, 1, special=False) > 1


def test_noise_says_little_where_nothing_is_magnified() -> None:
    bench, _ = loaded(lambda x: torch.sigmoid(x) * 3, torch.randn(900))
    assert 0 < sensitivity(bench, 1, special=False) < 0.1
