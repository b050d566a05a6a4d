"""Random inputs of matrix products distinguish wrong kernels from right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.ir.inputs import make_inputs, operands
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from tests.support.capture_helpers import graph_of, only_region
from tests.unit.compiler.lower.test_products import regions_of
from tests.unit.compiler.lower.test_translate import t


def numel(graph: Any) -> dict[int, int]:
    return {slot: graph.input_numel(slot) for slot in range(len(graph.inputs))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [lambda x, w: torch.softmax(x @ w, -1), lambda x, w: torch.tanh(x @ w)])
def test_a_kernel_without_the_last_terms_is_refused(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    (region,) = regions_of(fn, t(1, 2048, dtype=dtype), t(2048, 512, dtype=dtype))
    graph = graph_of(region)
    (x,) = [slot for slot, n in numel(graph).items() if n == 2048]
    for seed in range(6):
        inputs = make_inputs(graph, seed)
        (want,) = interpret(graph, inputs)
        inputs[x] = inputs[x].clone()
        inputs[x][-8:] = 0
        (got,) = interpret(graph, inputs)
        assert not compare(got.to(dtype), want, graph.outputs[0].dtype, 2048).ok, seed


def test_special_product_inputs_leave_most_results_finite() -> None:
    (region,) = regions_of(lambda x, w: torch.tanh(x @ w), t(1, 2048), t(2048, 512))
    graph = graph_of(region)
    for seed in range(4):
        (out,) = interpret(graph, make_inputs(graph, seed, special=True))
        assert 0.8 < torch.isfinite(out).double().mean() < 1


def test_which_slots_are_operands() -> None:
    def gates(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h @ w + b) * h

    (region,) = regions_of(gates, t(32, 64), t(64, 64), t(64))
    graph = graph_of(region)
    found = operands(graph)
    (slot,) = found  # neither the bias nor an operand with another reader
    assert graph.input_numel(slot) == 64 * 64
    assert found[slot].scale == 64**-0.5
    assert found[slot].odd == 64 // 8
    (region,) = regions_of(lambda x, w: (x @ w).relu(), t(16, 64), t(64, 24))
    found = operands(graph_of(region))
    assert sorted(o.scale for o in found.values()) == [64**-0.5, 1.0]  # one of the two
    region = only_region(lambda x, w: torch.nn.functional.layer_norm(x * w, (64,)), t(16, 64), t(64))
    assert not operands(graph_of(region))
