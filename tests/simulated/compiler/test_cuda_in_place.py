"""Flat kernels whose output overwrites an input, and the last launch of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.assemble import bind, foreign
from autotune.compiler.program.program import overwritable
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda import OVERWRITES
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.rows import kernel as rows
from autotune.compiler.targets.cuda.source import GroupKernels
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from tests.support.many_parts import run_plan
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_inputs


def task_of(fn: Callable[..., Any], *args: Tensor) -> FusionTask:
    ((work, _),) = workloads_of(fn, args)
    return FusionTask(work, "cuda:0", target="sm_90", sms=3)


def group_of(fn: Callable[..., Any], *args: Tensor) -> Graph:
    (group,) = task_of(fn, *args).plan.groups
    assert scheme_of(group.graph).name == "flat"
    return group.graph


def emitted(graph: Graph, **config: Any) -> GroupKernels:
    scheme = scheme_of(graph)
    return scheme.emit(graph, scheme.normalize(graph, scheme.default(graph) | config), 132)


def half(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def two_of_two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.sin() * b, a * b.cos()


def with_a_row_and_a_column(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (x + row) * column


CASES: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
    (gelu, (half(37, 1000),)),
    (gelu, (torch.randn(3, 333),)),
    (gelu, (half(64, 64)[:, :63],)),
    (gated, (half(31, 512), half(31, 512))),
    (two_of_two, (half(8, 1024), half(8, 1024))),
    (with_a_row_and_a_column, (half(48, 160), half(160), half(48, 1))),
]
CONFIGS = [
    {"threads_per_row": 32, "unroll": 1, "blocks_per_sm": 0},
    {"threads_per_row": 32, "unroll": 4, "blocks_per_sm": 0},
    {"threads_per_row": 64, "unroll": 2, "blocks_per_sm": 1},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"unroll {c['unroll']}")
@pytest.mark.parametrize(("fn", "args"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_every_permitted_input_may_be_overwritten(
    fn: Callable[..., Any], args: tuple[Tensor, ...], config: dict[str, Any]
) -> None:
    graph = group_of(fn, *args)
    made, inputs, pairs = emitted(graph, **config), make_inputs(graph, seed=3), overwritable(graph)
    told = made.sources[0].launch.get(OVERWRITES, [])
    assert told == [[slot, len(graph.inputs) + k] for slot, k in pairs]
    assert pairs or args[0].stride(0) == 64  # rows of the input are apart, those of the output are not
    check_inputs(graph, made, inputs)
    for pair in pairs:
        check_inputs(graph, made, inputs, over=[pair])
    if fn is two_of_two:
        check_inputs(graph, made, inputs, over=[(0, 0), (1, 1)])
        check_inputs(graph, made, inputs, over=[(0, 1), (1, 0)])


def independent(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.sin(), a + b


def shifted(x: Tensor) -> Tensor:
    return x + x.roll(1, -1)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.float() + 1


def broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * y


def turned(x: Tensor) -> Tensor:
    return (x + 1).t().contiguous()


def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x + 1])


@pytest.mark.parametrize(
    ("fn", "shapes", "pairs"),
    [
        # Slot 0 is b, output 0 the sum. The sine is written before b is read.
        (independent, [(8, 64), (8, 64)], {(0, 0), (1, 0), (1, 1)}),
        (shifted, [(8, 64)], set()),
        (twice, [(8, 64)], {(0, 0)}),  # the other output has other elements
        (broadcast, [(64,), (8, 64)], {(1, 0)}),  # every row reads the vector and writes its double
        (turned, [(8, 64)], set()),
        (doubled, [(8, 64)], set()),
    ],
)
def test_only_where_each_element_is_read_where_it_is_written(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], pairs: set[tuple[int, int]]
) -> None:
    task = task_of(fn, *(half(*shape) for shape in shapes))
    assert set(overwritable(Graph.from_json(task.workload.spec))) == pairs


def test_one_row_is_overwritten_only_where_more_rows_could_be() -> None:
    """Kernels for one row may run other numbers of rows, whose distances then matter."""
    graph = group_of(gelu, half(5, 128)[:, :64])
    one = replace(graph, extents=(1, *graph.extents[1:]))
    assert len(graph.extents) == 2
    assert overwritable(graph) == overwritable(one) == ()


def test_the_simulator_detects_a_value_that_another_thread_overwrote() -> None:
    graph = group_of(shifted, half(8, 64))
    with pytest.raises(KernelError):
        check_inputs(graph, emitted(graph), make_inputs(graph, seed=3), over=[(0, 0)])


def test_overwritten_inputs_are_no_read_only_data() -> None:
    graph = group_of(with_a_row_and_a_column, half(256, 512), half(512), half(256, 1))
    ptx, _ = compile_ptx(emitted(graph, unroll=2).sources[0], "sm_90")
    assert re.search(r"ld\.global\.L1::no_allocate\.v4", ptx)
    assert re.search(r"ld\.global\.nc", ptx)  # the row and the column


def test_artifacts_of_before_launch_as_they_did() -> None:
    task = task_of(gelu, half(64, 512))
    config = task.default()
    graph = Graph.from_json(task.workload.spec)
    now = bind(task.build(config), graph, config)
    (kernel,) = now.kernels
    assert kernel.launch[OVERWRITES] == [[0, 0]]
    before = {k: v for k, v in kernel.launch.items() if k != OVERWRITES}
    elsewhere = {**kernel.launch, OVERWRITES: [[0, 1]]}
    for launch, right in ((kernel.launch, True), (before, True), (elsewhere, False)):
        artifact = replace(now, kernels=(replace(kernel, launch=launch),))
        assert (foreign(artifact, graph, config, 3) == "") == right


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.sin(), (x.shape[-1],)) + x.sum(0)


def test_the_last_kernel_of_a_default_plan_overwrites_its_input() -> None:
    task = task_of(norm, half(64, 4096))
    *others, last = task.build(task.default()).kernels
    assert others
    assert not any(OVERWRITES in kernel.launch for kernel in others)
    assert last.launch[OVERWRITES] == [[0, 0]]


def grouped(x: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution's bias, which a later operator reads too, and a norm of what it gives."""
    y = x + bias[:, None]
    return y, F.silu(F.group_norm(y, 4, weight, shift))


