"""NaN and infinities among the inputs: where eager mode has one, a kernel may have any, and elsewhere none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.compiler.lower.rules import RULES
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.domains.fusion.bench import FusionBench, _Candidate
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.task import Verdict
from autotune.workload import Workload
from tests.support.simulator.groups import check_group, check_inputs


class Norm(nn.Module):
    """T5's: no mean, no bias, statistics in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(self.weight.dtype)


class Feed(nn.Module):
    """T5's feed-forward block: ``x + dropout(w2 dropout(relu(w1 norm(x))))``, clamped in fp16, and the norm after."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = Norm(width), Norm(width)
        self.w1, self.w2 = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.w2(F.dropout(F.relu(self.w1(self.before(x))), 0.1)), 0.1)
        if x.dtype == torch.float16:
            most = torch.finfo(x.dtype).max
            most = torch.where(torch.isinf(x).any(), most - 1000, most)
            x = torch.clamp(x, min=-most, max=most)
        return self.after(x)


def t5(dtype: torch.dtype) -> list[Workload]:
    torch.manual_seed(0)
    found = workloads_of(Feed(32).to(dtype), (torch.randn(6, 8, 32, dtype=dtype),), train=True)
    return [workload for workload, _ in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_candidates_of_t5_verify_on_a_cpu(dtype: torch.dtype) -> None:
    works = t5(dtype)
    assert len(works) >= 4
    for work in works:
        task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
        run = bench.load(task.default(), task.build(task.default()))
        for seed in range(2):
            verdict = bench.verify(run, seed)
            assert verdict.ok, f"{work.label}: {verdict.detail}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_candidates_of_t5_verify_as_cuda_text(dtype: torch.dtype) -> None:
    for work in t5(dtype):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
        plan = task.plan_of(task.default())
        for group, own in zip(plan.groups, group_configs(plan, task.default()), strict=True):
            made = scheme_of(group.graph).emit(group.graph, own, 3)
            check_group(group.graph, made, seed=1, special=True)


def test_remainders_of_large_numbers_as_cuda_text() -> None:
    """A phase or a position in seconds is a million times its period."""
    ((work, _),) = workloads_of(lambda x: x % 6.28125 + 1, (torch.randn(8, 32),))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,), (own,) = task.plan_of(task.default()).groups, group_configs(task.plan, task.default())
    x = torch.linspace(-1e8, 1e10, 8 * 32)
    check_inputs(group.graph, scheme_of(group.graph).emit(group.graph, own, 3), [x])
    assert task.build(task.default()).kernels


def test_nan_as_a_narrow_integer_as_cuda_text() -> None:
    """The conversion of NaN to int32 depends on the device, its value as a narrow integer does not."""
    fn = lambda x: x.clamp(0, 255).to(torch.uint8).float() + 1  # noqa: E731
    ((work, _),) = workloads_of(fn, (torch.randn(8, 32),))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,), (own,) = task.plan_of(task.default()).groups, group_configs(task.plan, task.default())
    x = torch.linspace(-300, 300, 8 * 32)
    x[::7] = math.nan
    check_inputs(group.graph, scheme_of(group.graph).emit(group.graph, own, 3), [x])


# ---- what a wrong kernel may not do


def difference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """NaN where x is infinite, which ``x * (a - b)`` is not."""
    return x * a - x * b


Mutant = Callable[[Tensor], None]


def verified(mutate: Mutant, fn: Callable[..., Tensor] = difference, source: bool = True) -> tuple[bool, str]:
    """The verdict on a right kernel whose stored output is changed after each run on special inputs."""
    inputs = [torch.randn(64, 40), *(torch.randn(64, 40) for _ in range(2))]
    ((work, _),) = workloads_of(fn, inputs[: fn.__code__.co_argcount])
    if not source:
        work = Workload(work.kind, work.spec, work.family, work.extent, work.label)
    task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
    run = bench.load(task.default(), task.build(task.default()))
    assert bench.verify(run, 0).ok

    class Changed:
        def run_into(self, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            executor.run_into(given, outputs)
            if not all(t.isfinite().all() for t in given):
                mutate(outputs[0])

    executor, run.executor = run.executor, Changed()  # type: ignore[attr-defined, assignment]
    verdict = bench.verify(run, 0)
    return verdict.ok, verdict.detail


Kernel = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Reads inputs and writes outputs."""


