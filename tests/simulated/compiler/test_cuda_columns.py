"""Sums over all rows on CUDA: two sums of a row joined at once, partials of blocks, and their finish."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.compiler.program.program import stride_of
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.schedules.cuda.columns import _main
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from tests.support.simulator.groups import check_group, task_of

PLAIN = {"keep": "registers", "unroll": 1, "online": False, "blocks_per_sm": 0, "vector_bytes": 4}


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
    assert ("upper" in made.sources[0].text) == (threads > 32)
    check_group(group.graph, made, seed=threads, special=rows == 1)


def counted(x: Tensor) -> Tensor:
    """Two sums of floats and one of integers, whose arrays in shared memory have other lengths."""
    return x - x.amax(-1, keepdim=True) - x.sum(-1, keepdim=True) * (x > 0).sum(-1, keepdim=True)


def counted_columns(x: Tensor) -> tuple[Tensor, ...]:
    """The same with a maximum over the rows."""
    y = counted(x)
    return y, y.amax(0)


@pytest.mark.parametrize(("fn", "name"), [(counted, "rows"), (counted_columns, "columns")])
@pytest.mark.parametrize(("threads", "rows"), [(64, 2), (96, 1), (256, 4)])
def test_row_after_row_with_sums_of_several_types(fn: object, name: str, threads: int, rows: int) -> None:
    """Rows alternate between two halves of each array, and all types have the same distance between them."""
    (group,) = task_of(fn, torch.randn(200, 33)).plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == name
    shape = {"threads_per_row": threads, "rows_per_block": rows, "blocks_per_sm": 1}
    config = scheme.normalize(group.graph, scheme.default(group.graph) | shape)
    assert scheme.reject(group.graph, config) is None
    check_group(group.graph, scheme.emit(group.graph, config, 3), seed=threads)


def layer_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Two sums a row, two over all rows."""
    h = g * w
    dx = h - h.mean(-1, keepdim=True) - x * (h * x).mean(-1, keepdim=True)
    return dx, (g * x).sum(0), g.sum(0)


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    """Mean and variance over the rows, which blocks combine as running moments, with a softmax."""
    y = torch.relu(x)
    return y.mean(0), y.var(0, unbiased=False), torch.softmax(y, -1)


def extremes(x: Tensor) -> tuple[Tensor, ...]:
    """A maximum, a count and a pointwise result: tiles of the columns, integers and floats."""
    return x * 2, x.amax(0), (x > 0).sum(0)


@pytest.mark.parametrize("fn", [layer_norm_backward, statistics, extremes])
@pytest.mark.parametrize(("threads", "rows"), [(64, 1), (16, 4), (32, 2)])
def test_partials_of_blocks(fn: object, threads: int, rows: int) -> None:
    shapes = {layer_norm_backward: [(70, 96), (70, 96), (96,)], statistics: [(70, 96)], extremes: [(70, 200)]}
    task = task_of(fn, *(torch.randn(s) for s in shapes[fn]))  # type: ignore[index]
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    config = {"threads_per_row": threads, "rows_per_block": rows, "blocks_per_sm": 12, "unroll": 1}
    config = scheme.normalize(group.graph, scheme.default(group.graph) | config)
    assert scheme.reject(group.graph, config) is None
    made = scheme.emit(group.graph, config, 3)
    main = made.sources[0]
    blocks = int(main.launch["grid"]) // int(main.launch["tiles"])
    assert blocks > 1
    width = group.graph.size([a for a in range(2) if group.graph.extents[a] in (96, 200)])
    assert max(elements for _, elements in made.private) == blocks * width  # a row of partials a block
    check_group(group.graph, made, seed=threads, special=rows == 1)


def of_columns(x: Tensor) -> tuple[Tensor, ...]:
    """A mean and a variance, a sum and a maximum of each column."""
    return x.mean(0), x.var(0, unbiased=False), (x * x).sum(0), x.amax(0)


@pytest.mark.parametrize(("threads", "rows"), [(4, 16), (2, 64), (1, 64), (1, 256), (32, 3), (16, 6), (8, 20)])
def test_row_groups_are_merged_in_halves(threads: int, rows: int) -> None:
    """Narrow rows have many row groups in a block; an odd one waits for the next step."""
    task = task_of(of_columns, torch.randn(1500, 16))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = {"threads_per_row": threads, "rows_per_block": rows, "blocks_per_sm": 1, "max_registers": 0}
    made = scheme.emit(group.graph, scheme.default(group.graph) | config, 2)
    check_group(group.graph, made, seed=rows, special=threads == 4)


