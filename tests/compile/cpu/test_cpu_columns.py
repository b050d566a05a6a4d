"""CPU kernels in parts: reductions over all rows with row-wise and pointwise work, against the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.compiler.program.rewrites import cut_everything
from autotune.compiler.schedules import cpu as target_cpu
from autotune.compiler.schedules.cuda import legal
from autotune.compiler.targets.cpu.columns import column_split, parts_for, parts_of
from autotune.compiler.targets.cpu.kernel import emit_columns, load_group
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.device import usable_processors
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from autotune.space import load_space
from tests.support.cpu_graphs import MARGIN, POISON, TORCH, Build, random_inputs, softmax

PARTS = CpuSchedule(parts=4, threads=2)


def run(graph: Graph, inputs: list[Tensor], schedule: CpuSchedule, parts: int = 0) -> list[Tensor]:
    """Outputs of the group's kernels over poisoned memory; nothing behind an output may be written."""
    kernel = load_group(graph, schedule, parts)
    buffers = [
        torch.full((graph.output_numel(k) + MARGIN,), POISON, dtype=TORCH[o.dtype]) for k, o in enumerate(graph.outputs)
    ]
    kernel([t.data_ptr() for t in (*inputs, *buffers)], graph.extents[0])
    for b in buffers:
        assert bool((b[-MARGIN:] == torch.tensor(POISON).to(b.dtype)).all()), "wrote behind an output"
    return [
        b.as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
        for b, o in zip(buffers, graph.outputs, strict=True)
    ]


def check(graph: Graph, schedule: CpuSchedule = PARTS, inputs: list[Tensor] | None = None) -> list[Tensor]:
    assert column_split(graph) is not None
    inputs = random_inputs(graph) if inputs is None else inputs
    got = run(graph, inputs, schedule)
    length = max(graph.size(v.over) for v in graph.values if v.over)
    for k, (g, want) in enumerate(zip(got, interpret(graph, inputs), strict=True)):
        verdict = compare(g, want, graph.outputs[k].dtype, length)
        assert verdict.ok, (k, verdict.detail)
    return got


def layer_norm_backward(rows: int, cols: int, storage: str = "float32") -> Graph:
    b = Build(rows, cols)
    dy, x, w = b.load(storage, 0, 1), b.load(storage, 0, 1), b.load(storage, 1)
    mean, rstd = b.load("float32", 0), b.load("float32", 0)
    n = b.mul(b.sub(x, mean), rstd)
    g = b.mul(dy, w)
    inv = b.const(1 / cols)
    s, t = b.mul(b.reduce("sum", g, 1), inv), b.mul(b.reduce("sum", b.mul(g, n), 1), inv)
    b.out(b.mul(b.sub(b.sub(g, s), b.mul(n, t)), rstd), storage)
    b.out(b.reduce("sum", b.mul(dy, n), 0), storage)
    b.out(b.reduce("sum", dy, 0), storage)
    return b.graph()


def statistics_and_softmax(rows: int, cols: int) -> Graph:
    """relu, mean and variance of each column, softmax of each row."""
    b = Build(rows, cols)
    h = b.maximum(b.load("float32", 0, 1), b.const(0.0))
    inv = b.const(1 / rows)
    mean = b.mul(b.reduce("sum", h, 0), inv)
    d = b.sub(h, mean)
    b.out(mean, "float32")
    b.out(b.mul(b.reduce("sum", b.mul(d, d), 0), inv), "float32")
    e = b.exp(b.sub(h, b.reduce("max", h, 1)))
    b.out(b.div(e, b.reduce("sum", e, 1)), "float32")
    return b.graph()


def pointwise_and_bias(rows: int, cols: int, storage: str = "float32") -> Graph:
    b = Build(rows, cols)
    y = b.mul(b.load(storage, 0, 1), b.tanh(b.load(storage, 0, 1)))
    b.out(y, storage)
    b.out(b.reduce("sum", y, 0), "float32")
    return b.graph()


@pytest.mark.parametrize("schedule", [PARTS, CpuSchedule(parts=1), CpuSchedule(parts=8, threads=2)])
@pytest.mark.parametrize(("rows", "cols"), [(64, 96), (131, 33), (16, 2), (3000, 20)])
def test_layer_norm_backward(rows: int, cols: int, schedule: CpuSchedule) -> None:
    check(layer_norm_backward(rows, cols), schedule)


