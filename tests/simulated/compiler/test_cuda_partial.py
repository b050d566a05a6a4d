"""Vectors of which a row has a part: rows of an odd length, whole vectors apart, and inputs of padded results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.program.rewrites import widened
from autotune.compiler.schedules.cuda import scheme_of
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from tests.support.simulator.groups import check_group, check_inputs

ROWS, COLUMNS, APART = 11, 301, 304


def logits(apart: int = APART, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of ``COLUMNS`` elements with a longer stride; the last one ends at the end of the input's memory."""
    return torch.randn(ROWS, apart).to(dtype)[:, :COLUMNS]


def loss(x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), label)


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    x = x.float()
    return torch.logsumexp(x, 1), (x * 0.5 + 1).sum(1), x.amin(1), (x.abs() * 0.01 + 1).prod(1), x.amax(1)


def weighted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Differences from the row's elements are infinite behind the row, where zeros are loaded."""
    x = x.float()
    return x.amax(1), torch.exp(x - torch.log(y.float().abs() + 0.0)).sum(1)


def one_row(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x[0].float()
    return x.exp().sum(), x.amax()


def gradient(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(x * scale, (0, APART - COLUMNS))
    return padded, padded.sum(0)


def in_front(x: Tensor, scale: Tensor) -> Tensor:
    return F.pad(x * scale, (8, 3))


def groups_of(fn: Callable[..., Any], *args: Tensor) -> list[Graph]:
    tasks = [FusionTask(work, "cuda:0", target="sm_90", sms=3) for work, _ in workloads_of(fn, args)]
    return [group.graph for task in tasks for group in task.plan.groups]


@pytest.mark.parametrize(("fn", "args"), [
    (loss, (logits(), torch.randint(0, COLUMNS, (ROWS,)))),
    (loss, (logits(dtype=torch.float32), torch.randint(0, COLUMNS, (ROWS,)))),
    (statistics, (logits(),)),
    (weighted, (logits(), logits())),
    (one_row, (logits(),)),
    (gradient, (logits(), torch.randn(ROWS, 1).bfloat16())),
    (in_front, (logits(), torch.randn(ROWS, 1).bfloat16())),
], ids=["loss", "loss of float32", "statistics", "weighted", "one row", "gradient", "in front"])  # fmt: skip
def test_all_forms_of_kernel(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    for graph in groups_of(fn, *args):
        scheme = scheme_of(graph)
        default, ran = scheme.default(graph), set()
        more: list[dict[str, Any]] = [{"online": True}, {"online": True, "keep": "reload"}, {"vector_bytes": 4}]
        more += [{"prefetch": True, "blocks_per_sm": 1}, {"threads_per_row": 32, "cluster": 2}]
        for config in [default, *scheme.seeds(graph), *(default | change for change in more)]:
            config = scheme.normalize(graph, config)
            if not scheme.reject(graph, config) and str(config) not in ran:
                check_group(graph, scheme.emit(graph, config, 3), seed=1)
                ran.add(str(config))
        assert len(ran) >= 5


def sources(fn: Callable[..., Any], *args: Tensor) -> list[str]:
    made = [scheme_of(g).emit(g, scheme_of(g).default(g), 3) for g in groups_of(fn, *args)]
    return [source.text for group in made for source in group.sources]


def test_rows_of_an_odd_length_are_read_in_vectors() -> None:
    text = "".join(sources(loss, logits(), torch.randint(0, COLUMNS, (ROWS,))))
    assert "ld_bf16_8_d" in text or "lg_bf16_8_d" in text


def test_padded_results_read_vectors() -> None:
    text = "".join(sources(in_front, logits(), torch.randn(ROWS, 1).bfloat16()))
    assert "lg_bf16_8_d" in text
    assert "lg_bf16_1_d" not in text


@pytest.mark.parametrize(("fn", "x"), [
    (lambda x: torch.logsumexp(x.float(), 1), torch.randn(ROWS, COLUMNS).bfloat16()),  # rows that no vector begins
    (lambda x: torch.logsumexp(x.float(), 1), torch.randn(ROWS, 304).bfloat16()),  # whole vectors
    (lambda x: torch.softmax(x.float(), 1), logits()),  # results as long as the rows
    (lambda x: torch.logsumexp(x.float(), 1), torch.randn(ROWS, 104).bfloat16()[:, :101]),  # short
    (lambda x: x.argmax(1), logits()),
])  # fmt: skip
def test_other_groups_stay(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for graph in groups_of(fn, x):
        assert widened(graph) == graph


def test_a_number_of_the_row_may_be_infinite() -> None:
    """Nothing of the places behind the row shows then: minus infinity less minus infinity would be NaN there."""

    def shifted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().amax(1), torch.exp(x.float() - y).sum(1)

    (graph,) = groups_of(shifted, logits(), torch.zeros(ROWS, 1))
    assert widened(graph) != graph
    scheme = scheme_of(graph)
    for config in ({}, {"online": True}, {"online": True, "keep": "reload"}):
        made = scheme.emit(graph, scheme.normalize(graph, scheme.default(graph) | config), 3)
        inputs = make_inputs(graph, seed=1)
        (at,) = (slot for slot, dtype in enumerate(graph.inputs) if dtype == "float32")
        inputs[at][::2] = -torch.inf
        check_inputs(graph, made, inputs, seed=1)


def test_scores_that_are_all_minus_infinity() -> None:
    """A softmax of them is NaN, and logsumexp minus infinity, in widened rows too."""
    for fn in (loss, statistics):
        args = (logits(), torch.randint(0, COLUMNS, (ROWS,)))[: 2 if fn is loss else 1]
        for graph in groups_of(fn, *args):
            inputs = make_inputs(graph, seed=1)
            for slot, dtype in enumerate(graph.inputs):
                if dtype == "bfloat16":
                    inputs[slot][: 3 * APART] = -torch.inf
            scheme = scheme_of(graph)
            check_inputs(graph, scheme.emit(graph, scheme.default(graph), 3), inputs, seed=1)
