"""The tile scheme: reductions over two sets of axes inside small tiles, in one read."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.vectors import ACROSS, across_lanes, unit_axis
from autotune.compiler.schedules.cuda.outer import TILE
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.space import load_space
from tests.simulated.compiler.test_cuda_outer import Case, graphs_of
from tests.support.simulator.groups import check_group
from tests.support.zoo import BF16, BOOL, I32, T, drawn


def scaled_both_ways(x: Tensor, block: int) -> tuple[Tensor, ...]:
    """Each block of ``block`` neighbours scaled by its largest element, along rows and along columns."""
    rows, cols = x.shape
    v = x.view(rows // block, block, cols // block, block).float()
    across, down = v.abs().amax(3, keepdim=True) / 448, v.abs().amax(1, keepdim=True) / 448
    return (v / across).bfloat16().view(x.shape), (v / down).bfloat16().view(x.shape), across, down


def scaled_8(x: Tensor) -> tuple[Tensor, ...]:
    return scaled_both_ways(x, 8)


def scaled_32(x: Tensor) -> tuple[Tensor, ...]:
    return scaled_both_ways(x, 32)


def centred(x: Tensor) -> tuple[Tensor, ...]:
    """A mean over both directions, used in both."""
    v = x.view(4, 6, 2, 16)
    d = v - v.mean((1, 3), keepdim=True)
    return d, v.amax(3), v.sum(1), d.abs().amax(3)


def norm_then_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised over dim 0, then softmax over dim 1: one tile."""
    h = (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-3)
    return torch.softmax(h, -1), x.amax((0, 1))


def softmax_of_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums along rows, then softmax over all of them: one tile, whose rows are axis 0."""
    return torch.softmax(x.sum(1) / 128, 0), x + 1.75


def integers(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    v, b = x.view(3, 5, 4, 8), m.view(3, 5, 4, 8)
    return v.amax(3), v + v.amax(1, keepdim=True), (b & (v > 0)).any(3), b.all(1), v.sum((1, 3))


CASES = (
    Case("scaled", scaled_8, (T(24, 40, d=BF16),)),
    Case("centred", centred, (T(24, 32),)),
    Case("norm_then_softmax", norm_then_softmax, (T(21, 16),)),
    Case("softmax_of_sums", softmax_of_sums, (T(31, 32),)),
    Case("integers", integers, (T(15, 32, d=I32), T(15, 32, d=BOOL))),
)
BY_NAME = {c.name: c for c in CASES}


@functools.cache
def graph(name: str) -> Graph:
    (only,) = graphs_of(BY_NAME[name].fn, BY_NAME[name].inputs)
    TILE.check(only)
    return only


@functools.cache
def large() -> Graph:
    (only,) = graphs_of(scaled_32, (T(8192, 8192, d=BF16),))
    return only


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_agree_with_the_oracle(case: Case) -> None:
    g = graph(case.name)
    assert TILE.space_of(g, load_space("fusion", "cuda")).contains(TILE.default(g))
    for n, config in enumerate([TILE.default(g), *TILE.seeds(g)[:4], *drawn(TILE, g, 4, 8)]):
        check_group(g, TILE.emit(g, config, 3), seed=n, special=bool(n % 2))


def test_lowering_takes_reductions_apart() -> None:
    g = graph("centred")
    x = unit_axis(g)
    made = across_lanes(g, x)
    assert unit_axis(made) == x
    assert all(x not in v.over for v in made.values if v.op in REDUCTIONS)
    assert {v.over for v in made.values if v.op.startswith(ACROSS)} == {(x,)}
    both = [v for v in g.values if v.op in REDUCTIONS and x in v.over and len(v.over) > 1]
    assert len(made.values) == len(g.values) + len(both)


def test_both_directions_are_one_kernel_that_reads_once() -> None:
    g = large()
    plan = make_plan(g)
    assert len(plan.groups) == 1
    TILE.check(plan.groups[0].graph)
    (source,) = TILE.emit(g, TILE.default(g), 132).sources
    text = compile_ptx(source, "sm_90")[0]
    per_thread = 8192 * 8192 // 8 // (int(source.launch["inner"]) * (g.extents[0]) // 32 * source.block)
    assert len(re.findall(r"ld\.global\S*\.v4\.u32", text)) == per_thread
    assert build(source).resources["stack"] == 0


@pytest.mark.parametrize(
    ("name", "fn", "inputs"),
    [
        ("rows only", lambda x: torch.softmax(x, -1), (T(64, 64),)),
        ("outer only", lambda x: torch.softmax(x, 0), (T(64, 64),)),
        ("not a power of two", lambda x: x - x.amax(0) - x.amax(1, keepdim=True), (T(64, 24),)),
        ("one large tile", lambda x: x - x.amax(0) - x.amax(1, keepdim=True), (T(8192, 64),)),
        ("wider than a warp", lambda x: x - x.amax(0) - x.amax(1, keepdim=True), (T(16, 512),)),
        ("two sets of outer axes", lambda x: x - x.amax(0) - x.amax(1, True) - x.amax(2, True), (T(4, 4, 16),)),
    ],
)
def test_a_group_that_is_no_tile_is_refused(name: str, fn: Any, inputs: Any) -> None:
    for g in graphs_of(fn, inputs):
        with pytest.raises(Unsupported):
            TILE.check(g)


def test_a_tile_needs_all_its_threads() -> None:
    g = graph("scaled")
    config = TILE.default(g) | {"vector_bytes": 2, "threads_per_row": 4, "rows_per_block": 16}
    assert TILE.reject(g, config) == "fewer than 8 threads_per_row on a tile"
    assert TILE.normalize(g, config)["threads_per_row"] == 8
