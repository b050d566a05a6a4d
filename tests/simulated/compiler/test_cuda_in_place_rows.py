"""Row-wise kernels whose output overwrites an input."""

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
from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import overwritable, overwritable_rows
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda import OVERWRITES
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.rows import kernel
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from tests.simulated.compiler.test_cuda_in_place import emitted, half, task_of
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_inputs, run_group

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these tests are short."""
    monkeypatch.setattr(kernel, "LONG_ROW", 0)


def group_of(fn: Function, *args: Tensor) -> Graph:
    (group,) = task_of(fn, *args).plan.groups
    assert scheme_of(group.graph).name == "rows"
    return group.graph


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, dy.dtype)


def residual(x: Tensor, held: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + held
    return h, F.rms_norm(h, (h.shape[-1],)) * weight


def gradient(logits: Tensor, peak: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Of a loss whose logits are capped, as Gemma 2 has it, with smooth labels: only the pass that writes reads the
    logits."""
    capped = torch.tanh(logits.float() / 30)
    picked = scale * torch.where(torch.arange(logits.shape[1]) == target, -0.9, -1e-4)
    gradient = picked - torch.exp(capped * 30 - peak) * picked.sum(-1, keepdim=True)
    return (gradient * (1 - capped * capped)).to(logits.dtype)


def loss(rows: int, words: int) -> tuple[Tensor, ...]:
    return half(rows, words), torch.randn(rows, 1), torch.randn(rows, 1), torch.randint(words, (rows, 1))


CASES: list[tuple[Function, tuple[Tensor, ...], set[tuple[int, int]]]] = [
    (softmax, (half(11, 256),), {(0, 0)}),
    (softmax_backward, (torch.randn(5, 96), torch.randn(5, 96)), {(0, 0), (1, 0)}),
    (residual, (half(7, 264), half(7, 264), half(264)), {(0, 0), (0, 1), (2, 0), (2, 1)}),
    (gradient, loss(3, 1000), {(0, 0)}),
]
CONFIGS = [
    {"threads_per_row": 32, "rows_per_block": 4, "keep": "registers"},
    {"threads_per_row": 32, "rows_per_block": 2, "keep": "reload", "unroll": 2, "vector_bytes": 4},
    {"threads_per_row": 64, "rows_per_block": 1, "keep": "registers", "blocks_per_sm": 1, "vector_bytes": 4},
    {"threads_per_row": 8, "rows_per_block": 4, "keep": "registers", "blocks_per_sm": 1, "prefetch": True},
    {"threads_per_row": 64, "rows_per_block": 1, "keep": "registers", "vector_bytes": 4},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c['threads_per_row']} {c['keep']}")
