"""Reductions over interleaved rows on CUDA, as of group norm in channels last: partials of blocks for each image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.planner.beam import shapes
from autotune.compiler.planner.cost import Costs, Figures
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.columns import piece_bytes
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.schedules.cuda.columns import INTERLEAVED, InterleavedScheme
from autotune.compiler.targets.cpu.columns import column_split
from autotune.compiler.targets.cuda.compile import build
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from tests.support.simulator.groups import check_group, task_of

GROUPS = 4
SIDES = {1: 34, 2: 24, 3: 20, 7: 14}
"""Height and width by number of images, so that sums are worth two kernels. 34 and 14 leave odd numbers of pairs."""


def images(number: int, channels: int, side: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    side = side or SIDES[number]
    return torch.randn(number, channels, side, side, dtype=dtype).to(memory_format=torch.channels_last)


def grouped(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, GROUPS, c // GROUPS, h, w)


def moments(x: Tensor) -> tuple[Tensor, ...]:
    """A mean and a variance, which blocks combine as running moments."""
    y = grouped(x.relu()).float()
    return y.mean((2, 3, 4)), y.var((2, 3, 4), unbiased=False)


def several(x: Tensor) -> tuple[Tensor, ...]:
    """A sum, extremes and a count, and a result of full size that no reduction goes into."""
    y = grouped(x * 2)
    return x * 2, y.sum((2, 3, 4)), y.amax((2, 3, 4)), y.amin((2, 3, 4)), (y > 0).sum((2, 3, 4))


def backward(x: Tensor, g: Tensor, w: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """The sums of group norm's backward pass; the numbers of a group keep channels from being one axis."""
    h = grouped(g * w.view(1, -1, 1, 1))
    score = (grouped(x) - mean[..., None, None, None]) * scale[..., None, None, None]
    return h.sum((2, 3, 4)), (h * score).sum((2, 3, 4))


def inputs_of(fn: object, number: int, channels: int) -> tuple[Tensor, ...]:
    x = images(number, channels)
    if fn is not backward:
        return (x,)
    return x, images(number, channels), torch.randn(channels), torch.randn(number, GROUPS), torch.rand(number, GROUPS)


def interleaved(fn: object, *args: Tensor) -> tuple[Graph, InterleavedScheme]:
    (group,) = task_of(fn, *args).plan.groups
    scheme = scheme_of(group.graph)
    assert isinstance(scheme, InterleavedScheme)
    return group.graph, scheme


@pytest.mark.parametrize("fn", [moments, several, backward])
@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize(("threads", "rows"), [(32, 1), (8, 4), (16, 2)])
def test_partials_of_blocks_for_each_image(fn: object, number: int, threads: int, rows: int) -> None:
    graph, scheme = interleaved(fn, *inputs_of(fn, number, 20))
    config = {"threads_per_row": threads, "rows_per_block": rows, "blocks_per_sm": 4, "unroll": 1}
    for more in ({}, {"prefetch": True}):
        own = scheme.normalize(graph, scheme.default(graph) | config | more)
        assert scheme.reject(graph, own) is None
        made = scheme.emit(graph, own, 3)
        blocks = int(made.sources[0].launch["grid"]) // int(made.sources[0].launch["tiles"])
        assert blocks == number * max(1, 12 // int(made.sources[0].launch["tiles"]) // number)
        assert not made.sources[0].launch["dynamic"]
        check_group(graph, made, seed=number, special=rows == 1)


def test_a_thread_takes_channels_of_several_groups() -> None:
    """Groups of 10 channels of 2 bytes have no vectors of 16 bytes, all channels have."""
    graph, scheme = interleaved(moments, images(2, 40, dtype=torch.float16))
    config = scheme.default(graph)
    assert config["vector_bytes"] == 16
    check_group(graph, scheme.emit(graph, config, 3))
    for source in scheme.emit(graph, config, 132).sources:
        assert build(source).resources["stack"] == 0


def test_seeds_and_the_default_are_right() -> None:
    graph, scheme = interleaved(moments, images(2, 20))
    for config in scheme.seeds(graph):
        if scheme.reject(graph, config) is None:
            check_group(graph, scheme.emit(graph, config, 3))


def test_sets_of_rows_do_not_reach_into_the_next_image() -> None:
    graph, scheme = interleaved(moments, images(2, 20, side=23))
    config = scheme.default(graph) | {"threads_per_row": 8, "rows_per_block": 4}
    assert "two batches" in (scheme.reject(graph, config) or "")
    assert scheme.normalize(graph, config)["rows_per_block"] == 1
    with pytest.raises(Unsupported, match="another number of batches"):
        scheme.with_blocks(graph, scheme.default(graph) | {"rows_per_block": 1, "threads_per_row": 32}, 5)


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (images(2, 20).contiguous(), "no reduction over all rows"),
        (images(2, 68), "rows of whole sectors"),
        (images(2, 32), "rows of whole sectors"),
        (images(2, 20, side=5), "few rows in a batch"),
    ],
)
def test_other_rows_keep_their_scheme(x: Tensor, why: str) -> None:
    (group,) = task_of(moments, x).plan.groups
    assert scheme_of(group.graph).name in ("rows", "tile")
    with pytest.raises(Unsupported, match=why):
        INTERLEAVED.check(group.graph)


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, GROUPS, w, b))


def test_a_plan_normalises_after_the_statistics() -> None:
    """The region's own rows stay the default plan, since its kernel may be stored."""
    task = task_of(norm, images(8, 40, 64, torch.float16), torch.randn(40).half(), torch.randn(40).half())
    assert [scheme_of(g.graph).name for g in task.plan.groups] == ["rows"]
    found = [make_plan(task.graph, "cuda", s) for s in shapes(task.graph, "cuda", "measured", Figures(), 6)]
    assert [[scheme_of(g.graph).name for g in plan.groups] for plan in found] == [["interleaved", "flat"], ["rows"]]
    labels = [[part.label for part in c.parts] for c in task.compositions(6)]
    assert ["part sum f32 8x4x4096x10", "part rsqrt+exp f16 8x4096x4x10"] in labels
    for group in found[0].groups:
        scheme = scheme_of(group.graph)
        assert scheme.reject(group.graph, scheme.default(group.graph)) is None


def test_a_kernel_moves_whole_sectors() -> None:
    task = task_of(moments, images(2, 40, dtype=torch.float16))
    (one, *_) = (i for i in task.graph.live if task.graph.values[i].op == "sum")
    assert piece_bytes(task.graph, one) == 20
    assert Costs(task.graph, Figures()).sectors[one] == 2.4
    assert Costs(task.graph, Figures.of("cpu", {})).sectors[one] == 1.0
    assert column_split(task.graph) is None, "a CPU has no such kernel"
