"""Sums with a single term, and factors: no sum, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autotune.domains.fusion.program_spec import workloads_of
from autotune.ir.graph import Graph
from autotune.ir.oracle import interpret
from autotune.workload import Workload

CLASSES = 40


def one(fn: Callable[..., Tensor], *args: Tensor) -> tuple[Workload, Graph]:
    ((work, _),) = workloads_of(fn, args)
    return work, Graph.from_json(work.spec)


def chosen(label: Tensor, scale: Tensor) -> Tensor:
    """A cross entropy's gradient, summed over the classes."""
    at = torch.arange(CLASSES).view(1, CLASSES) == label.unsqueeze(1)
    return (torch.where(at, -1.0, 0.0) * scale.unsqueeze(1) / 3.0).sum(1)


def test_the_axis_goes() -> None:
    label, scale = torch.randint(0, CLASSES, (12,)), torch.randn(12)
    _, graph = one(chosen, label, scale)
    assert graph.extents == (12,)
    assert all(v.op != "sum" for v in graph.values)


def test_places_outside_have_no_term() -> None:
    label, scale = torch.tensor([0, CLASSES - 1, CLASSES, -1, -100, 7]), torch.randn(6)
    _, graph = one(chosen, label, scale)
    slots = {d: n for n, d in enumerate(graph.inputs)}
    given = [label, scale] if slots["int64"] == 0 else [scale, label]
    (got,) = interpret(graph, given)
    torch.testing.assert_close(got.double().flatten(), chosen(label, scale.double()))
    assert torch.equal(got.flatten()[2:5], torch.zeros(3).to(got))


def shifted(label: Tensor, scale: Tensor) -> Tensor:
    at = torch.arange(5, CLASSES + 5).view(1, CLASSES) == label.unsqueeze(1)
    return torch.where(at, scale.unsqueeze(1), 0.0).sum(1)


def test_an_axis_that_does_not_begin_at_zero() -> None:
    label, scale = torch.tensor([4, 5, CLASSES + 4, CLASSES + 5]), torch.randn(4)
    _, graph = one(shifted, label, scale)
    given = [label, scale] if graph.inputs[0] == "int64" else [scale, label]
    (got,) = interpret(graph, given)
    torch.testing.assert_close(got.double().flatten(), shifted(label, scale.double()))
    assert graph.extents == (4,)


@pytest.mark.parametrize("fn", [
    lambda t, s: torch.where(torch.arange(CLASSES) == t.unsqueeze(1), s.unsqueeze(1), 1.0).sum(1),  # others than 0
    lambda t, s: torch.where(torch.arange(CLASSES) < t.unsqueeze(1), s.unsqueeze(1), 0.0).sum(1),  # several
    lambda t, s: torch.where(torch.arange(CLASSES) == t.unsqueeze(1), s.unsqueeze(1), 0.0).amin(1),  # no sum
    lambda t, s: torch.where(torch.arange(0, 2 * CLASSES, 2) == t.unsqueeze(1), s.unsqueeze(1), 0.0).sum(1),  # steps
])  # fmt: skip
def test_other_reductions_stay(fn: Callable[..., Tensor]) -> None:
    _, graph = one(fn, torch.randint(0, CLASSES, (12,)), torch.randn(12))
    assert CLASSES in graph.extents


def test_the_gradient_of_a_cross_entropy_walks_its_classes_once() -> None:
    def gradient(x: Tensor, label: Tensor, scale: Tensor) -> Tensor:
        at = torch.where(torch.arange(CLASSES) == label.unsqueeze(1), -1.0, 0.0)
        return torch.ops.aten._log_softmax_backward_data(at * scale, x, 1, torch.float32)

    _, graph = one(gradient, torch.randn(12, CLASSES), torch.randint(0, CLASSES, (12,)), torch.randn(12, 1))
    assert all(v.op != "sum" for v in graph.values)
    assert sorted(graph.extents) == [12, CLASSES]


def test_a_factor_of_each_class_stays_in_the_sum() -> None:
    def weighted(label: Tensor, weight: Tensor) -> Tensor:
        at = torch.arange(CLASSES).view(1, CLASSES) == label.unsqueeze(1)
        return (torch.where(at, -1.0, 0.0) * weight).sum(1)

    _, graph = one(weighted, torch.randint(0, CLASSES, (12,)), torch.randn(CLASSES))
    assert any(v.op == "sum" for v in graph.values)
