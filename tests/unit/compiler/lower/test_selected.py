"""Loads that are only used on a part of an axis are guarded on it, and compute what they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autotune.ir.graph import Graph, Output, Value
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from autotune.ir.simplify import guard_selected
from tests.support.capture_helpers import check, only_region

BACK = torch.ops.aten.select_backward


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three gradients [rows, columns] written next to each other, and their sums over the rows."""
    parts = [BACK(x, [3, *x.shape], 0, n) for n, x in enumerate((q, k, v))]
    whole = (parts[0] + parts[1] + parts[2]).permute(1, 0, 2).reshape(q.shape[0], -1)
    return whole, whole.sum(0)


def checked(fn: Callable[..., object], *args: Tensor) -> Graph:
    """The graph of a function of one region, which computes what the function does."""
    region = only_region(fn, *args)
    check(region, special=True)
    return check(region)


def loads(graph: Graph) -> list[Value]:
    return [v for v in graph.values if v.op == "load"]


@pytest.mark.parametrize("shape", [(48, 64), (33, 20)], ids=str)
def test_each_part_of_a_packed_gradient_is_read_at_its_own_place_alone(shape: tuple[int, int]) -> None:
    graph = checked(packed, *(torch.randn(shape) for _ in range(3)))
    assert Counter(v.op for v in graph.values) == {"load": 3, "add": 2, "sum": 1}
    (axis,) = {a for v in loads(graph) for a, _, _ in v.guards}
    assert graph.extents[axis] == 3
    assert sorted(g for v in loads(graph) for g in v.guards) == [(axis, n, n + 1) for n in range(3)]
    assert all(v.strides[v.axes.index(axis)] == 0 for v in loads(graph))


@pytest.mark.parametrize(
    ("fn", "guarded"),
    [
        (lambda x, y, z, b: torch.stack((x, y.exp(), z)), 3),
        (lambda x, y, z, b: torch.stack((x, y + b, z), 1), 4),
        (lambda x, y, z, b: torch.stack((x, y, z), -1), 0),  # neighbours in memory
        (lambda x, y, z, b: torch.stack((x, y, z)) + x, 3),  # one of them is used everywhere too
        (lambda x, y, z, b: torch.stack((x.softmax(-1), y, z)), 3),  # not what a reduction is made of
        (lambda x, y, z, b: torch.stack((x, y))[:1] * z, 0),
    ],
)
def test_selected_loads_are_guarded_where_used(fn: Callable[..., Tensor], guarded: int) -> None:
    graph = checked(fn, *(torch.randn(12, 16) for _ in range(3)), torch.randn(16))
    assert sum(bool(v.guards) for v in loads(graph)) == guarded


def selecting(limit: int, second: int, zero: float = 0.0) -> Graph:
    """[4, 8]: ``x`` where the first index is below ``limit``, ``exp(y)`` from there to below ``second``, else zero."""
    values = (
        Value("load", axes=(1,), slot=0, strides=(1,)),
        Value("load", axes=(1,), slot=1, strides=(1,)),
        Value("exp", (1,), (1,)),
        Value("index", axes=(0,), dtype="int32", scale=2, shift=1),
        Value("const", dtype="int32", number=2 * limit),
        Value("lt", (3, 4), (0,), "bool"),
        Value("const", dtype="int32", number=2 * second),
        Value("lt", (3, 6), (0,), "bool"),
        Value("const", number=zero),
        Value("where", (7, 2, 8), (0, 1)),
        Value("where", (5, 0, 9), (0, 1)),
        Value("where", (5, 0, 8), (0, 1)),
    )
    outputs = (Output(10, (0, 1), (8, 1), "float32"), Output(11, (0, 1), (8, 1), "float32"))
    return Graph((4, 8), values, ("float32", "float32"), outputs)


@pytest.mark.parametrize("zero", [0.0, -0.0, 1.0])
@pytest.mark.parametrize(("limit", "second"), [(1, 3), (2, 2), (3, 1), (0, 4), (9, 9)], ids=str)
def test_guards_change_no_result(limit: int, second: int, zero: float) -> None:
    graph = selecting(limit, second, zero)
    made = guard_selected(graph)
    made.check()
    inputs = [t.fill_(-0.0) if k else t for k, t in enumerate(make_inputs(graph, seed=1))]
    for mine, other in zip(interpret(made, inputs), interpret(graph, inputs), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine.signbit(), other.signbit())
    assert guard_selected(made) == made


def test_a_select_between_a_guarded_load_and_zeros_is_gone() -> None:
    made = guard_selected(selecting(1, 3))
    assert [v.guards for v in made.values if v.op == "load"] == [((0, 0, 1),), ((0, 1, 3),)]
    assert [o.value for o in made.outputs] == [10, 0]  # exp(0) is not 0
    assert [o.value for o in guard_selected(selecting(1, 3, -0.0)).outputs] == [10, 11]
