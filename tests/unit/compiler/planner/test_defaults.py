"""Defaults of a scheme can be compiled, also for rows that a block cannot keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autotune.compiler.planner.beam import shapes
from autotune.compiler.planner.cost import Figures
from autotune.compiler.planner.plan import default_plan, make_plan
from autotune.compiler.schedules.cuda import scheme_of
from autotune.ir.graph import Graph
from autotune.space import load_space
from tests.support.zoo import Case, T, workloads_of


def by_rows_and_columns(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * (x * w).sum(-1, keepdim=True)
    return y, (y * x).sum((0, 1))


def twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A norm's backward pass: two sums along the rows, and two over them."""
    y = x * (x * w).sum(-1, keepdim=True)
    z = y - y.mean(-1, keepdim=True)
    return z, (z * x).sum(0), z.sum(0)


def gates(gradient: Tensor, *loads: Tensor) -> tuple[Tensor, ...]:
    """A recurrent cell's backward pass: many tensors for the gradient of each gate, and that of the gates' biases."""
    y = gradient
    for x in loads:
        y = y * torch.sigmoid(x) + x
    return y, y.sum(0)


def heads(x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    """A state-space layer's backward pass: sums over all but the heads, of rows with many operators."""
    y = x
    for _ in range(16):
        y = y * torch.sigmoid(gate) + x
    return (y * x).sum((0, 1, 3)), y


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (by_rows_and_columns, (T(8, 16, 65536), T(65536))),
        (by_rows_and_columns, (T(16, 128, 50257), T(50257))),
        (by_rows_and_columns, (T(8, 64, 30000), T(30000))),
        (twice, (T(512, 4096), T(4096))),
        (twice, (T(512, 16384), T(16384))),
        (twice, (T(512, 18432, d=torch.bfloat16), T(18432, d=torch.bfloat16))),
        (twice, (T(512, 20480, d=torch.bfloat16), T(20480, d=torch.bfloat16))),
        (twice, (T(64, 131072, d=torch.bfloat16), T(131072, d=torch.bfloat16))),
        (by_rows_and_columns, (T(8, 16, 41984), T(41984))),
        (gates, (T(512, 1024),) * 24),
        (heads, (T(2, 1024, 32, 64), T(2, 1024, 32, 64))),
    ],
)
def test_defaults_are_not_rejected(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    (work,) = workloads_of(Case("rows", fn, inputs))
    graph = Graph.from_json(work.spec)
    for shape in ((), *shapes(graph, "cuda", "measured", Figures(), 6)):
        for group in make_plan(graph, "cuda", shape).groups:
            scheme = scheme_of(group.graph)
            assert scheme.reject(group.graph, scheme.default(group.graph)) is None, scheme.name


def encoded(x: Tensor, *others: Tensor) -> list[Tensor]:
    return [f(2.0**k * x) for k in range(1 + len(others)) for f in (torch.sin, torch.cos)]


@pytest.mark.parametrize(("count", "vector_bytes", "unroll"), [(1, 16, 2), (10, 8, 1), (24, 8, 1)])
def test_many_operators_have_a_default_with_few_elements(count: int, vector_bytes: int, unroll: int) -> None:
    """Two numbers a thread: twenty sines of eight numbers would spill."""
    (work,) = workloads_of(Case("encoded", encoded, (T(1 << 20),) * count))
    graph = Graph.from_json(work.spec)
    default = scheme_of(graph).default(graph)
    assert (default["vector_bytes"], default["unroll"]) == (vector_bytes, unroll)
    assert scheme_of(graph).space_of(graph, load_space("fusion", "cuda")).contains(default)


def norm(x: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32))


def sums(x: Tensor) -> Tensor:
    return x.sum((0, 2, 3))


@pytest.mark.parametrize(
    ("fn", "given", "some"),
    [(norm, T(1, 128, 512, 512), True), (sums, T(64, 3, 256, 256), True), (norm, T(8, 128, 512, 512), False)],
)
def test_few_long_rows_begin_with_clusters(fn: Callable[..., Any], given: Tensor, some: bool) -> None:
    """The decoder of latent images has 32 rows of a million elements, for which 32 of 132 multiprocessors were busy."""
    (work,) = workloads_of(Case("rows", fn, (given,)))
    graph = Graph.from_json(work.spec)
    for group in make_plan(graph).groups:
        scheme = scheme_of(group.graph)
        space = scheme.space_of(group.graph, load_space("fusion", "cuda"))
        found = [c for c in scheme.seeds(group.graph)[:2] if c["cluster"] == 8 and c["keep"] == "reload"]
        assert bool(found) == some
        for config in found:
            assert space.contains(config)
            assert scheme.reject(group.graph, config) is None


def unit(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """An orthogonalised update's first lines: a moving mean, divided by the norm of all its elements."""
    z = torch.lerp(x, y, 0.1)
    return z, (z / (z.norm() + 1e-6)).bfloat16()


def standard(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def loss(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Two numbers, one computed from the other."""
    total = (x * y).sum()
    return total, total.sqrt() * 2.0


@pytest.mark.parametrize(
    ("fn", "inputs", "schemes"),
    [
        (unit, (T(1024, 256),) * 2, ["columns", "flat"]),
        (standard, (T(1024, 256),), ["columns", "columns", "flat"]),
        (standard, (T(1, 1024, 256),), ["columns", "columns", "flat"]),
        (standard, (T(64, 256),), ["rows"]),
        (loss, (T(1024, 256),) * 2, ["columns"]),
        (lambda x: x * x.mean() / x.amax(), (T(1024, 256),), ["columns", "flat"]),
        (lambda x: x / (x.sum(-1, keepdim=True) * x.mean()), (T(1024, 256),), ["columns", "flat"]),
        (lambda x: x.mean(-1).var(), (T(1 << 17, 8),), ["columns"]),  # all blocks take part
        (lambda x, y, z: (x * y.mean() + z, x + z), (T(1024, 256),) * 3, ["columns", "flat"]),
        (lambda x, y: (x * y.norm(), torch.softmax(x, -1)), (T(1024, 256),) * 2, ["columns", "rows"]),
    ],
)
def test_what_depends_on_a_number_has_a_launch_of_its_own(
    fn: Callable[..., Any], inputs: tuple[Tensor, ...], schemes: list[str]
) -> None:
    """One block would compute both: 3.05 ms are predicted for 16 million elements of the first function, 116 us so."""
    (work,) = workloads_of(Case("numbers", fn, inputs))
    plan = default_plan(Graph.from_json(work.spec))
    assert [scheme_of(group.graph).name for group in plan.groups] == schemes
    assert len(plan.launches) == len(schemes)
    for group in plan.groups:
        scheme = scheme_of(group.graph)
        assert scheme.reject(group.graph, scheme.default(group.graph)) is None
