"""Expensive sides of a concatenation are behind a branch, where a whole pack takes one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.schedules.cuda import scheme_of
from tests.simulated.compiler.test_cuda_selected import task_of
from tests.support.simulator.groups import check_group

BF16 = torch.bfloat16


def gated(gradient: Tensor, both: Tensor) -> Tensor:
    """The gradient of a gated GELU whose halves one product made."""
    x, gate = both.chunk(2, -1)
    return torch.cat([gradient * F.gelu(gate), torch.ops.aten.gelu_backward(gradient * x, gate)], -1)


def gated_with_bias(gradient: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    out = gated(gradient, both)
    return out, out.sum(0)


def gated_norm(gradient: Tensor, both: Tensor) -> Tensor:
    out = gated(gradient, both)
    return out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6)


def encoded(x: Tensor, feature: Tensor) -> Tensor:
    """Positions by sines of several frequencies, next to a feature."""
    return torch.cat([feature, x, *(f(2.0**k * x) for k in range(3) for f in (torch.sin, torch.cos))], -1)


def shared(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A side that is stored as well is computed for all elements."""
    first = torch.arange(x.shape[-1]) < 32
    other = torch.sin(y)
    return torch.where(first, torch.ops.aten.gelu_backward(x, y) * torch.cos(x) * torch.tan(y), other), other


def stacked(gradient: Tensor, other: Tensor) -> Tensor:
    """The parts are apart along an axis outside of the packs."""
    return torch.stack([F.gelu(gradient), torch.ops.aten.gelu_backward(gradient, other)], 1)


def filtered(*tensors: Tensor) -> Tensor:
    """Three parts that each add up tensors of their own, as the gradients of a gated convolution."""
    count = len(tensors) // 3
    parts = [tensors[k * count : k * count + count] for k in range(3)]
    return torch.cat([reduce(torch.add, (x.roll(k, 0) for k, x in enumerate(part))) for part in parts], -1)


def gated_inputs(rows: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, half, dtype=dtype), torch.randn(rows, 2 * half, dtype=dtype)


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize(
    ("fn", "inputs", "branches"),
    [
        (gated, gated_inputs(70, 64, BF16), 1),
        (gated, gated_inputs(70, 12, BF16), 0),  # a pack of eight has elements of both halves
        (gated, gated_inputs(67, 33, torch.float32), 0),
        (gated_with_bias, gated_inputs(70, 64, BF16), 1),
        (gated_with_bias, gated_inputs(130, 20, torch.float32), 1),
        (gated_norm, gated_inputs(40, 64, torch.float32), 1),
        (encoded, (torch.randn(50, 3), torch.randn(50, 8)), 6),
        (shared, (torch.randn(70, 64), torch.randn(70, 64)), 1),
        (stacked, (torch.randn(70, 64), torch.randn(70, 64)), 1),
        (filtered, tuple(torch.randn(70, 32) for _ in range(18)), 1),  # 72 registers of loads
        (filtered, tuple(torch.randn(70, 32) for _ in range(27)), 2),
        (filtered, tuple(torch.randn(70, 32) for _ in range(15)), 0),  # 60
    ],
)
def test_each_pack_computes_one_side(
    fn: Callable[..., object], inputs: tuple[Tensor, ...], branches: int, unroll: int
) -> None:
    task = task_of(fn, *inputs)
    for group in task.plan.groups:
        scheme = scheme_of(group.graph)
        config = scheme.normalize(group.graph, scheme.default(group.graph) | {"unroll": unroll})
        emitted = scheme.emit(group.graph, config, 3)
        for special in (False, True):
            check_group(group.graph, emitted, special=special)
        found = {int(n) for n in re.findall(r"if v(\d+)_0:", emitted.sources[0].text)}
        assert len(found) == branches, found


def test_a_position_among_fractions_is_no_choice_of_a_pack() -> None:
    """Stored graphs may compare positions in float32: a pack of eight from 32 on has elements on both sides of 32.5."""
    (group,) = task_of(shared, torch.randn(70, 64), torch.randn(70, 64)).plan.groups
    values = list(group.graph.values)
    for v in group.graph.values:
        if v.op == "lt":
            position, bound = v.args
            values[position] = replace(values[position], dtype="float32")
            values[bound] = replace(values[bound], dtype="float32", number=32.5)
    graph = replace(group.graph, values=tuple(values))
    scheme = scheme_of(graph)
    emitted = scheme.emit(graph, scheme.default(graph), 3)
    check_group(graph, emitted)
    assert not re.search(r"if v\d+_0:", emitted.sources[0].text)
