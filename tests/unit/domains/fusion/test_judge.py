"""A wrong kernel is distinguished from a program whose results jump with rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from tests.support.random_programs.judge import jumps, verify


def loaded(fn: Callable[..., Any], *args: Tensor) -> tuple[FusionBench, Any]:
    ((work, _),) = workloads_of(fn, args)
    task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
    config = task.default()
    return bench, bench.load(config, task.build(config))


def small_difference(x: Tensor, y: Tensor) -> Tensor:
    return (torch.exp(x) * 1e5 + y * 1e-3) - torch.exp(x) * 1e5


def test_a_slightly_wrong_kernel_is_wrong() -> None:
    bench, run = loaded(lambda x: torch.softmax(torch.tanh(x), -1), torch.randn(20, 100))
    assert verify(bench, run, 1) == ("right", "")
    real = run.executor

    class Spoiled:
        def run_into(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
            real.run_into(inputs, outputs)
            outputs[0].view(-1)[777] *= 1 + 1e-3

    run.executor = Spoiled()
    status, detail = verify(bench, run, 1)
    assert status == "wrong"
    assert "output 0 on random inputs" in detail


def test_verify_calls_an_integer_from_a_cancelling_comparison_blurred() -> None:
    bench, run = loaded(
        lambda x, y: torch.where(small_difference(x, y) > 0, 100, 0), torch.randn(900), torch.randn(900)
    )
    assert verify(bench, run, 1)[0] == "blurred"
    assert jumps(bench, 1, special=False)


def test_verify_allows_for_a_boolean_from_a_cancelling_comparison() -> None:
    """Only where noise flips it in the oracle itself."""

    def positive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return small_difference(x, y) > 0, x > 0

    bench, run = loaded(positive, torch.randn(900), torch.randn(900))
    assert verify(bench, run, 1)[0] == "right"
    real, (clear,) = run.executor, [k for k, o in enumerate(bench.graph.outputs) if "exp" not in kinds(bench, o.value)]

    class Spoiled:
        def run_into(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
            real.run_into(inputs, outputs)
            outputs[clear].view(-1)[777] ^= True

    run.executor = Spoiled()
    assert not bench.verify(run, 1).ok


def kinds(bench: FusionBench, value: int) -> set[str]:
    return {bench.graph.values[i].op for i in bench.graph.making([value])}


def test_cancellation_itself_is_allowed_for() -> None:
    bench, run = loaded(small_difference, torch.randn(900), torch.randn(900))
    assert verify(bench, run, 1)[0] == "right"
    assert not jumps(bench, 1, special=False)
