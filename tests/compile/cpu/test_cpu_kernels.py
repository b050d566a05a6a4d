"""Whole groups on the CPU target against the oracle: schedules, domains, shapes, types and non-finite numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from autotune.compiler.program.passes import build_program
from autotune.compiler.targets.cpu.kernel import load_group
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.ir.graph import Graph, compute_type
from autotune.ir.oracle import interpret
from tests.support.cpu_graphs import (
    Build,
    check,
    cross_entropy,
    gelu_layer_norm,
    layer_norm,
    logsumexp,
    random_inputs,
    run,
    softmax,
)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("cols", [1, 3, 17, 1001])
@pytest.mark.parametrize("make", [layer_norm, softmax, logsumexp, cross_entropy, gelu_layer_norm])
def test_row_lengths(make: Callable[..., Graph], cols: int) -> None:
    check(make(5, cols), CpuSchedule(row_block=2))


SCHEDULES = [CpuSchedule(row_block=r, column_tile=t, threads=n) for r, t, n in ((1, 0, 1), (4, 256, 2), (512, 512, 1))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_agree_with_the_oracle(schedule: CpuSchedule) -> None:
    check(softmax(9, 1000), schedule)
    check(gelu_layer_norm(9, 1000), schedule)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("make", [layer_norm, softmax, gelu_layer_norm])
def test_storage_types(make: Callable[..., Graph], storage: str) -> None:
    check(make(6, 96, storage), CpuSchedule())


@pytest.mark.parametrize("tile", [0, 4])
@pytest.mark.parametrize("make", [softmax, logsumexp])
def test_infinities_and_nan(make: Callable[..., Graph], tile: int) -> None:
    """Tiles of nothing but -inf before and after finite ones, whole rows of it, +inf, NaN, numbers far below zero."""
    rows = [
        [-INF] * 12,
        [-INF] * 4 + [-300.0, -301.0, -299.5, -300.25] + [-INF] * 4,
        [1.0] * 4 + [-INF] * 8,
        [1.0] * 5 + [INF] + [2.0] * 6,
        [INF] * 12,
        [INF] + [-INF] * 11,
        [NAN] + [0.0] * 11,
        [0.0] * 11 + [NAN],
        [3e38] * 12,
        [-3e38] * 11 + [0.0],
        [90.0] * 4 + [0.0] * 4 + [200.0] * 4,
        [200.0] * 4 + [0.0] * 4 + [-200.0] * 4,
    ]
    x = torch.tensor(rows)
    (got,) = run(make(*x.shape), [x.flatten()], CpuSchedule(column_tile=tile))
    scaled = (x * torch.tensor(0.7)).double() if make is softmax else x.double()
    want = torch.softmax(scaled, 1) if make is softmax else torch.logsumexp(scaled, 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_masked_softmax_with_broadcast_mask() -> None:
    g = softmax(8, 64, masked=True)
    inputs = random_inputs(g)
    inputs[1][::3] = -INF
    check(g, CpuSchedule(), inputs)


@pytest.mark.parametrize("cols", [70000, 131073])
@pytest.mark.parametrize("tile", [0, 8192])
def test_long_rows_keep_their_precision(cols: int, tile: int) -> None:
    """Numbers of one sign, so that a naive fp32 sum would drift."""
    b = Build(2, cols)
    b.out(b.reduce("sum", b.load("float32", 0, 1), 1), "float32")
    x = torch.rand(2 * cols, generator=torch.Generator().manual_seed(3)) + 0.5
    (got,) = run(b.graph(), [x], CpuSchedule(column_tile=tile))
    torch.testing.assert_close(got.double(), x.double().view(2, cols).sum(1), rtol=1e-6, atol=0)


def test_reductions_of_every_kind_and_type() -> None:
    for storage, op in itertools.product(["float32", "int32", "int64", "bool", "int8"], ["sum", "max", "min", "prod"]):
        if storage == "bool" and op in ("sum", "prod"):
            continue
        b = Build(4, 21)
        x = b.load(storage, 0, 1)
        b.out(b.reduce(op, x, 1), compute_type(storage))
        b.out(x, storage)
        check(b.graph(), CpuSchedule(column_tile=8), tolerance=1e-4)


def test_a_common_factor_stays_in_the_sum() -> None:
    """sum(x * s) with an infinite s is NaN where x has both signs, and s * sum(x) is not."""
    b = Build(3, 8)
    x, s = b.load("float32", 0, 1), b.load("float32")
    b.out(b.reduce("sum", b.mul(x, s), 1), "float32")
    x = torch.tensor([[1.0, -1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0], [2.0] * 8, [-1.0] * 8])
    (got,) = run(b.graph(), [x.flatten(), torch.tensor([INF])], CpuSchedule())
    torch.testing.assert_close(got, torch.tensor([NAN, INF, -INF]), equal_nan=True)


def test_max_and_min_propagate_nan() -> None:
    x = torch.randn(4, 50)
    x[0, 0], x[1, 49], x[2, 20], x[3, 7] = NAN, NAN, INF, -INF
    for op, want in (("max", x.amax(1)), ("min", x.amin(1))):
        b = Build(4, 50)
        b.out(b.reduce(op, b.load("float32", 0, 1), 1), "float32")
        (got,) = run(b.graph(), [x.flatten()], CpuSchedule())
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_several_row_and_column_axes() -> None:
    """Rows (0, 2), columns (1, 3), as a group norm has them; every load and store strided."""
    b = Build(3, 4, 5, 6)
    x = b.load("float32", 0, 1, 2, 3, strides=(200, 40, 7, 1))
    w = b.load("float32", 1, 2)
    y = b.add_(b.mul(x, w), b.load("float32", 0))
    m = b.reduce("max", y, 1, 3)
    e = b.exp(b.sub(y, m))
    b.out(b.div(e, b.reduce("sum", e, 1, 3)), "float32", strides=(1, 3, 12, 60))
    b.out(m, "float32", axes=(0, 2))
    for tile in (0, 4):
        check(b.graph(), CpuSchedule(row_block=3, column_tile=tile))


def test_column_reduction_over_the_outer_axis() -> None:
    b = Build(37, 50)
    x = b.load("float32", 0, 1)
    b.out(b.reduce("sum", b.mul(x, x), 0), "float32")
    b.out(b.reduce("max", x, 0), "float32")
    check(b.graph(), CpuSchedule(row_block=16, threads=2))


def test_column_reduction_with_results_used_over_columns() -> None:
    """Rows along the innermost axis and two passes: a batch norm."""
    b = Build(33, 70)
    x = b.load("float32", 0, 1)
    inv = b.const(1 / 33)
    d = b.sub(x, b.mul(b.reduce("sum", x, 0), inv))
    var = b.mul(b.reduce("sum", b.mul(d, d), 0), inv)
    b.out(b.mul(b.mul(d, b.rsqrt(b.add_(var, b.const(1e-5)))), b.load("float32", 1)), "float32")
    check(b.graph(), CpuSchedule(row_block=16))


def test_whole_tensor_reduction_and_scalars() -> None:
    b = Build(40, 30)
    b.out(b.reduce("sum", b.load("float32", 0, 1), 0, 1), "float32")
    check(b.graph(), CpuSchedule(), tolerance=1e-4)
    b = Build(1)
    b.out(b.add_(b.exp(b.load("float32")), b.const(2.0)), "float32")
    check(b.graph(), CpuSchedule())


def test_concatenation_by_guards_touches_no_memory_outside() -> None:
    """cat([x, y], 1): each load is guarded, and its address outside the guard would be far away."""
    b = Build(3, 30)
    x = b.load("float32", 0, 1, strides=(10, 1), guards=((1, 0, 10),))
    y = b.load("float32", 0, 1, strides=(20, 1 << 40), guards=((1, 10, 11),), offset=-(10 << 40))
    z = b.load("float32", 0, 1, strides=(0, 1), guards=((1, 11, 30), (0, 1, 3)), offset=-11)
    b.out(b.add_(b.add_(x, y), z), "float32")
    inputs = [torch.randn(30), torch.randn(50), torch.randn(19)]
    (got,) = run(b.graph(), inputs, CpuSchedule())
    want = torch.zeros(3, 30)
    want[:, :10] = inputs[0].view(3, 10)
    want[:, 10] = inputs[1][[0, 20, 40]]
    want[1:, 11:] = inputs[2]
    assert torch.equal(got, want)


def concatenated(rows: int, left: int, right: int) -> tuple[Build, int]:
    b = Build(rows, left + right)
    x = b.load("float32", 0, 1, strides=(left, 1), guards=((1, 0, left),))
    y = b.load("float32", 0, 1, strides=(right, 1), guards=((1, left, left + right),), offset=-left)
    return b, b.add_(x, y)


@pytest.mark.parametrize("tile", [0, 256])
@pytest.mark.parametrize(("left", "right"), [(64, 64), (300, 17), (1, 500)])
def test_concatenated_columns_are_walked_in_pieces(left: int, right: int, tile: int) -> None:
    """Pointwise, with a reduction over each row, and with one over all rows: no element is lost between pieces."""
    schedule = CpuSchedule(row_block=4, column_tile=tile, threads=2)
    b, z = concatenated(40, left, right)
    b.out(b.neg(z), "float32")
    check(b.graph(), schedule)
    b, z = concatenated(40, left, right)
    b.out(b.sub(z, b.reduce("max", z, 1)), "float32")
    check(b.graph(), schedule)
    b, z = concatenated(40, left, right)
    b.out(b.neg(z), "float32")
    b.out(b.reduce("sum", z, 0), "float32")
    graph, inputs = b.graph(), random_inputs(b.graph())
    made = [torch.empty(graph.output_numel(k)) for k in range(2)]
    parts = CpuSchedule(column_tile=tile, threads=2, parts=2)
    load_group(graph, parts)([t.data_ptr() for t in (*inputs, *made)], 40)
    for got, want in zip(made, interpret(graph, inputs), strict=True):
        torch.testing.assert_close(got.double(), want.flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cols", [15, 16, 31, 32, 63, 64, 96, 100, 128, 191, 192, 512])
def test_walks_of_every_length(cols: int) -> None:
    """Some are unrolled, some are loops with bounds unknown to LLVM."""
    for make in (softmax, layer_norm):
        check(make(9, cols), CpuSchedule(row_block=4))


def test_row_guards_and_index_values() -> None:
    b = Build(6, 9)
    x = b.load("float32", 0, strides=(1,), guards=((0, 2, 5),), offset=-2)
    i = b.add("index", axes=(1,), dtype="int64", scale=3, shift=-4)
    j = b.add("index", axes=(0,), dtype="int32", scale=2, shift=1)
    causal = b.le(i, b.point("cast", j, dtype="int64"))
    b.out(b.where(causal, b.add_(x, b.point("cast", i, dtype="float32")), b.const(-INF)), "float32")
    check(b.graph(), CpuSchedule())


def test_gathers_along_rows_and_columns() -> None:
    b = Build(7, 16)
    token = b.load("int64", 0)
    rowwise = b.add("gather", (token,), axes=(0, 1), slot=b.slot("float16"), strides=(0, 1), index_stride=16, bound=11)
    picks = b.load("int32", 0, 1)
    each = b.add("gather", (picks,), axes=(0, 1), slot=b.slot("float32"), strides=(13, 0), index_stride=1, bound=13)
    b.out(b.add_(rowwise, each), "float32")
    check(b.graph(), CpuSchedule())


def test_gather_indices_out_of_range_stay_inside_the_table() -> None:
    b = Build(6)
    idx = b.load("int64", 0)
    b.out(b.add("gather", (idx,), axes=(0,), slot=b.slot("float32"), strides=(0,), index_stride=1, bound=4), "float32")
    table = torch.arange(4.0)
    (got,) = run(b.graph(), [torch.tensor([-1, 4, 1 << 40, -(1 << 40), 2, 0]), table], CpuSchedule())
    assert got.tolist() == [0.0, 3.0, 3.0, 0.0, 2.0, 0.0]


def test_strided_transposed_and_broadcast_pointwise() -> None:
    b = Build(19, 23)
    x = b.load("float32", 0, 1, strides=(1, 19))
    y = b.load("bfloat16", 0, 1, strides=(46, 2))
    b.out(b.mul(b.add_(x, y), b.load("float32", 0)), "float32")
    b.out(b.load("float32", 1), "float16", axes=(0, 1))
    check(b.graph(), CpuSchedule(column_tile=8, row_block=2))


@pytest.mark.parametrize("tile", [0, 256, 4096])
@pytest.mark.parametrize("rows", [0, 1, 2, 300])
def test_pointwise_of_few_and_many_rows(rows: int, tile: int) -> None:
    b = Build(max(rows, 1), 10007) if rows else Build(100003)
    x = b.load("float32", *range(len(b.extents)))
    b.out(b.mul(x, b.sigmoid(x)), "float32")
    check(b.graph(), CpuSchedule(row_block=3, column_tile=tile, threads=2))


@pytest.mark.parametrize("make", [layer_norm, softmax, cross_entropy])
def test_other_numbers_of_rows_with_one_kernel(make: Callable[..., Graph]) -> None:
    """The kernel compiled for 16 rows serves 0 to 40; for fewer, nothing behind them is written."""
    full = make(40, 33)
    assert build_program(full).dynamic == 0
    inputs = random_inputs(full)
    want = run(full, inputs, CpuSchedule())
    for n0 in (0, 1, 7, 40):
        got = run(full, inputs, CpuSchedule(threads=2), n0=n0)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g[:n0], w[:n0])
            assert bool((g[n0:] == torch.tensor(77).to(g.dtype)).all())


def test_one_axis_of_any_length_with_one_kernel() -> None:
    b = Build(5000)
    b.out(b.exp(b.load("float32", 0)), "float32")
    x = torch.randn(5000)
    for n0 in (0, 1, 4097, 5000):
        (got,) = run(b.graph(), [x], CpuSchedule(threads=2), n0=n0)
        torch.testing.assert_close(got[:n0], x[:n0].exp())
        assert bool((got[n0:] == 77).all())


def test_empty_rows() -> None:
    """Sums over no columns are 0, products 1; nothing is read."""
    b = Build(4, 0)
    x = b.load("float32", 0, 1)
    b.out(b.reduce("sum", x, 1), "float32")
    b.out(b.reduce("prod", x, 1), "float32")
    got = run(b.graph(), [torch.empty(1)], CpuSchedule())
    assert got[0].tolist() == [0.0] * 4
    assert got[1].tolist() == [1.0] * 4


@pytest.mark.parametrize("threads", [1, 2])
def test_short_dense_rows_run_as_one_axis(threads: int) -> None:
    """Both layouts of one dense tensor; the open extent still counts rows."""
    for strides in ((5, 1), (1, 3000)):
        b = Build(3000, 5)
        x = b.load("float32", 0, 1, strides=strides)
        b.out(b.mul(x, b.sigmoid(b.load("float32", 0, 1, strides=strides))), "float32", strides=strides)
        check(b.graph(), CpuSchedule(threads=threads))
    b = Build(3000, 5)
    b.out(b.exp(b.load("float32", 0, 1)), "float32")
    x = torch.randn(15000)
    (got,) = run(b.graph(), [x], CpuSchedule(threads=threads), n0=1200)
    torch.testing.assert_close(got[:1200].flatten(), x[:6000].exp())
    assert bool((got[1200:] == 77).all())


def test_layouts_that_differ_stay_two_axes() -> None:
    b = Build(30, 5)
    b.out(b.add_(b.load("float32", 0, 1), b.load("float32", 0, 1, strides=(1, 30))), "float32")
    check(b.graph(), CpuSchedule())