def test_columns_are_in_the_order_of_the_tensors() -> None:
    """A group of sums alone has no output in its main graph, and its canonical graph may have any order of axes."""
    x, g = (torch.randn(2, 2048, 32, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    task = task_of(lambda x, g: ((x.float() * g).sum(-1).t().contiguous(), g.sum(-1).t().contiguous()), x, g)
    (group,) = task.plan.groups
    scheme, program = scheme_of(group.graph), _main(group.graph)
    assert scheme.name == "columns"
    loads = [v for v in program.graph.values if v.op == "load" and len(v.axes) == 3]
    assert len(loads) == 2
    assert all(stride_of(v, program.cols[-1]) == 1 for v in loads)
    default = scheme.default(group.graph)
    assert (default["vector_bytes"], default["threads_per_row"], default["prefetch"]) == (16, 8, True)
    assert (default["blocks_per_sm"], default["max_registers"]) == (3, 80)  # more blocks may not fit at once
    check_group(group.graph, scheme.emit(group.graph, default, 3), seed=1)


def test_clusters_that_join_partials_are_refused() -> None:
    """Configurations stored by 0.2 may have them."""
    task = task_of(layer_norm_backward, torch.randn(64, 96), torch.randn(64, 96), torch.randn(96))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = scheme.default(group.graph) | {"cluster": 2}
    assert "clusters that join sums over the rows, which this autotune lacks" in (
        scheme.reject(group.graph, config) or ""
    )
    assert scheme.normalize(group.graph, config)["cluster"] == 1  # where a search begins with it


@pytest.mark.parametrize("rows", [1, 2])
def test_sums_of_everything(rows: int) -> None:
    """One number a block, not one a column."""
    task = task_of(lambda x: ((x * x).sum(), x.mean()), torch.randn(64, 1024))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = {"blocks_per_sm": 4, "threads_per_row": 64, "rows_per_block": rows}
    config = scheme.normalize(group.graph, scheme.default(group.graph) | config)
    made = scheme.emit(group.graph, config, 3)
    assert {elements for _, elements in made.private} == {12}
    check_group(group.graph, made, seed=rows, special=True)


def test_reductions_share_their_shuffles() -> None:
    task = task_of(layer_norm_backward, torch.randn(256, 1024), torch.randn(256, 1024), torch.randn(1024))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = scheme.default(group.graph) | {"threads_per_row": 256, "rows_per_block": 1}
    made = scheme.emit(group.graph, config, 132)
    ptx, _ = compile_ptx(made.sources[0], "sm_90")
    # Five levels in a warp and three of eight warps, and one to share both sums; separately they would be 16.
    assert ptx.count("shfl.sync") == 9
    for source in made.sources:
        kernel = build(source)
        assert kernel.resources["stack"] == 0
        assert kernel.resources["blocks_per_sm"] >= 4


def saved_statistics(g: Tensor, x: Tensor, mean: Tensor, late: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Numbers of a row that the first pass needs, and one that only the second does; one of all rows."""
    h = (x - mean) * g
    return (h - h.sum(-1, keepdim=True) * late) * scale, h.sum(0)


@pytest.mark.parametrize(("threads", "rows"), [(64, 1), (32, 2), (8, 8)], ids=lambda n: str(n))
def test_the_numbers_of_a_row_are_loaded_ahead_with_it(threads: int, rows: int) -> None:
    args = (torch.randn(70, 96), torch.randn(70, 96), torch.randn(70, 1), torch.randint(0, 9, (70, 1)), torch.ones(()))
    task = task_of(saved_statistics, *args)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = {"prefetch": True, "threads_per_row": threads, "rows_per_block": rows, "blocks_per_sm": 2}
    made = scheme.emit(group.graph, scheme.default(group.graph) | config, 3)
    body = made.sources[0].text.partition("for group in")[2].splitlines()
    ahead = [line.split()[0] for line in body if " = ld_" in line and line.split()[0].endswith("n")]
    assert len(ahead) == 2
    assert sum(" = ld_" in line for line in body) == 3  # the number of all rows does not wait for a row
    check_group(group.graph, made, seed=rows, special=rows == 1)