def test_half_precision_is_rounded_once_at_the_end() -> None:
    for storage in ("bfloat16", "float16"):
        check(layer_norm_backward(200, 48, storage))
        check(pointwise_and_bias(200, 48, storage))


@pytest.mark.parametrize(("rows", "cols"), [(40, 64), (5000, 24), (17, 7)])
def test_variances_over_rows_need_one_pass(rows: int, cols: int) -> None:
    check(statistics_and_softmax(rows, cols), CpuSchedule(parts=2, threads=2))


def test_a_variance_far_from_zero_keeps_its_digits() -> None:
    """Sums of squares less the square of the sum would lose all of them."""
    graph = statistics_and_softmax(4000, 16)
    (x,) = random_inputs(graph)
    check(graph, inputs=[x + 1000])


@pytest.mark.parametrize("tile", [0, 256])
def test_pointwise_work_is_tiled_over_wide_rows(tile: int) -> None:
    check(pointwise_and_bias(40, 9001), CpuSchedule(parts=2, threads=2, column_tile=tile))
    check(pointwise_and_bias(2500, 300), CpuSchedule(parts=2, threads=2, column_tile=tile))


def test_reductions_of_every_kind() -> None:
    b = Build(100, 30)
    x, i = b.load("float32", 0, 1), b.load("int32", 0, 1)
    y = b.mul(x, b.const(2.0))
    b.out(y, "float32")
    for op in ("sum", "max", "min", "prod"):
        b.out(b.reduce(op, x, 0), "float32")
        b.out(b.reduce(op, i, 0), "int32")
    b.out(b.reduce("max", b.gt(x, b.const(2.2)), 0), "bool")
    inputs = random_inputs(b.graph())
    check(b.graph(), CpuSchedule(parts=2, threads=2, column_tile=8), [inputs[0].clamp(0.5, 1.5), inputs[1]])


@pytest.mark.parametrize("wide", [30, 5000])
def test_reductions_of_everything(wide: int) -> None:
    """A loss: rows first, then all of them."""
    b = Build(100, wide)
    x = b.load("float32", 0, 1)
    row = b.reduce("max", x, 1)
    b.out(row, "float32")
    b.out(b.mul(b.reduce("sum", row, 0), b.const(0.01)), "float32")
    check(b.graph())


@pytest.mark.parametrize("extents", [(1 << 16,), (300, 1000), (5, 40, 700), (3 * 65537,)])
@pytest.mark.parametrize("stored", [False, True])
def test_one_number_made_of_everything(extents: tuple[int, ...], stored: bool) -> None:
    """A norm and a maximum: cut into rows, whatever the shape, where there is a way to."""
    b = Build(*extents)
    axes = tuple(range(len(extents)))
    x, y = b.load("float32", *axes), b.load("bfloat16", *axes)
    z = b.mul(x, y)
    b.out(b.sqrt(b.reduce("sum", b.mul(z, z), *axes)), "float32")
    b.out(b.reduce("max", x, *axes), "float32")
    if stored:
        b.out(z, "bfloat16")
    graph = b.graph()
    whole = cut_everything(graph)
    if extents in ((5, 40, 700), (3 * 65537,)):
        assert whole is None
        return
    assert whole is not None
    whole.check()
    inputs = random_inputs(graph)
    for got, want in zip(interpret(whole, inputs)[:2], interpret(graph, inputs)[:2], strict=True):
        torch.testing.assert_close(got, want)
    assert target_cpu.default(graph)["parts"] or usable_processors() == 1
    check(graph)


def test_column_split_refuses_indices_and_guards_of_rows() -> None:
    b = Build(1 << 16)
    i = b.point("cast", b.add("index", axes=(0,), dtype="int64"), dtype="float32")
    b.out(b.reduce("sum", b.mul(b.load("float32", 0), i), 0), "float32")
    assert cut_everything(b.graph()) is None
    b = Build(1 << 16)
    b.out(b.reduce("sum", b.load("float32", 0, guards=((0, 5, 100),)), 0), "float32")
    assert cut_everything(b.graph()) is None


def test_special_numbers_reach_their_own_column_only() -> None:
    graph = pointwise_and_bias(64, 32)
    x, y = random_inputs(graph)
    x.view(64, 32)[3, 5], x.view(64, 32)[60, 9] = float("nan"), float("inf")
    _, total = check(graph, inputs=[x, y])
    assert sorted(total.isfinite().logical_not().nonzero().flatten().tolist()) == [5, 9]


