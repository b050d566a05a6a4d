"""What lies between stored kernels: results in the strides that were promised, branches that draw random numbers."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autotune
from autotune.fusion.regions import find_regions, is_random
from autotune.runtime.inductor import _as_promised, compile_piece
from autotune.runtime.partition import Cut, pieces
from tests.runtime.conftest import Tune


def with_cache(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a key-value cache that is empty still, as language models build it."""
    keys = torch.tensor([], dtype=x.dtype)
    heads = (x @ w).view(2, 24, 2, 8).transpose(1, 2)
    keys = torch.cat([keys, heads], -2)
    mixed = F.scaled_dot_product_attention(torch.tanh(heads), keys, keys)
    return torch.softmax(mixed.transpose(1, 2).reshape(2, 24, 16), -1), keys


@pytest.mark.parametrize("stored", ["softmax", "tanh", "cat", "f32"])
def test_a_cache_that_begins_empty(tune: Tune, stored: str) -> None:
    args = torch.randn(2, 24, 16), torch.randn(16, 16)
    assert tune(with_cache, args, select=lambda w: stored in w.label)
    got, want = torch.compile(with_cache, backend="autotune")(*args), with_cache(*args)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert a.stride() == b.stride()
    assert autotune.counters().hits
    assert autotune.counters().restrided == autotune.counters().fallbacks == 0


def test_a_piece_lays_its_results_as_the_graph_says() -> None:
    def fn(x: torch.Tensor, none: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([none, x.transpose(1, 2)], -2), x.transpose(1, 2).sin()

    x, none = torch.randn(2, 6, 3, 4), torch.zeros(0)
    compiled = compile_piece(make_fx(fn, tracing_mode="fake")(x, none), {})
    assert compiled is not None
    for _ in range(2):
        for a, b in zip(compiled(x, none), fn(x, none), strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()


def test_results_laid_otherwise_are_copied_and_others_handed_on() -> None:
    x, y, z = torch.randn(3, 4), torch.randn(1, 4), torch.randn(3, 4)
    promised = [(1, 3), (9, 1), (0, 1)]
    same = z[:1].expand(3, 4).clone()
    a, b, c = _as_promised(lambda *t: t, promised)(x, y, same)
    assert (a.stride(), c.stride()) == ((1, 3), (0, 1))
    assert torch.equal(a, x)
    assert torch.equal(c, same)
    assert b is y, "along an extent of 1 no stride is used"


def test_attention_draws_random_numbers_for_its_dropout_alone() -> None:
    q = torch.randn(1, 2, 8, 16)

    def node(fn: object, *args: torch.Tensor) -> list[bool]:
        gm = make_fx(fn, tracing_mode="fake")(*args)
        return [is_random(n) for n in gm.graph.nodes if "attention" in n.name or n.name == "bernoulli"]

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert node(lambda q: attention(q, q, q)[0], q) == [False]
    assert node(lambda q: attention(q, q, q, 0.0)[0], q) == [False]
    assert node(lambda q: torch.bernoulli(q.sigmoid()), q) == [True]


def test_branches_that_draw_random_numbers_can_run_one_after_another() -> None:
    """Regions of two branches that are at one depth must not become one where the branches' draws are ordered."""

    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for t in (x, y):
            for _ in range(3):
                t = torch.bernoulli(torch.sigmoid(t @ w))
            out.append(t)
        return out

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4))
    regions = find_regions(gm)
    order = pieces(gm.graph, [Cut(r.nodes, r.inputs, r.outputs, r.submodule.forward) for r in regions])
    assert sum(isinstance(item, Cut) for item in order) == len(regions) == 5  # the first two may be one
