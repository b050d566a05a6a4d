"""Transposed outputs next to sums: the plan that stores them by tiles first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autotune.compiler.planner.plan import make_plan
from autotune.compiler.schedules.cuda import scheme_of
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from tests.support.zoo import Case, T, workloads_of
from tests.unit.compiler.planner.test_plan import run_groups
from tests.unit.compiler.planner.test_read_back import proposed

Function = Callable[..., tuple[Tensor, Tensor]]


def tokens(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of an image for a product over its tokens, and that of the product's bias."""
    found = gradient.flatten(2).transpose(1, 2)
    return found.contiguous(), found.sum((0, 1))


def scaled_tokens(gradient: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return tokens(gradient * scale)


def image(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The other direction."""
    return gradient.transpose(1, 2).contiguous(), gradient.sum((0, 1))


def halves(gradient: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Several transposed outputs of the same inputs, which one launch reads once."""
    both = gradient * other
    found = [f(both).transpose(1, 2).contiguous() for f in (torch.sin, torch.cos, torch.tanh)]
    return (*found, both.sum((0, 2)))


def in_place(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing is transposed."""
    return gradient * 2, gradient.sum((0, 2, 3))


def after(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed output needs the sum."""
    total = gradient.sum((2, 3), keepdim=True)
    return (gradient - total).flatten(2).transpose(1, 2).contiguous(), total


def graph_of(fn: Function, *sizes: int, count: int = 1) -> Graph:
    (work,) = workloads_of(Case("sums", fn, tuple(T(*sizes) for _ in range(count))))
    return Graph.from_json(work.spec)


@pytest.mark.parametrize(
    ("fn", "sizes", "count", "scheme"),
    [
        (tokens, (8, 256, 128, 128), 1, "rows"),
        (scaled_tokens, (8, 256, 128, 128), 2, "rows"),
        (image, (8, 4096, 256), 1, "columns"),
    ],
)
def test_a_transposed_output_is_stored_by_tiles(fn: Function, sizes: tuple[int, ...], count: int, scheme: str) -> None:
    graph = graph_of(fn, *sizes, count=count)
    first, *others = proposed(graph)
    assert make_plan(graph).text in others
    plan = make_plan(graph, "cuda", first)
    assert [scheme_of(g.graph).name for g in plan.groups] == ["transpose", scheme]
    assert not plan.scratch


def test_several_outputs_are_stored_first_together() -> None:
    graph = graph_of(halves, 8, 256, 4096, count=2)
    first = proposed(graph)[0]
    assert first.split(" / ")[0].count(",") == 2
    plan = make_plan(graph, "cuda", first)
    assert [scheme_of(g.graph).name for g in plan.groups] == ["transpose", "rows"]


@pytest.mark.parametrize(
    ("fn", "sizes"), [(in_place, (8, 256, 128, 128)), (after, (8, 256, 128, 128)), (tokens, (1, 8, 8, 8))]
)
def test_elsewhere_no_output_is_stored_first(fn: Function, sizes: tuple[int, ...]) -> None:
    assert not any(text.startswith("o0 /") for text in proposed(graph_of(fn, *sizes)))


@pytest.mark.parametrize(("fn", "sizes", "count"), [(tokens, (2, 24, 8, 4), 1), (scaled_tokens, (2, 24, 8, 4), 2)])
def test_its_groups_compute_the_region(fn: Function, sizes: tuple[int, ...], count: int) -> None:
    graph = graph_of(fn, *sizes, count=count)
    sums = make_plan(graph).text.replace("o0,", "")
    plan = make_plan(graph, "cuda", f"o0 / {sums}")
    inputs = make_inputs(graph, seed=4)
    for got, want in zip(run_groups(graph, plan, inputs), interpret(graph, inputs), strict=True):
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-12, atol=1e-12)
