"""The outer scheme: its kernels compute what the oracle does (in plain Python), compile, and are made to be fast."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.schedules.cuda.outer import OUTER
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.compiler.targets.cuda.device import CLUSTER_WAIT
from autotune.compiler.targets.cuda.source import CudaSource, GroupKernels
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group
from tests.support.zoo import BF16, BOOL, F16, I64, T, drawn


def layer_norm_0(x: Tensor, w: Tensor) -> Tensor:
    d = x - x.mean(0, keepdim=True)
    return d * torch.rsqrt(d.pow(2).mean(0, keepdim=True) + 1e-5) * w


def joined_moments(square: Tensor, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of 600 rows from parts of ``count`` rows each: two dependent reductions over the parts."""
    centre = (count[:, None] * mean).sum(0) / 600.0
    return centre, (square + count[:, None] * (mean - centre) ** 2).sum(0) / 600.0


def several_types(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    return x.sum(0), x.amax(0), (m & (x > 0)).any(0), (x * 2).amin(0)


def windows(x: Tensor) -> Tensor:
    """Two windows side by side: guarded loads."""
    return torch.cat((x[:, :8], x[:, 12:20] * 2), 1).sum(0)


def looked_up(table: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(table[ids], 0)


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    inputs: tuple[Callable[[], Tensor], ...]

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("sum", lambda x: x.sum(0), (T(37, 40),)),
    Case("max_then_sum", lambda x: (x - x.amax(0)).abs().sum(0), (T(45, 24),)),
    Case("softmax", lambda x: torch.softmax(x, 0), (T(53, 40),)),
    Case("logsumexp", lambda x: torch.logsumexp(x, 0), (T(70, 8),)),
    Case("batched", lambda x: torch.log_softmax(x, 1), (T(3, 20, 16),)),
    Case("two_axes", lambda x: (x - x.amax((1, 2), keepdim=True)).exp(), (T(2, 3, 5, 16, d=F16),)),
    Case("layer_norm_0", layer_norm_0, (T(50, 24), T(24))),
    Case("layer_norm_0_bf16", layer_norm_0, (T(50, 24, d=BF16), T(24, d=BF16))),
    Case("joined_moments", joined_moments, (T(44, 40), T(44, 40), T(44))),
    Case("several_types", several_types, (T(33, 16, d=I64), T(33, 16, d=BOOL))),
    Case("windows", windows, (T(21, 24),)),
    Case("looked_up", looked_up, (T(30, 16), T(19, d=I64))),
    Case("odd", lambda x: torch.softmax(x, 0), (T(19, 13, d=BF16),)),
)
BY_NAME = {c.name: c for c in CASES}


def graphs_of(fn: Callable[..., Any], inputs: tuple[Callable[[], Tensor], ...]) -> list[Graph]:
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from autotune.compiler.regions.find import find_regions

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        regions = find_regions(make_fx(fn, select_decomp_table())(*[make() for make in inputs]))
    return [Graph.from_json(r.workload.spec) for r in regions if r.workload is not None]


@functools.cache
def graph(name: str) -> Graph:
    (only,) = graphs_of(BY_NAME[name].fn, BY_NAME[name].inputs)
    OUTER.check(only)
    return only


def source(g: Graph, **changes: Any) -> CudaSource:
    (only,) = OUTER.emit(g, {**OUTER.default(g), **changes}, 132).sources
    return only


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_agree_with_the_oracle(case: Case) -> None:
    g = graph(case.name)
    configs = [OUTER.default(g), *OUTER.seeds(g)[:3], *drawn(OUTER, g, 3, len(case.name))]
    for n, config in enumerate(configs):
        check_group(g, OUTER.emit(g, config, 3), seed=n, special=bool(n % 2))


SHAPES = [
    {"threads_per_row": 64, "rows_per_block": 1},  # no joining at all
    {"threads_per_row": 32, "rows_per_block": 3},  # parts that are not a power of two
    {"threads_per_row": 4, "rows_per_block": 24},  # the same, several places a warp
    {"threads_per_row": 1, "rows_per_block": 64},  # a warp of 32 places: more of them than parts
    {"threads_per_row": 2, "rows_per_block": 16, "cluster": 2},
    {"threads_per_row": 8, "rows_per_block": 4, "cluster": 4},
    {"threads_per_row": 8, "rows_per_block": 4, "blocks_per_sm": 1},
    {"threads_per_row": 2, "rows_per_block": 32, "blocks_per_sm": 1},
]


@pytest.mark.parametrize("keep", ["registers", "reload"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(str(v) for v in s.values()))
def test_every_way_of_joining(shape: dict[str, int], keep: str) -> None:
    for name in ("softmax", "joined_moments", "sum") if keep == "registers" else ("softmax", "joined_moments"):
        g = graph(name)
        base = {**OUTER.default(g), "vector_bytes": 8, "keep": keep, "unroll": 2, "cluster": 1}
        for online in (False, True) if name == "softmax" else (False,):
            made = OUTER.emit(g, {**base, **shape, "online": online}, 2)
            check_group(g, made, seed=3, special=True, sms=2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("softmax", {"threads_per_row": 2, "rows_per_block": 64, "vector_bytes": 16, "online": True}),
        ("softmax", {"threads_per_row": 4, "rows_per_block": 16, "vector_bytes": 16, "online": True, "cluster": 2}),
        ("softmax", {"threads_per_row": 4, "rows_per_block": 16, "vector_bytes": 32, "cluster": 2}),
        ("logsumexp", {"threads_per_row": 2, "rows_per_block": 64, "vector_bytes": 8, "online": True}),
        ("joined_moments", {"threads_per_row": 4, "rows_per_block": 16, "vector_bytes": 8, "cluster": 2}),
        ("several_types", {"threads_per_row": 4, "rows_per_block": 16, "vector_bytes": 2, "cluster": 2}),
        ("batched", {"threads_per_row": 4, "rows_per_block": 16, "vector_bytes": 16, "online": True}),
    ],
)
def test_threads_share_the_joins_out(name: str, changes: dict[str, Any]) -> None:
    """Each joins one column, and gets its own columns from the others: of every type, in blocks and in clusters."""
    g = graph(name)
    for keep in ("registers", "reload"):
        made = OUTER.emit(g, {**OUTER.default(g), "cluster": 1, "unroll": 2, "keep": keep, **changes}, 2)
        assert "cuda.shfl_sync" in made.sources[0].text
        check_group(g, made, seed=5, special=True, sms=2)


@pytest.mark.parametrize(("threads", "places", "cluster"), [(4, 64, 4), (2, 64, 8), (1, 128, 4)])
def test_large_clusters_share_the_joins_out(threads: int, places: int, cluster: int) -> None:
    (g,) = graphs_of(lambda x: torch.softmax(x, 0), (T(places * cluster + 77, 16),))
    config = OUTER.default(g) | {"threads_per_row": threads, "rows_per_block": places, "cluster": cluster}
    config |= {"vector_bytes": 16, "keep": "registers", "unroll": 1}
    for online in (False, True):
        check_group(g, OUTER.emit(g, config | {"online": online}, 2), seed=7, special=True)


def test_a_cluster_waits_until_all_its_blocks_have_begun() -> None:
    g = graph("softmax")
    good = source(g, cluster=2, threads_per_row=8, rows_per_block=8)
    check_group(g, GroupKernels.single(good, g))
    hasty = list(good.body)
    hasty.remove(CLUSTER_WAIT)
    broken = replace(good, body=tuple(hasty))
    with pytest.raises(KernelError, match="may not have begun"):
        check_group(g, GroupKernels.single(broken, g))


@pytest.mark.parametrize(
    ("name", "fn", "inputs"),
    [
        ("rows", lambda x: torch.softmax(x, -1), (T(64, 64),)),
        ("transposed", lambda x: torch.softmax(x, 0), (T(64, 64, strides=(1, 64)),)),
        ("everything", lambda x: x.sum((0, 1)), (T(64, 64),)),
        ("narrow", lambda x: torch.softmax(x, 0), (T(64, 4),)),
        ("pointwise", lambda x: x + 1, (T(64, 64),)),
        ("images", lambda x: x - x.mean((0, 2), keepdim=True), (T(4, 8, 64),)),
        ("shared", lambda x, y: (x - x.amax(1, keepdim=True)) + y.amax(0), (T(3, 9, 16), T(9, 16))),
    ],
)
def test_groups_that_other_schemes_run_faster_are_left_to_them(name: str, fn: Any, inputs: Any) -> None:
    for g in graphs_of(fn, inputs):
        with pytest.raises(Unsupported):
            OUTER.check(g)


def test_softmax_over_an_outer_axis_is_a_group_of_this_scheme() -> None:
    assert scheme_of(graph("softmax")) is OUTER


BIG = {
    "finish": (lambda x: x.sum(0), (T(528, 768),)),
    "softmax": (lambda x: torch.softmax(x, 0), (T(4096, 2048),)),
    "layer_norm_0": (layer_norm_0, (T(4096, 1024, d=BF16), T(1024, d=BF16))),
}


@functools.cache
def big(name: str) -> Graph:
    (only,) = graphs_of(*BIG[name])
    return only


@pytest.mark.parametrize("name", BIG)
def test_defaults_neither_spill_nor_leave_most_of_the_device_idle(name: str) -> None:
    g = big(name)
    kernel = build(source(g), "sm_90")
    assert kernel.resources["stack"] == 0
    blocks = -(-int(kernel.launch["inner"]) // int(kernel.launch["per_block"]))
    assert blocks * int(kernel.launch.get("cluster", 1)) * kernel.launch["block"] >= 64 * 256


def test_a_strip_that_is_kept_is_read_once() -> None:
    g = big("softmax")
    reads = {}
    for keep in ("registers", "reload"):
        shape = {"threads_per_row": 8, "rows_per_block": 64, "vector_bytes": 16, "cluster": 8}
        text = compile_ptx(source(g, keep=keep, unroll=8, online=False, **shape), "sm_90")[0]
        reads[keep] = len(re.findall(r"ld\.global\S*\.v4\.u32", text))
    assert reads == {"registers": 8, "reload": 24}


def test_a_cluster_is_in_the_kernels_text() -> None:
    text = compile_ptx(source(big("softmax"), cluster=4, keep="reload"), "sm_90")[0]
    assert ".reqnctapercluster 4" in text
    assert "st.shared::cluster" in text
    assert text.count("barrier.cluster.arrive.relaxed") == 1  # at the beginning, waited for before the first exchange
    assert text.count("barrier.cluster.arrive.release") == 2  # one for each reduction


def test_the_last_step_of_a_finish_does_not_wait_for_a_branch() -> None:
    """528 parts on 128 threads are four steps and an incomplete fifth, whose load is among the others."""
    text = compile_ptx(source(big("finish"), threads_per_row=8, rows_per_block=128, vector_bytes=4), "sm_90")[0]
    lines = [line.strip() for line in text.splitlines()]
    loads = [n for n, line in enumerate(lines) if "ld.global" in line]
    assert len(loads) == 5
    assert not any(line.startswith(("bra", "@")) for line in lines[loads[0] : loads[-1]])
