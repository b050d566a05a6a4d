"""Sums over all rows on CUDA: kernels that were made for one number of rows, with others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotune.compiler.schedules.cuda.columns import SCHEME
from autotune.ir.graph import Graph
from autotune.task import Config
from tests.simulated.compiler.test_cuda_columns import layer_norm_backward, statistics, task_of
from tests.support.simulator.groups import check_group

ROWS, WIDTH = 70, 96
SHAPES = [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)]
OTHERS = (1, 5, 64, 71, 16 * ROWS)
CONFIGS: list[Config] = [
    {"threads_per_row": 64, "rows_per_block": 1},
    {"threads_per_row": 16, "rows_per_block": 4},
    {"threads_per_row": 32, "rows_per_block": 2, "prefetch": True},
    {"threads_per_row": 8, "rows_per_block": 8, "vector_bytes": 4, "keep": "reload"},
]


def every_reduction(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """All that blocks without rows might spoil: a block has a neutral element for each."""
    h = x * (x * y).sum(-1, keepdim=True)
    return h, h.amax(0), y.amin(0), (x > 0).sum(0), (h > 0).any(0)


def graph_of(fn: object) -> Graph:
    """The graph of a function of one group."""
    n = {layer_norm_backward: 3, every_reduction: 2, statistics: 1}[fn]  # type: ignore[index]
    (group,) = task_of(fn, *(torch.randn(s) for s in SHAPES[:n])).plan.groups
    return group.graph


def at(graph: Graph, rows: int) -> Graph:
    return replace(graph, extents=(rows, *graph.extents[1:]))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
@pytest.mark.parametrize("fn", [layer_norm_backward, every_reduction])
def test_a_main_kernel_and_its_finish_take_any_number_of_rows(fn: object, config: Config) -> None:
    graph = graph_of(fn)
    config = SCHEME.normalize(graph, SCHEME.default(graph) | {"blocks_per_sm": 8, "unroll": 1} | config)
    assert SCHEME.reject(graph, config) is None
    made = SCHEME.emit(graph, config, 3)
    main = made.sources[0]
    blocks = int(main.launch["grid"]) // int(main.launch["tiles"])
    assert blocks * int(config["rows_per_block"]) > max(5, ROWS // 4), "many blocks have nothing to do for five rows"
    for rows in OTHERS:
        check_group(at(graph, rows), made, seed=rows, special=rows % 2 == 0)
        again = SCHEME.with_blocks(at(graph, rows), config, blocks)
        assert again.private == made.private
        for one, two in zip(again.sources, made.sources, strict=True):
            assert (one.text, one.launch) == (two.text, two.launch)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda c: "-".join(str(v) for v in c.values()))
def test_moments_of_blocks_without_rows_weigh_nothing(config: Config) -> None:
    """Their finish contains one over the number of rows, as the region itself does: another kernel, by its text."""
    graph = graph_of(statistics)
    config = SCHEME.normalize(graph, SCHEME.default(graph) | {"blocks_per_sm": 8, "unroll": 1} | config)
    made = SCHEME.emit(graph, config, 3)
    blocks = int(made.sources[0].launch["grid"]) // int(made.sources[0].launch["tiles"])
    for rows in (5, 71):
        values = [replace(v, number=1 / rows) if v.number == 1 / ROWS else v for v in graph.values]
        here = replace(at(graph, rows), values=tuple(values))
        assert here.values != graph.values
        again = SCHEME.with_blocks(here, config, blocks)
        assert again.sources[0].text == made.sources[0].text
        assert again.sources[1].text != made.sources[1].text
        check_group(here, again, seed=rows, special=rows == 5)