@pytest.mark.parametrize(("fn", "args", "pairs"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_over_an_input_as_apart_from_it(
    fn: Function, args: tuple[Tensor, ...], pairs: set[tuple[int, int]], config: dict[str, Any]
) -> None:
    graph = group_of(fn, *args)
    made, inputs = emitted(graph, **config), make_inputs(graph, seed=3)
    told = made.sources[0].launch[OVERWRITES]
    if fn is residual and config["keep"] == "reload":
        pairs = {(slot, k) for slot, k in pairs if k == 1}  # the norm's second pass adds both up again
    assert {(slot, pointer - len(graph.inputs)) for slot, pointer in told} == pairs
    apart = run_group(graph, made, inputs)
    for pair in pairs:
        over = run_group(graph, made, inputs, over=[pair])
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(apart, over, strict=True))
    if len(pairs) == 4:
        check_inputs(graph, made, inputs, over=[(0, 1), (2, 0)])


def spread(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each number of x is read for four of y, and the first result has no dimension for these."""
    z = y * x[:, :, None]
    total = z.sum((1, 2), keepdim=True)
    return x + total[:, :, 0], z - total


def test_an_input_that_several_threads_read_is_not_overwritten() -> None:
    graph = group_of(spread, torch.randn(6, 24), torch.randn(6, 24, 4))
    made, inputs = emitted(graph, threads_per_row=32, rows_per_block=1, vector_bytes=4), make_inputs(graph, seed=3)
    short = next(k for k, o in enumerate(graph.outputs) if len(o.axes) == 2)
    slot = next(v.slot for v in graph.values if v.op == "load" and len(v.axes) == 2)
    check_inputs(graph, made, inputs)
    with pytest.raises(KernelError):
        check_inputs(graph, made, inputs, over=[(slot, short)])
    assert made.sources[0].launch[OVERWRITES] == [[1 - slot, len(inputs) + 1 - short]]


def read_once_more(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * x.sum(-1, keepdim=True)
    return y, x + y.amax(-1, keepdim=True)


def read_for_another(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    return y + mean, ((x - mean).square() * y).sum(-1)


def normalized(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return torch.softmax(x, -1) * gate


@pytest.mark.parametrize(
    ("fn", "count", "kept", "reloaded"),
    [
        (read_once_more, 1, {(0, 0), (0, 1)}, {(0, 1)}),  # the pass after the product's reads x again
        # Slot 1 is x, output 1 the sum. x goes into it by its mean, and not where the pass that writes reads x again.
        (read_for_another, 2, {(0, 1), (1, 1)}, {(0, 1)}),
    ],
)
def test_in_place_rows_need_every_load_of_the_input(
    fn: Function, count: int, kept: set[tuple[int, int]], reloaded: set[tuple[int, int]]
) -> None:
    graph = Graph.from_json(task_of(fn, *(torch.randn(4, 64) for _ in range(count))).workload.spec)
    assert set(overwritable(graph)) >= kept
    assert set(overwritable_rows(build_program(graph, keep=True))) == kept
    assert set(overwritable_rows(build_program(graph, keep=False))) == reloaded


def test_a_load_without_a_use_prevents_overwriting() -> None:
    graph = group_of(normalized, torch.randn(4, 64))
    program = build_program(graph, keep=True)
    first, last = program.passes
    (load,) = [i for i in first.compute if graph.values[i].op == "load"]
    assert load not in last.kept_in
    assert overwritable_rows(program) == ((0, 0),)
    again = replace(program, passes=(first, replace(last, compute=(load, *last.compute))))
    assert overwritable_rows(again) == ()


def test_the_simulator_detects_an_overwritten_value_in_a_later_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "overwritable_rows", lambda program: overwritable(program.graph))
    graph = group_of(read_once_more, torch.randn(4, 64))
    with pytest.raises(KernelError):
        check_inputs(graph, emitted(graph, keep="reload"), make_inputs(graph, seed=3), over=[(0, 0)])


def test_overwritten_inputs_are_loaded_before_the_stores() -> None:
    graph = group_of(gradient, *loss(3, 8192))
    made = emitted(graph, keep="reload", unroll=4, threads_per_row=64, vector_bytes=16)
    ptx, _ = compile_ptx(made.sources[0], "sm_90")
    moved = "".join(re.findall(r"(ld|st)\.global(?:\.L1::no_allocate)?\.v4", ptx))
    assert moved == "ld" * 4 + "st" * 4
    assert not re.search(r"ld\.global\.nc\S*\.v4", ptx)


def test_artifacts_of_before_launch_as_they_did() -> None:
    task = task_of(softmax, half(64, 512))
    config, graph = task.default(), Graph.from_json(task.workload.spec)
    now = bind(task.build(config), graph, config)
    (made,) = now.kernels
    assert made.launch[OVERWRITES] == [[0, 0]]
    made.launch.pop(OVERWRITES)
    assert foreign(now, graph, config, 3) == ""


def test_sums_over_the_rows_overwrite_nothing() -> None:
    def backward(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy * x - (dy * x).mean(-1, keepdim=True), (dy * x).sum(0)

    task = task_of(backward, half(64, 512), half(64, 512))
    artifact = task.build(task.default())
    assert not any(OVERWRITES in k.launch for k in artifact.kernels)


def test_short_rows_keep_their_load_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for words, long in ((kernel.LONG_ROW // 2 - 8, False), (kernel.LONG_ROW // 2, True)):
        made = emitted(group_of(softmax, half(3, words)), keep="reload")
        assert (OVERWRITES in made.sources[0].launch) == long
        assert ("lr_bf16_8_c(" in made.sources[0].text) == long
