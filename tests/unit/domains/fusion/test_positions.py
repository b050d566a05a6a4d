"""Random integers are positions where a region's program takes them for ones, so that what the user had can run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.regions.symbols import traced
from autotune.domains.fusion.bench import FusionBench, _Inputs, positions
from tests.unit.compiler.lower.test_products import regions_of


def embeddings(x: Tensor, counted: Tensor, mask: Tensor, kinds: Tensor, table: Tensor, one_row: Tensor) -> Tensor:
    """As RoBERTa's: places are counted and masked, and the types of tokens, all 0, are kept by place."""
    place = counted * mask + 1
    return x + F.embedding(place, table) + F.embedding(kinds.expand(4, -1).gather(1, place), one_row)


def added(grad: Tensor, kinds: Tensor) -> Tensor:
    """The gradient of a table of one row."""
    return torch.index_put(torch.zeros(1, 8), [kinds], grad, accumulate=True)


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


EMBEDDED = (torch.randn(4, 64, 8), integers(4, 64), integers(4, 64), integers(1, 66), torch.randn(66, 8))


@pytest.mark.parametrize(("fn", "args", "bounds"), [
    (embeddings, (*EMBEDDED, torch.randn(1, 8)), {1}),  # indices are computed: the graph has their bounds
    (added, (torch.randn(64, 8), integers(64)), {1}),
    (lambda t, i: F.embedding(i.view(-1), t) * 2, (torch.randn(5, 8), integers(4, 16)), {5}),
    (lambda t, i: t.gather(1, i) * 2, (torch.randn(4, 7), integers(4, 16)), {7}),
    (lambda t, i: t[:, i] * 2, (torch.randn(4, 9), integers(16)), {9}),
    (lambda t, i: t + i, (torch.randn(16), integers(16)), set()),
])  # fmt: skip
def test_the_users_program_runs(fn: Callable[..., Tensor], args: tuple[Tensor, ...], bounds: set[int]) -> None:
    (region,) = regions_of(fn, *args)
    assert region.workload is not None, region.reason
    assert set(positions(traced(region.workload.source, "cpu")).values()) == bounds
    bench = FusionBench(region.workload, "cpu")
    program = bench.baselines()["eager"]()
    program()
    for seed, special in itertools.product(range(3), (False, True)):
        drawn = bench._expectation(seed, special).inputs
        program(_Inputs(bench.source, drawn, bench.device))  # type: ignore[call-arg]