class Planted:
    """A kernel in place of the one that a search would load."""

    def __init__(self, run: Kernel) -> None:
        self.run_into = run

    def call(self, *given: Tensor) -> object:
        raise AssertionError


def verdict_on(run: Kernel, bench: FusionBench) -> Verdict:
    return bench.verify(_Candidate(Planted(run), bench), 0)


def halves(dtype: torch.dtype) -> FusionBench:
    ((work, _),) = workloads_of(lambda x: x.float() * 0.5, (torch.ones(64, 40, dtype=dtype),))
    return FusionBench(work, "cpu")


def right(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    outputs[0].copy_(given[0].float() * 0.5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_bytes_read_with_the_wrong_sign_are_rejected(dtype: torch.dtype) -> None:
    bench, other = halves(dtype), torch.uint8 if dtype == torch.int8 else torch.int8
    assert verdict_on(right, bench).ok
    assert not verdict_on(lambda given, outputs: right([given[0].to(other)], outputs), bench).ok


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_of_fewer_bits_are_rejected(dtype: torch.dtype) -> None:
    inputs = torch.ones(64, 40, dtype=dtype), torch.ones(64, 40, dtype=dtype)
    ((work, _),) = workloads_of(lambda x, y: x * y + 3, inputs)
    bench = FusionBench(work, "cpu")

    def products(of: torch.dtype) -> Kernel:
        return lambda given, outputs: outputs[0].copy_((given[0].to(of) * given[1].to(of) + 3).to(dtype))

    assert verdict_on(products(dtype), bench).ok
    assert not verdict_on(products(torch.int32 if dtype == torch.int64 else torch.int16), bench).ok


def test_a_dropout_is_verified_with_large_seeds() -> None:
    ((work, _),) = workloads_of(lambda x: F.dropout(x, 0.3, training=True), (torch.randn(64, 40),))
    graph = Graph.from_json(work.spec)
    (slot,) = [k for k, name in enumerate(graph.inputs) if name == "int64"]
    drawn = [make_inputs(graph, seed, special=True)[slot].abs().max() for seed in range(8)]
    assert max(drawn) > 2**32
    bench, task = FusionBench(work, "cpu"), FusionTask(work, "cpu")
    run = bench.load(task.default(), task.build(task.default()))
    assert all(bench.verify(run, seed).ok for seed in range(4))


@pytest.mark.parametrize("place", [-1, 64 * 40], ids=["before", "behind"])
def test_a_write_outside_of_an_output_is_rejected(place: int) -> None:
    def past(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        right(given, outputs)
        outputs[0].as_strided((1,), (1,), outputs[0].storage_offset() + place).fill_(0.0)

    verdict = verdict_on(past, halves(torch.float32))
    assert not verdict.ok
    assert "memory outside of the tensor" in verdict.detail


def test_a_write_into_an_input_is_rejected_and_spoils_no_other_verdict() -> None:
    def into_input(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        right(given, outputs)
        given[0][3] = 7.0

    bench = halves(torch.float32)
    verdict = verdict_on(into_input, bench)
    assert not verdict.ok
    assert "input 0" in verdict.detail
    assert verdict_on(right, bench).ok


def wrongly(monkeypatch: pytest.MonkeyPatch, name: str, rule: Any, fn: Callable[..., Tensor], x: Tensor) -> FusionBench:
    """The bench of a program whose operator ``name`` is translated by a wrong rule."""
    monkeypatch.setitem(RULES, name, rule)
    ((work, _),) = workloads_of(fn, (x,))
    return FusionBench(work, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_a_kernel_of_a_wrong_graph_is_rejected(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The oracle has the mistake too."""

    def fn(x: Tensor) -> Tensor:
        return x.abs() * 3

    x = torch.ones(64, 40, dtype=dtype)
    bench = wrongly(monkeypatch, "abs", lambda region, x: x, fn, x)
    verdict = verdict_on(lambda given, outputs: outputs[0].copy_(given[0] * 3), bench)
    assert not verdict.ok
    assert "the region's graph" in verdict.detail
    assert verdict.error == 0.0  # a larger one would cost a new process, and no kernel ran


def test_integers_of_a_wrong_graph_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = wrongly(monkeypatch, "abs", lambda region, x: x, lambda x: (x.abs() * 9).int(), torch.ones(64, 40))
    verdict = verdict_on(lambda given, outputs: outputs[0].copy_((given[0] * 9).int()), bench)
    assert "the region's graph" in verdict.detail


def test_rounding_in_halves_is_no_wrong_graph() -> None:
    """Differences of almost equal numbers, which eager mode rounds to bfloat16 after each operator."""

    def fn(x: Tensor) -> Tensor:
        y = x + 100
        return (y - y.mean(1, keepdim=True)) - (y - y.mean(1, keepdim=True) * 1.001)

    ((work, _),) = workloads_of(fn, (torch.ones(64, 40, dtype=torch.bfloat16),))
    bench = FusionBench(work, "cpu")
    task = FusionTask(work, "cpu")
    assert bench.verify(bench.load(task.default(), task.build(task.default())), 0).ok


def test_sums_beyond_float16_are_no_wrong_graph() -> None:
    """A bias gradient under autocast: eager mode rounds its sums to infinity, and the region keeps them in float32."""

    def fn(x: Tensor) -> Tensor:
        return (x * 1000).half().sum(0, dtype=torch.float32).half().float() * 0.5

    x = torch.ones(20_000, 40)
    ((work, _),) = workloads_of(fn, (x,))
    bench, task = FusionBench(work, "cpu"), FusionTask(work, "cpu")
    seen = bench._of_program(bench._expectation(0, False))[0]
    assert seen is not None
    assert seen.isinf().float().mean() > 0.2  # the case that it is about
    assert bench.verify(bench.load(task.default(), task.build(task.default())), 0).ok


def _where_nan(value: float) -> Mutant:
    def mutate(y: Tensor) -> None:
        assert y.isnan().any()
        y[y.isnan()] = value

    return mutate


def _where_finite(value: float, which: int = 0) -> Mutant:
    def mutate(y: Tensor) -> None:
        y[torch.nonzero(y.isfinite())[which]] = value

    return mutate


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinity_may_stand_for_eager_s_nan(value: float) -> None:
    assert verified(_where_nan(value)) == (True, "")


@pytest.mark.parametrize("value", [0.0, 1.0, 3e38])
def test_a_number_may_not(value: float) -> None:
    ok, detail = verified(_where_nan(value))
    assert not ok
    assert "inputs with NaN and infinities" in detail
    assert "instead of nan" in detail


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("which", [0, -1])
def test_nothing_is_forgiven_where_eager_is_finite(value: float, which: int) -> None:
    ok, detail = verified(_where_finite(value, which))
    assert not ok
    assert f"{value:.9g} instead of" in detail


def test_a_wrong_number_next_to_an_accepted_one_is_found() -> None:
    def mutate(y: Tensor) -> None:
        _where_nan(math.inf)(y)
        _where_finite(float(y[y.isfinite()][0]) + 0.01)(y)

    assert not verified(mutate)[0]


def test_without_the_user_s_program_nothing_is_forgiven() -> None:
    ok, detail = verified(_where_nan(math.inf), source=False)
    assert not ok
    assert "inf instead of nan" in detail


def test_a_transposed_result_is_laid_over_the_graph_s() -> None:
    """Masks are in the order of the graph's axes, not of eager's."""

    def turned(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x * a - x * b).t().contiguous()

    assert verified(_where_nan(math.inf), turned)[0]
    assert not verified(_where_finite(math.inf, 7), turned)[0]
