"""The configuration of a region for another one that differs in constants alone, whose groups have other numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.planner.groups import group_configs
from autotune.domains.fusion.domain import DOMAIN
from autotune.domains.fusion.task import FusionTask
from autotune.ir.canonical import canonicalize, without_constants
from autotune.ir.canonical import to_workload as workload_of
from autotune.ir.simplify import simplify
from autotune.workload import Workload
from tests.support.capture_helpers import graph_of, only_region
from tests.support.many_parts import beside
from tests.unit.compiler.lower.test_translate import t


def parts(p: float, q: float) -> Workload:
    """Two parts of different sizes, whose order depends on their constants."""
    large = graph_of(only_region(lambda x: torch.nn.functional.gelu(x * p), t(2048, 1024)))
    small = graph_of(only_region(lambda x: torch.nn.functional.gelu(x * q), t(64, 77)))
    return workload_of(canonicalize(simplify(beside(large, small)))[0])


def several(p: float, q: float) -> Workload:
    """One part of several groups."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * p).sum(0), (x * q + y).sum(1), torch.softmax(x.t() * p, -1)

    return workload_of(canonicalize(graph_of(only_region(fn, t(1024, 1024), t(1024, 1024))))[0])


PAIRS = [(0.96, 0.41), (0.94, 0.13), (0.92, 0.77), (0.71, 0.59), (0.53, 0.29), (0.87, 0.68)]


def by_group(task: FusionTask, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of each group, by the group's graph without its constants."""
    plan = task.plan_of(config)
    own = zip(plan.groups, group_configs(plan, config), strict=True)
    return {without_constants(group.graph): part for group, part in own}


@pytest.mark.parametrize("make", [parts, several])
def test_each_group_takes_the_configuration_of_its_own_kind(make: Callable[[float, float], Workload]) -> None:
    tasks = [FusionTask(make(p, q), "cuda:0", target="sm_90", sms=132) for p, q in PAIRS]
    assert len({DOMAIN.alike(task.workload) for task in tasks}) == 1
    orders = [[without_constants(g.graph) for g in task.plan.groups] for task in tasks]
    assert len(orders[0]) > 1
    assert len({*map(tuple, orders)}) > 1, "the groups of some have another order"
    taken = 0
    for leader, follower in itertools.permutations(tasks, 2):
        for seed in [leader.default(), *leader.seeds()[:3]]:
            config = leader.adapt(seed)  # as a search measures it
            if config is None or leader.reject(config) is not None:
                continue
            if (found := follower.take(config, leader.workload)) is not None:
                taken += 1
                assert by_group(follower, found) == by_group(leader, config)
    assert taken >= 30, "a greedy plan may have other groups in another order of values, and is searched then"


def test_a_named_plan_of_another_order_is_not_taken() -> None:
    """The text of a plan has numbers of values, which differ between graphs."""
    tasks = [FusionTask(several(p, q), "cuda:0", target="sm_90", sms=132) for p, q in PAIRS]
    leader, taken = tasks[0], 0
    composed = [c for c in leader.compositions(6) if len(c.parts) > 1]
    named = [config for c in composed for config, _ in c.combine([[(part_default(p), 1.0)] for p in c.parts])]
    assert any("plan" in config for config in named)
    for config, follower in itertools.product([c for c in named if "plan" in c], tasks[1:]):
        if (found := follower.take(config, leader.workload)) is not None:
            taken += 1
            assert by_group(follower, found) == by_group(leader, config)
    assert taken < len(named) * (len(tasks) - 1)


def scaled(p: float, q: float) -> Workload:
    """Sums over a row and over the rows of an image, which one kernel of a named plan computes."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        d = x * p + y * q
        return d - d.sum(-1, keepdim=True) * q, (d * x).sum(1)

    return workload_of(canonicalize(graph_of(only_region(fn, t(4, 72, 40), t(4, 72, 40))))[0])


def test_a_default_plan_that_is_named_is_taken_under_the_own_text() -> None:
    tasks = [FusionTask(scaled(p, q), "cuda:0", target="sm_90", sms=132) for p, q in PAIRS]
    assert len({DOMAIN.alike(task.workload) for task in tasks}) == 1
    configs = [task.normalize(task.default()) for task in tasks]
    assert len({config["plan"] for config in configs}) > 1, "values of some have other numbers"
    for (leader, config), (follower, own) in itertools.permutations(zip(tasks, configs, strict=True), 2):
        found = follower.take(config, leader.workload)
        assert found == own
        assert follower.reject(found) is None


def part_default(part: Workload) -> dict[str, Any]:
    task = FusionTask(part, "cuda:0", target="sm_90", sms=132)
    return dict(task.normalize(task.default()))
