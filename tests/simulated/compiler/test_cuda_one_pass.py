"""One-pass moments, rows loaded ahead and rows shared by a cluster: run in plain Python against the oracle."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch

from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.inputs import make_inputs
from tests.support.edited import edited
from tests.support.simulator.groups import check_group, check_inputs
from tests.support.zoo import (
    I64,
    Case,
    T,
    cross_entropy,
    group_norm,
    layer_norm,
    layer_norm_backward,
    relu_statistics,
    softmax_mask,
    workloads,
)
from tests.support.zoo import workloads_of as captured

SHAPES = [
    {"threads_per_row": 8, "rows_per_block": 8},
    {"threads_per_row": 64, "rows_per_block": 1},
    {"threads_per_row": 96, "rows_per_block": 1},  # three warps: sides of different size join
    {"threads_per_row": 32, "rows_per_block": 2, "keep": "reload", "unroll": 2},
    {"threads_per_row": 64, "rows_per_block": 1, "cluster": 2},
    {"threads_per_row": 32, "rows_per_block": 1, "cluster": 4},
    {"threads_per_row": 64, "rows_per_block": 1, "blocks_per_sm": 1, "prefetch": True},
    {"threads_per_row": 16, "rows_per_block": 4, "blocks_per_sm": 2, "prefetch": True},
]


CASES = (
    Case("ln", layer_norm, (T(11, 512), T(512), T(512))),
    Case("ln_odd", layer_norm, (T(7, 501), T(501), T(501))),
    Case("softmax_mask", softmax_mask, (T(2, 5, 256), T(1, 5, 256))),
    Case("cross_entropy", cross_entropy, (T(9, 500), T(9, d=I64))),
    Case("group_norm", group_norm, (T(2, 32, 8, 8), T(32), T(32))),
)
REFUSED = {
    ("ln_odd", "64-1-1-True"), ("ln_odd", "16-4-2-True"),  # no loads to issue ahead
    ("softmax_mask", "64-1-2"),  # a row that one block holds needs no cluster
    ("group_norm", "8-8"), ("group_norm", "96-1"),  # on a tile: a power of two from 32 threads on
    ("group_norm", "64-1-2"), ("group_norm", "32-1-4"),  # as many rows as blocks of a cluster
    ("group_norm", "64-1-1-True"), ("group_norm", "16-4-2-True"),  # copies ahead are kept in shared memory
}  # fmt: skip
"""Functions and shapes that the scheme refuses."""


def _named(shape: dict[str, object]) -> str:
    return "-".join(map(str, shape.values()))


def _taken() -> list[Any]:
    """A function and a shape that the scheme takes, for each case of a test."""
    return [
        pytest.param(case, shape, id=f"{_named(shape)}-{case}")
        for shape in SHAPES
        for case in CASES
        if (case.name, _named(shape)) not in REFUSED
    ]


@pytest.mark.parametrize(("case", "shape"), _taken())
@pytest.mark.parametrize("online", [False, True])
def test_rows(case: Case, shape: dict[str, object], online: bool) -> None:
    (work,) = captured(case)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = task.default() | {"keep": "registers", "unroll": 1, "online": online} | shape
    assert scheme.reject(group.graph, config) is None
    check_group(group.graph, scheme.emit(group.graph, config, 3), seed=1, special=online)


@cache
def _norm_with_statistics() -> FusionTask:
    """A layer norm of 21 x 96 that gives its rows' means and reciprocal deviations too."""

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_layer_norm(x, [96], w, b, 1e-5)

    (work, _), *_ = workloads_of(norm, (torch.randn(21, 96), torch.randn(96), torch.randn(96)))
    return FusionTask(work, "cuda:0", target="sm_90", sms=3)


def _takes(shape: dict[str, object], vector: int) -> bool:
    """False where 96 numbers need no cluster, or a pack of one number leaves no loads to issue ahead."""
    return "cluster" not in shape if vector == 16 else "prefetch" not in shape


@pytest.mark.parametrize(
    ("shape", "vector"),
    [pytest.param(s, v, id=f"{_named(s)}-{v}") for s in SHAPES for v in (4, 16) if _takes(s, v)],
)
def test_an_infinity_anywhere_in_a_row(shape: dict[str, object], vector: int) -> None:
    """Each row has one at a different index, first of its thread or not: its variance is NaN, not infinite."""
    task = _norm_with_statistics()
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = task.default() | {"keep": "registers", "unroll": 1, "online": True, "vector_bytes": vector} | shape
    assert scheme.reject(group.graph, config) is None
    inputs = make_inputs(group.graph, seed=1)
    rows = max(inputs, key=len).view(-1, 96)
    for row in range(len(rows)):
        rows[row, row * 11 % 96] = float("inf") if row % 2 else float("-inf")
    rows[3, :] = rows[4, 7:9] = float("inf")
    rows[5] = torch.linspace(-3, 2, 96)  # and one without
    check_inputs(group.graph, scheme.emit(group.graph, config, 3), inputs)


def test_one_pass_check_for_infinities_costs_one_instruction_a_row() -> None:
    """One instruction a row, which the compiler may not leave out; nothing where a pack has several elements."""
    (work,) = workloads("ln_f32")
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    (group,) = task.plan.groups

    def made(vector: int) -> CudaSource:
        config = task.default() | {"online": True, "vector_bytes": vector}
        return scheme_of(group.graph).emit(group.graph, config, 132).sources[0]

    def length(source: CudaSource) -> int:
        return len(re.findall(r"^\s+[a-z]\S*\s.*;$", compile_ptx(source, "sm_90")[0], re.MULTILINE))

    told = re.compile(r" \+ a\d+ \* float32\(0\.0\)$", re.MULTILINE)
    source = made(4)
    without = edited(source, lambda line: told.sub("", line))
    assert length(source) == length(without) + 1
    assert not told.search(made(16).text)


@pytest.mark.parametrize(
    ("prefetch", "keep", "online"),
    [(False, "registers", False), (True, "registers", True), (False, "reload", True), (True, "reload", False)],
)
@pytest.mark.parametrize(
    "case",
    [
        Case("layer_norm_backward", layer_norm_backward, (T(66, 128), T(66, 128), T(128))),
        Case("relu_statistics", relu_statistics, (T(96, 128),)),
    ],
    ids=str,
)
def test_columns(case: Case, prefetch: bool, keep: str, online: bool) -> None:
    task = FusionTask(captured(case)[0], "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    ran = 0
    for t, r in ((32, 2), (64, 1), (8, 8)):
        config = scheme.default(group.graph) | {
            "threads_per_row": t, "rows_per_block": r, "blocks_per_sm": 2, "prefetch": prefetch, "keep": keep,
            "online": online,
        }  # fmt: skip
        if scheme.reject(group.graph, config) is None:
            ran += 1
            check_group(group.graph, scheme.emit(group.graph, config, 3), seed=2, special=online)
    assert ran


def test_a_reduction_of_everything_has_many_blocks() -> None:
    """Cut into rows, whose sums are the partials of a finish."""
    (work, _), *_ = workloads_of(lambda x: (x * x).sum(), (torch.randn(64, 1024),))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    config = scheme.normalize(group.graph, scheme.default(group.graph) | {"blocks_per_sm": 1})
    made = scheme.emit(group.graph, config, 3)
    assert int(made.sources[0].launch["grid"]) == 3
    check_group(group.graph, made, seed=1, special=True)