GROUPED = torch.randn(2, 8, 64).half(), *(torch.randn(8).half() for _ in range(3))


def scaled(x: Tensor) -> Tensor:
    return torch.softmax(x * x.sum(0), -1)


@pytest.mark.parametrize(
    ("fn", "args", "text", "pairs"),
    [
        (grouped, GROUPED, "r6,r10 / o0,o1", {0, 1}),  # both results, by one flat kernel
        (grouped, GROUPED, "o0,r6,r10 / o1", {1}),
        (scaled, (torch.randn(16, 256),), "r1 / r3,r6,o0", {0}),  # rows
    ],
)
def test_the_last_of_several_launches_overwrites_what_the_others_have_read(
    monkeypatch: pytest.MonkeyPatch,
    fn: Callable[..., Any],
    args: tuple[Tensor, ...],
    text: str,
    pairs: set[int],
) -> None:
    """A decoder's peak was 1.13 times torch.compile's, since the result of a convolution stayed beside both results of
    its region."""
    monkeypatch.setattr(rows, "LONG_ROW", 0)
    task = task_of(fn, *args)
    (x,) = (k for k, n in enumerate(make_inputs(task.graph, seed=1)) if n.numel() == args[0].numel())
    plan = task.plan_of({"plan": text})
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    *others, last = (kernel.launch.get(OVERWRITES) for kernel in task.build(config).kernels)
    assert others == [None]
    assert last == [[x, k] for k in sorted(pairs)]
    for k in pairs:
        run_plan(task, text, seed=3, over=[(x, k)])


def test_short_rows_are_not_overwritten_behind_another_kernel() -> None:
    task = task_of(scaled, torch.randn(16, 256))
    plan = task.plan_of({"plan": "r1 / r3,r6,o0"})
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    assert not any(OVERWRITES in kernel.launch for kernel in task.build(config).kernels)


def test_an_earlier_launch_overwrites_nothing() -> None:
    """Kernels behind it read its input, or fail and leave the work to the operators."""
    task, text = task_of(grouped, *GROUPED), "o0 / r6,r10 / o1"
    plan = task.plan_of({"plan": text})
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    first = plan.groups[0].graph
    assert scheme_of(first).name == "flat"
    assert overwritable(first)
    artifact = task.build(config)
    assert [OVERWRITES in kernel.launch for kernel in artifact.kernels] == [False, False, True]
    (x,) = (k for k, n in enumerate(make_inputs(task.graph, seed=1)) if n.numel() == GROUPED[0].numel())
    with pytest.raises(KernelError):
        run_plan(task, text, seed=3, over=[(x, 0)])
