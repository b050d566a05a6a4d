"""Complex products between ``view_as_complex`` and ``view_as_real`` are arithmetic of parts, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import Region, regions_from
from autotune.runtime.backend import deploy_backend
from autotune.runtime.inductor import region_pass
from tests.support.capture_helpers import check, only_region, regions_of, uncached
from tests.unit.compiler.lower.test_translate import t


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def rope(x: Tensor, turns: Tensor) -> Tensor:
    """As in Llama's own code: ``x`` [batch, time, heads, width], ``turns`` complex [time, width / 2]."""
    return torch.view_as_real(pairs(x) * turns[:, None]).flatten(3).type_as(x)


def turns(*shape: int) -> Tensor:
    angle = t(*shape)
    return torch.polar(torch.ones_like(angle), angle)


def arithmetic(x: Tensor, y: Tensor) -> Tensor:
    a, b = pairs(x), pairs(y)
    mixed = (a - b) * 2.0 + x[..., :4] * b.conj() - 1.5
    return torch.view_as_real((1.0 - mixed).unsqueeze(0) + (-a) * torch.polar(x[..., :4], y[..., :4]))


def shifted(x: Tensor, y: Tensor) -> Tensor:
    return torch.view_as_real((pairs(x) + y[0, 0, 0, 0]) * torch.view_as_complex(y.view(2, 5, 3, 4, 2)))


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rope": (rope, (t(2, 5, 3, 8), turns(5, 4))),
    "rope_bf16": (rope, (t(2, 5, 3, 8, dtype=torch.bfloat16), turns(5, 4))),
    "arithmetic": (arithmetic, (t(2, 5, 3, 8), t(2, 5, 3, 8) + 1)),
    "shifted": (shifted, (t(2, 5, 3, 8), t(2, 5, 3, 8) + 1)),
    "broadcast": (lambda x, w: torch.view_as_real(pairs(w) - pairs(x)), (t(2, 5, 3, 8), t(3, 8))),
    "conjugate": (lambda x, w: torch.view_as_real(pairs(x).conj().clone() * w), (t(2, 5, 3, 8), turns(5, 1, 4))),
}


def complex_nodes(fn: Callable[..., Any], *args: Tensor) -> list[str]:
    """Calls that make complex numbers, of the graph as it is searched."""
    (graph,) = capture(fn, args, grad=False)
    made = (n for n in graph.module.graph.nodes if n.op == "call_function")
    return [n.name for n in made if isinstance(v := n.meta["val"], Tensor) and v.is_complex()]


@pytest.mark.parametrize("name", list(CASES))
def test_one_region_without_complex_numbers(name: str) -> None:
    fn, args = CASES[name]
    assert [n for n in complex_nodes(fn, *args) if "slice" not in n and "unsqueeze" not in n] == []
    check(only_region(fn, *args))


@pytest.mark.slow
def test_values_and_gradients_are_those_of_complex_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor's own compilation, in whose joint pass they are taken apart: all cases in one graph."""
    given = [a for _, args in CASES.values() for a in args]
    mine = [a.clone().requires_grad_(not a.is_complex()) for a in given]
    theirs = [a.clone().requires_grad_(not a.is_complex()) for a in given]
    seen: list[list[str]] = []

    def looking(facts: GraphFacts) -> list[Region]:
        seen.append([n.name for n in facts.nodes if n.op == "call_function" and "complex" in str(n.target)])
        return regions_from(facts)

    monkeypatch.setattr(region_pass, "regions_from", looking)

    def every(*all_args: Tensor) -> list[Tensor]:
        left = iter(all_args)
        return [fn(*itertools.islice(left, len(args))) for fn, args in CASES.values()]

    wants = every(*theirs)
    grads = [torch.randn_like(want) for want in wants]
    torch.autograd.backward(wants, grads)
    with uncached():
        found = torch.compile(lambda *a: every(*a), backend=deploy_backend, dynamic=False)(*mine)
        torch.autograd.backward(found, grads)
    for got, want in zip(found, wants, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)
    assert seen == [[], []]
    for a, b in zip(mine, theirs, strict=True):
        if b.requires_grad:
            torch.testing.assert_close(a.grad, b.grad)


def test_a_view_behind_a_copy_in_another_order() -> None:
    def by_head(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real((pairs(x) * w).transpose(1, 2).reshape(2, 3, 20)).sum(-1)

    x, w = t(2, 5, 3, 8), turns(5, 1, 4)
    with uncached():
        found = torch.compile(by_head, backend=deploy_backend, dynamic=False)(x, w)
    torch.testing.assert_close(found, by_head(x, w))
    assert [n for n in complex_nodes(by_head, x, w) if "mul" in n] == []


def test_complex_product_with_another_complex_reader_stays() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = pairs(x) * w
        return z, torch.view_as_real(z) * 2

    x, w = t(2, 5, 3, 8), turns(5, 1, 4)
    assert "mul" in complex_nodes(both, x, w)
    assert all("stack" not in str(n.target) for r in regions_of(both, x, w, grad=False) for n in r.nodes)


def test_another_layout_and_views_alone_stay() -> None:
    x, w = t(2, 5, 3, 8), turns(5, 1, 4)
    assert "mul" in complex_nodes(lambda x, w: torch.view_as_real((pairs(x) * w).transpose(1, 2)), x, w)
    assert complex_nodes(lambda w: torch.view_as_real(w[1:]) * 2, w) != []
    (region,) = regions_of(lambda w: torch.view_as_real(w[1:]) * 2, w, grad=False)
    assert len(region.nodes) == 1
