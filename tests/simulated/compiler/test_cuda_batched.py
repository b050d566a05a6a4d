"""Rows with separate sums for each batch on CUDA, as of window attention's bias and of scales for each image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.compiler.planner.beam import shapes
from autotune.compiler.planner.cost import Figures
from autotune.compiler.planner.plan import default_plan, make_plan
from autotune.compiler.schedules.cuda import legal, scheme_of
from autotune.compiler.schedules.cuda.columns import BATCHED, BatchedScheme
from autotune.compiler.targets.cpu.columns import column_split
from autotune.compiler.targets.cuda.compile import build
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from tests.support.simulator.groups import check_group, task_of
from tests.support.zoo import window_backward


def modulated_backward(x: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """[images, tokens, width]: of a norm with a scale and a shift for each image."""
    mean = x.mean(-1, keepdim=True)
    inverse = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    y = (x - mean) * inverse
    d = grad * (1 + scale[:, None])
    dx = inverse * (d - d.mean(-1, keepdim=True) - y * (d * y).mean(-1, keepdim=True))
    return dx, (grad * y).sum(1), grad.sum(1)


def extremes(x: Tensor) -> tuple[Tensor, ...]:
    """A variance, whose parts are running moments, extremes and a count."""
    y = x.float()
    return (y - y.sum(-1, keepdim=True)).half(), y.var(1, unbiased=False), y.amax(1), (y > 0).sum(1)


def inputs_of(fn: object, batches: int, rows: int, width: int) -> tuple[Tensor, ...]:
    if fn is window_backward:
        p = torch.randn(rows, batches, 3, width).softmax(-1)
        return p, torch.randn(rows, batches, 3, width).half()
    x = torch.randn(batches, rows, width)
    if fn is extremes:
        return (x.half(),)
    return x, torch.randn(batches, rows, width), torch.randn(batches, width)


def batched(fn: object, *args: Tensor) -> tuple[Graph, BatchedScheme]:
    (group,) = task_of(fn, *args).plan.groups
    scheme = scheme_of(group.graph)
    assert isinstance(scheme, BatchedScheme)
    return group.graph, scheme


@pytest.mark.parametrize("fn", [window_backward, modulated_backward, extremes])
@pytest.mark.parametrize(("batches", "width"), [(2, 49), (5, 40)])
@pytest.mark.parametrize(("threads", "rows"), [(32, 1), (8, 4), (16, 2)])
def test_partials_of_blocks_for_each_batch(fn: object, batches: int, width: int, threads: int, rows: int) -> None:
    graph, scheme = batched(fn, *inputs_of(fn, batches, 72, width))
    config = {"threads_per_row": threads, "rows_per_block": rows, "blocks_per_sm": 8}
    for more in ({}, {"prefetch": True}, {"keep": "reload"}):
        own = scheme.normalize(graph, scheme.default(graph) | config | more)
        assert scheme.reject(graph, own) is None
        made = scheme.emit(graph, own, 3)
        assert not made.sources[0].launch["dynamic"]
        separate = batches * 3 if fn is window_backward else batches
        sets = 72 // int(own["rows_per_block"])
        assert int(made.sources[0].launch["grid"]) == separate * max(1, min(24 // separate, sets))
        check_group(graph, made, seed=batches, special=rows == 1)


def test_seeds_and_the_default_are_right() -> None:
    graph, scheme = batched(window_backward, *inputs_of(window_backward, 2, 64, 49))
    configs = [scheme.default(graph), *scheme.seeds(graph)]
    assert sum(scheme.reject(graph, config) is None for config in configs) > 4
    for config in configs:
        if scheme.reject(graph, config) is None:
            check_group(graph, scheme.emit(graph, config, 3))


def test_default_kernels_of_window_attention_do_not_spill() -> None:
    graph, scheme = batched(window_backward, *inputs_of(window_backward, 4, 256, 49))
    for source in scheme.emit(graph, scheme.default(graph), 132).sources:
        assert build(source).resources["stack"] == 0


def test_few_rows_of_a_batch_are_walked_twice() -> None:
    task = task_of(modulated_backward, *inputs_of(modulated_backward, 2, 60, 40))
    assert len(task.plan.groups) > 1
    for group in task.plan.groups:
        with pytest.raises(Unsupported):
            BATCHED.check(group.graph)


def test_rows_too_wide_to_be_kept_are_read_again() -> None:
    """Registers hold the accumulators of such rows, and not their values as well."""
    graph, scheme = batched(modulated_backward, *inputs_of(modulated_backward, 2, 64, 16384))
    default = scheme.default(graph)
    assert default["keep"] == "reload"
    assert scheme.reject(graph, default) is None
    assert scheme.reject(graph, scheme.normalize(graph, default | {"keep": "registers"})) is not None


@pytest.mark.parametrize("width", [32768, 65536])
def test_rows_too_wide_for_accumulators_keep_the_greedy_plan(width: int) -> None:
    """No default of the scheme has enough registers: a region would have no kernel that a search begins with."""
    task = task_of(modulated_backward, *inputs_of(modulated_backward, 2, 64, width))
    assert task.plan == make_plan(task.graph, "cuda")
    assert task.reject(task.normalize(task.default())) is None
    assert not legal(task.graph, "cuda")


def test_a_sum_of_everything_is_apart() -> None:
    def fn(x: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        found = modulated_backward(x, grad, scale)
        return (*found, found[0].sum())

    task = task_of(fn, *inputs_of(modulated_backward, 2, 72, 40))
    assert len(task.plan.groups) > 1


def test_stored_configurations_without_a_plan_keep_their_groups() -> None:
    """The greedy plan of a region stays what it was, and a search's configurations name the new one."""
    task = task_of(window_backward, *inputs_of(window_backward, 2, 72, 49))
    greedy = make_plan(task.graph, "cuda")
    assert [scheme_of(g.graph).name for g in greedy.groups] == ["rows", "columns"] or len(greedy.groups) > 1
    assert task.plan_of({}) == greedy
    config = task.normalize(task.default())
    assert config["plan"] == task.plan.text != greedy.text
    assert task.plan_of(config) == task.plan == default_plan(task.graph)
    assert all(task.normalize(seed)["plan"] == task.plan.text for seed in task.seeds())
    assert legal(task.graph, "cuda")
    assert not legal(task.graph, "cuda", default=True)
    assert column_split(task.graph) is None, "a CPU has no such kernel"


def test_a_group_of_a_larger_plan_is_a_part_with_such_rows() -> None:
    """The part's own configuration names its plan; the region's names the region's."""

    def fn(table: Tensor, index: Tensor, scores: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        bias = table[index].permute(2, 0, 1)
        return window_backward((scores + bias).sigmoid(), grad)

    p, grad = inputs_of(window_backward, 4, 1024, 49)
    index = torch.randint(0, 60, (3, 49))
    task = task_of(fn, torch.randn(60, 4), index, p, grad)
    found = [make_plan(task.graph, "cuda", s) for s in shapes(task.graph, "cuda", "measured", Figures(), 6)]
    assert [scheme_of(g.graph).name for g in found[0].groups] == ["flat", "batched"], "the bias is gathered first"
    (first, *_) = task.compositions(6)
    parts = [FusionTask(w, "cuda:0", target="sm_90", sms=3) for w in first.parts]
    assert [len(part.plan.groups) for part in parts] == [1, 1]
    ((config, _), *_) = first.combine([[(part.normalize(part.default()), 1.0)] for part in parts])
    assert config["plan"] == found[0].text
    assert task.reject(config) is None
    assert all(k.resources["stack"] == 0 for k in task.build(config).kernels)
