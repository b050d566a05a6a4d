"""Pointwise kernels whose rows have values in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.schedules.configurations import improper
from autotune.compiler.schedules.cuda import scheme_of
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Superseded
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from tests.support.simulator.groups import check_group, run_group

CLASSES = 1021  # odd: one element a thread, so that a row is sixteen parts of 64, the last one of 61


def gradient(logits: Tensor, peak: Tensor, label: Tensor) -> Tensor:
    """Of a cross entropy."""
    picked = torch.where(torch.arange(logits.shape[-1]) == label, -1.0, 0.0)
    return (picked - torch.exp(logits.float() - peak) * picked.sum(-1, keepdim=True)).to(logits.dtype)


def group_of(fn: Callable[..., Any], *args: Tensor) -> Graph:
    ((work, _),) = workloads_of(fn, args)
    (group,) = FusionTask(work, "cuda:0", target="sm_90", sms=3).plan.groups
    assert scheme_of(group.graph).name == "flat"
    return group.graph


def loss(*rows: int, classes: int = CLASSES, apart: int = 0) -> tuple[Tensor, ...]:
    logits = torch.randn(*rows, apart or classes).bfloat16()[..., :classes]
    return logits, torch.randn(*rows, 1), torch.randint(classes, (*rows, 1))


def emitted(graph: Graph, **config: Any) -> Any:
    scheme = scheme_of(graph)
    whole = scheme.normalize(graph, scheme.default(graph) | config)
    assert not scheme.reject(graph, whole)
    return scheme.emit(graph, whole, 3)


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("args", [loss(5), loss(2, 3, apart=520), loss(5, classes=1040)], ids=["odd", "apart", "packs"])
def test_results(args: tuple[Tensor, ...], unroll: int, blocks: int) -> None:
    graph = group_of(gradient, *args)
    vector = 16 if args[0].shape[-1] % 8 == 0 else 2
    made = emitted(graph, threads_per_row=64, unroll=unroll, blocks_per_sm=blocks, vector_bytes=vector)
    check_group(graph, made, seed=1)


def test_any_number_of_rows() -> None:
    graph, longer = group_of(gradient, *loss(5)), group_of(gradient, *loss(8))
    made = emitted(graph, threads_per_row=64, unroll=1)
    assert made.sources[0].launch["dynamic"]
    assert made.sources[0].text == emitted(longer, threads_per_row=64, unroll=1).sources[0].text


def test_over_its_input() -> None:
    graph = group_of(gradient, *loss(5))
    made, inputs = emitted(graph, threads_per_row=64, unroll=2), make_inputs(graph, seed=3)
    slot = graph.inputs.index("bfloat16")
    (apart,), (over,) = run_group(graph, made, inputs), run_group(graph, made, inputs, over=[(slot, 0)])
    assert torch.equal(apart.view(torch.uint8), over.view(torch.uint8))


def test_blocks_with_a_part_of_one_row_each_are_no_choice_any_more() -> None:
    graph = group_of(gradient, *loss(5))
    scheme, config = scheme_of(graph), scheme_of(graph).default(graph)
    earlier = config | {"by_row": True}
    assert improper(earlier, "cuda") == improper(config | {"by_row": False}, "cuda") == ""
    assert scheme.normalize(graph, earlier) == config
    assert scheme.emit(graph, config | {"by_row": False}, 3).sources[0].text == emitted(graph).sources[0].text
    with pytest.raises(Superseded, match="which this autotune lacks"):
        scheme.emit(graph, earlier, 3)
