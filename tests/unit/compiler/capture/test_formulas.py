"""Formulas of masks whose lengths are symbols: what they say holds at every length, or they say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autotune.compiler.capture.attention.effects import Writes
from autotune.compiler.capture.attention.formulas import AtMost, Formulas, axis, is_not_later

Made = Callable[[Tensor], Tensor]
SIZES = ((2, 7), (3, 16), (5, 2), (2, 40))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def element(fn: Made) -> Any:
    """The formula of ``fn``'s result, checked at all sizes; None without one."""
    found: list[Any] = []

    def collect(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        (result,) = next(iter(reversed(gm.graph.nodes))).args[0]
        formula = Formulas(Writes(gm)).of(result)
        found.append(None if formula is None else formula.element)
        return gm.forward

    torch.compile(fn, backend=collect, fullgraph=True, dynamic=True)(torch.randn(4, 6))
    (said,) = found
    for batch, length in SIZES:
        made = fn(torch.randn(batch, length))
        if said is not None:
            assert torch.equal(evaluated(said, made.shape).to(made.dtype), made), (batch, length)
    return said


def evaluated(said: Any, shape: Sequence[int]) -> Tensor:
    if isinstance(said, AtMost):
        return evaluated(said.value, shape) <= 0
    if isinstance(said, bool):
        return torch.full(tuple(shape), said)
    out = torch.zeros(tuple(shape), dtype=torch.int64)
    for place, extent in enumerate(reversed(shape)):
        along = torch.arange(extent).reshape(extent, *[1] * place)
        out = out + int(said.coeff(axis(place))) * along
    free = [s for s in said.free_symbols if not str(s).startswith("r")]
    assert not free, "lengths are not in what is tested here"
    return out + int(said.subs({axis(k): 0 for k in range(len(shape))}))


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1])


def rows(x: Tensor) -> Tensor:
    return places(x)[None, None, :, None]


def columns(x: Tensor) -> Tensor:
    return places(x)[None, None, None, :]


def packed(x: Tensor) -> Tensor:
    """transformers': which sequence of a row a token is of, by jumps of its positions."""
    positions = (places(x) + 0).unsqueeze(0).expand(x.shape[0], -1)
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def same_sequence(x: Tensor) -> Tensor:
    of, batch = packed(x), torch.arange(x.shape[0])[:, None, None, None]
    return of[batch, rows(x)] == of[batch, columns(x)]


EVERYTHING: list[Made] = [
    lambda x: (rows(x) >= 0).expand(x.shape[0], -1, -1, x.shape[1]),
    lambda x: columns(x) < x.shape[1],
    lambda x: ~(columns(x) + 1 > x.shape[1]),
    lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool),
    lambda x: rows(x).new_ones(x.shape[1], dtype=torch.bool) | (rows(x) == 3),
    lambda x: torch.full((x.shape[1],), True),
    lambda x: x.new_zeros(x.shape[1], dtype=torch.int32) == 0,
    lambda x: torch.arange(2, x.shape[1] + 2) - places(x) == 2,
    lambda x: (places(x) != -1).unsqueeze(1) & (places(x) > -1),
    same_sequence,
    lambda x: torch.ones(x.shape[0], x.shape[1]).to(torch.bool)[:, None, None, :],
    lambda x: (1.0 - torch.ones(x.shape[1], dtype=torch.bfloat16)) == 0,
    lambda x: (rows(x) >= 0).long() == 1,
    lambda x: places(x).unsqueeze(0).repeat(x.shape[0], 1) >= 0,
]
LATER: list[Made] = [
    lambda x: columns(x) <= rows(x),
    lambda x: (rows(x) >= columns(x)).to(x.device),
    lambda x: ~(columns(x) > rows(x)),
    lambda x: (columns(x) - rows(x) < 1) & (rows(x) >= 0),
    lambda x: rows(x).new_ones((), dtype=torch.bool) & (columns(x) <= rows(x)) & same_sequence(x),
    lambda x: (places(x) <= places(x).unsqueeze(-1)).unsqueeze(0).unsqueeze(-3).expand(x.shape[0], 1, -1, -1),
    lambda x: (places(x)[None, :] <= places(x)[:, None])[None, None, :, :].contiguous().clone(),
]
UNKNOWN: list[Made] = [
    lambda x: rows(x) - columns(x) < 5,
    lambda x: columns(x) < 4,
    lambda x: (columns(x) <= rows(x)) | (columns(x) == 0),
    lambda x: columns(x) == rows(x),
    lambda x: places(x)[-2:] > 0,
    lambda x: places(x)[::2] >= 0,
    lambda x: places(x).flip(0) >= 0,
    lambda x: places(x) % 3 >= 0,
    lambda x: places(x)[places(x) - 1] >= 0,
    lambda x: x[0] == x[0],
    lambda x: torch.arange(0, x.shape[1], 2) >= 0,
    lambda x: torch.arange(x.shape[1], dtype=torch.float16) < x.shape[1],
    lambda x: torch.diff(places(x), prepend=places(x)[:2]) == 1,
    lambda x: torch.diff(places(x), prepend=places(x)[:1]) == 1,
    lambda x: (places(x) >= 0).cumsum(0) > 0,
    lambda x: torch.full((x.shape[1],), 0.5),
    lambda x: places(x).bool(),
    lambda x: places(x).repeat(2) == torch.arange(2 * x.shape[1]),
    lambda x: (columns(x) <= rows(x)).repeat(1, 1, 2, 1),
    lambda x: (columns(x) <= rows(x)).float() == 1,
    lambda x: places(x).float() - places(x) == 0,
    lambda x: torch.ones(x.shape[1]) * 0.5 == 0.5,
    lambda x: torch.full((x.shape[1],), 1e6) == 1e6,
    lambda x: places(x).to(torch.uint8),
]


@pytest.mark.parametrize("fn", EVERYTHING)
def test_mask_formula_recognizes_all_keys_seen(fn: Made) -> None:
    assert element(fn) is True


@pytest.mark.parametrize("fn", LATER)
def test_mask_formula_recognizes_causal_masks(fn: Made) -> None:
    assert element(fn) == is_not_later()


@pytest.mark.parametrize("fn", UNKNOWN)
def test_mask_formula_distinguishes_other_masks(fn: Made) -> None:
    found = element(fn)
    assert found is None or (isinstance(found, AtMost) and found != is_not_later())


def test_other_formulas_are_right() -> None:
    """Numbers, shifted triangles, and masks that hide everything."""
    assert element(lambda x: columns(x) < 0) is False
    assert element(lambda x: torch.zeros(x.shape[1], 3)) == 0
    assert element(lambda x: (rows(x) + 3).expand(-1, 2, -1, 4)) == axis(1) + 3
    assert element(lambda x: columns(x) < rows(x)) == AtMost(axis(0) - axis(1) + 1)
    assert element(lambda x: places(x)[:, None] - places(x)[None, :]) == axis(1) - axis(0)
    assert element(lambda x: (places(x)[:, None] - places(x))[1]) == 1 - axis(0)


def test_overwritten_mask_has_no_formula() -> None:
    def written(x: Tensor) -> Tensor:
        mask = columns(x) <= rows(x)
        mask[..., 0] = True
        return mask

    assert element(written) is None