def test_several_row_and_column_axes() -> None:
    b = Build(6, 5, 4, 8)
    x, w = b.load("float32", 0, 1, 2, 3), b.load("float32", 2, 3)
    y = b.mul(x, w)
    b.out(b.sub(y, b.reduce("max", y, 2, 3)), "float32")
    b.out(b.reduce("sum", y, 0, 1), "float32")
    check(b.graph())


def test_second_kernel_computes_values_of_column_sums() -> None:
    b = Build(128, 40)
    x, w = b.load("float32", 0, 1), b.load("float32", 1)
    b.out(b.exp(x), "float32")
    b.out(b.add_(b.sqrt(b.abs(b.reduce("sum", x, 0))), w), "float16")
    check(b.graph())


def test_results_do_not_depend_on_how_many_threads_run() -> None:
    graph = layer_norm_backward(500, 64)
    inputs = random_inputs(graph)
    schedule = CpuSchedule(parts=4, threads=2)
    first = run(graph, inputs, schedule)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(graph, inputs, schedule), strict=True))


def test_calls_from_several_threads_do_not_share_partial_results() -> None:
    from concurrent.futures import ThreadPoolExecutor

    graph = layer_norm_backward(300, 64)
    kernel = load_group(graph, CpuSchedule(parts=2))
    cases = []
    for seed in range(4):
        inputs = random_inputs(graph, seed)
        cases.append((inputs, run(graph, inputs, CpuSchedule(parts=2))))

    def call(case: tuple[list[Tensor], list[Tensor]]) -> bool:
        inputs, want = case
        made = [torch.empty(graph.output_numel(k), dtype=TORCH[o.dtype]) for k, o in enumerate(graph.outputs)]
        for _ in range(20):
            kernel([t.data_ptr() for t in (*inputs, *made)], graph.extents[0])
        return all(torch.equal(m, w.flatten()) for m, w in zip(made, want, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, cases))


def test_parts_are_neither_too_long_nor_too_small() -> None:
    for rows, most in ((16, 2), (64, 4), (1 << 16, 64)):
        split = column_split(pointwise_and_bias(rows, 64))
        assert split is not None
        parts = parts_of(split, CpuSchedule(parts=8, threads=2))
        assert 1 <= parts <= most
        assert rows <= 2048 * parts


def test_which_groups_have_which_form() -> None:
    both, parts, plain = pointwise_and_bias(100, 64), layer_norm_backward(100, 64), softmax(100, 64)
    assert [target_cpu.forms(g) for g in (both, parts, plain)] == [(True, True), (False, True), (True, False)]
    assert all(legal(g, "cpu") for g in (both, parts, plain))
    assert not legal(layer_norm_backward(8, 64), "cpu")  # a handful of rows: two kernels
    with pytest.raises(Unsupported):
        load_group(parts, CpuSchedule(parts=0))


@pytest.mark.parametrize("make", [pointwise_and_bias, layer_norm_backward, statistics_and_softmax])
def test_defaults_seeds_and_space_agree(make) -> None:
    graph = make(2000, 256)
    space = target_cpu.space_of(graph, load_space("fusion", "cpu"))
    for config in (target_cpu.default(graph), *target_cpu.seeds(graph)):
        assert space.contains(config), config
        assert target_cpu.normalize(graph, config) == config
        assert target_cpu.reject(graph, config) is None
        CpuSchedule.from_config(config)
    if make is layer_norm_backward:
        assert 0 not in space["parts"].choices
        assert target_cpu.reject(graph, target_cpu.default(graph) | {"parts": 0})


@pytest.mark.parametrize("rows", [16, 17, 1003, 70 * 16])
def test_the_parts_of_other_rows_run_the_same_code(rows: int) -> None:
    """Some parts may have no rows."""
    tuned, here = layer_norm_backward(700, 33), layer_norm_backward(rows, 33)
    parts = parts_for(tuned, CpuSchedule(parts=8, threads=8))
    assert parts == 43
    one, two = column_split(tuned), column_split(here)
    assert one is not None
    assert two is not None
    assert emit_columns(one, PARTS, parts) == emit_columns(two, PARTS, parts)
    inputs = random_inputs(here)
    got = run(here, inputs, PARTS, parts)
    for k, (g, want) in enumerate(zip(got, interpret(here, inputs), strict=True)):
        verdict = compare(g, want, here.outputs[k].dtype, rows)
        assert verdict.ok, (k, verdict.detail)
