"""Nodes that wait: sums over the steps of a recurrence, casts that are free where they are used."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from autotune.compiler.lower.nodes import op_name
from autotune.compiler.regions.grouping import Flow, delays, merge_groups
from tests.support.capture_helpers import check, regions_of
from tests.unit.compiler.lower.test_translate import t


def recurrence(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    projected, h = x @ w, x[0]
    for step in range(4):
        a, b = (projected[step] + h @ u).chunk(2, 1)
        h = torch.sigmoid(a) * torch.tanh(b)
    return h


def test_contributions_of_steps_are_collected_at_once() -> None:
    x, w, u = t(4, 3, 8, grad=True), t(8, 16, grad=True), t(8, 16, grad=True)
    regions = regions_of(recurrence, x, w, u, grad=True)
    whole = [r for r in regions for n in r.outputs if tuple(n.meta["val"].shape) == (4, 3, 16)]
    assert len(whole) == 1  # the gradient of all projections is stored once, not after each step
    assert "select_scatter" in {op_name(n) for n in whole[0].nodes}
    for r in regions:
        check(r)


def test_a_cast_waits_for_its_reader_beyond_a_product() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        return (y.float() + 1) * (torch.relu(y) @ w).float()

    regions = regions_of(f, t(8, 8, dtype=torch.bfloat16), t(8, 8, dtype=torch.bfloat16))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [
        ["tanh", "relu"],
        ["convert_element_type", "add", "convert_element_type", "mul"],
    ]
    for r in regions:
        check(r)


def test_node_that_reads_more_than_it_writes_is_not_delayed() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(x)
        return y.sum(1, keepdim=True) * (y @ w)

    first, second = regions_of(f, t(8, 8), t(8, 8))
    assert [op_name(n) for n in first.nodes] == ["relu", "sum"]
    assert [op_name(n) for n in second.nodes] == ["mul"]


def test_results_and_operands_of_products_are_not_delayed() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        early = y * 2
        return early, early * (y @ w)

    regions = regions_of(f, t(8, 8), t(8, 8))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [["relu", "mul"], ["mul"]]


def test_waiting_never_makes_a_cycle() -> None:
    moved = 0
    for seed in range(200):
        rng = random.Random(seed)
        order = list(range(rng.randint(4, 30)))
        before = {i: sorted(rng.sample(range(i), min(i, rng.randint(0, 3)))) for i in order}
        members = {i for i in order if rng.random() < 0.7}
        read = {p for i in order if i not in members for p in before[i]}
        stored = {i: {p for p in before[i] if rng.random() < 0.5} for i in members if rng.random() < 0.3}
        movable = {i for i in members - read - stored.keys() if any(i in before[u] for u in order)}
        size = {i: rng.choice([1, 10, 100]) for i in order}
        flow = Flow(order, before, members, stored)
        level, late = flow.levels(), delays(flow, movable, size)
        moved += len(late)
        raised = flow.levels(late)
        for i in order:
            assert raised[i] == late.get(i, level[i])  # nothing else is put off
            assert all(raised[p] + (p in stored.get(i, ())) <= raised[i] for p in before[i])
        groups = merge_groups(flow, late)
        owner = {i: k for k, g in enumerate(groups) for i in g}
        needs: dict[object, set[object]] = {}
        for i in order:
            me = owner.get(i, ("alone", i))
            needs.setdefault(me, set()).update(x for p in before[i] if (x := owner.get(p, ("alone", p))) != me)
        done: set[object] = set()
        while ready := [me for me, them in needs.items() if me not in done and them <= done]:
            done.update(ready)
        assert len(done) == len(needs), seed
    assert moved > 20
