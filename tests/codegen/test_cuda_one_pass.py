"""One-pass moments, rows loaded ahead and rows shared by a cluster: run in plain Python against the oracle."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import check_group
from zoo import workloads

from autotune.fusion.schemes import scheme_of
from autotune.fusion.target import workloads_of
from autotune.fusion.task import FusionTask

SHAPES = [
    {"threads_per_row": 8, "rows_per_block": 8},
    {"threads_per_row": 64, "rows_per_block": 1},
    {"threads_per_row": 96, "rows_per_block": 1},  # three warps: sides of different size join
    {"threads_per_row": 32, "rows_per_block": 2, "keep": "reload", "unroll": 2},
    {"threads_per_row": 32, "rows_per_block": 2, "keep": "shared", "unroll": 1},
    {"threads_per_row": 64, "rows_per_block": 1, "cluster": 2},
    {"threads_per_row": 32, "rows_per_block": 1, "cluster": 4},
    {"threads_per_row": 64, "rows_per_block": 1, "blocks_per_sm": 1, "prefetch": True},
    {"threads_per_row": 16, "rows_per_block": 4, "blocks_per_sm": 2, "prefetch": True},
]


@pytest.mark.parametrize("name", ["ln_f32", "ln_1001", "softmax_mask", "cross_entropy_f32", "group_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("online", [False, True])
def test_rows(name: str, shape: dict[str, object], online: bool) -> None:
    (work,) = workloads(name)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = task.default() | {"keep": "registers", "unroll": 1, "online": online} | shape
    if scheme.reject(group.graph, config):
        pytest.skip("not for this group")
    check_group(group.graph, scheme.emit(group.graph, config, 3), seed=1, special=online)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("keep", ["registers", "reload"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["layer_norm_backward", "relu_statistics"])
def test_columns(name: str, prefetch: bool, keep: str, online: bool) -> None:
    task = FusionTask(workloads(name)[0], "cuda:0", target="sm_90", sms=3)
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


@pytest.mark.parametrize("finish", ["kernel", "barrier"])
def test_a_reduction_of_everything_has_many_blocks(finish: str) -> None:
    """Cut into rows, whose sums are the partials of a finish."""
    (work, _), *_ = workloads_of(lambda x: (x * x).sum(), (torch.randn(64, 1024),))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    config = scheme.normalize(group.graph, scheme.default(group.graph) | {"finish": finish, "blocks_per_sm": 1})
    made = scheme.emit(group.graph, config, 3)
    assert int(made.sources[0].launch["grid"]) == 3
    check_group(group.graph, made, seed=1, special=True)
