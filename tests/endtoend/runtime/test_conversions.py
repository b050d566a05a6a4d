"""Floats that an integer type does not hold, and NaN: deployed kernels convert them as eager mode does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autotune
from tests.support.deployment import Tune

SPECIAL = [
    *(0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 127.0, 128.5, -129.0, 255.0, 256.0, 32767.0, 32768.0, -32769.0, 70000.0),
    *(2147483520.0, 2147483648.0, -2147483648.0, -2147483904.0, 4294967296.0, 1e10, -1e10),
    *(9.2233715e18, 2.0**63, -(2.0**63), 1e19, -1e19, 1e38, -1e38, math.inf, -math.inf, math.nan),
]
LENGTHS = (1, 7, 33, 257)
"""Below a vector, one more than a vector, and several vectors."""


def special(length: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """``length`` of the special values, from number ``first`` on, repeated where they do not suffice."""
    return torch.tensor([SPECIAL[(first + k) % len(SPECIAL)] for k in range(length)], dtype=dtype)


def as_integers(x: Tensor) -> tuple[Tensor, ...]:
    return x.to(torch.int32), x.to(torch.int64), x.to(torch.bool), x.to(torch.int32) + 1, x.to(torch.int64).abs() >> 3


def clamped(x: Tensor) -> tuple[Tensor, ...]:
    """Narrow types: a region has such a conversion where all but NaN fits. All bounds are numbers of 16-bit floats."""
    return (
        x.clamp(-128, 127).to(torch.int8),
        x.clamp(0, 255).to(torch.uint8),
        x.clamp(-32768, 32512).to(torch.int16),
    )


def read_again(x: Tensor) -> tuple[Tensor, ...]:
    """Narrow integers that later operators read: the number itself, not its low bits, is what they see."""
    a, b, c = clamped(x)
    return b.float(), b.to(torch.int32), b > 3, a.to(torch.int64), a.bool(), c.float(), torch.where(x > 0, c, 1), b


def summed(x: Tensor) -> tuple[Tensor, ...]:
    """Inside of a reduction, where a kernel's loops are others."""
    whole = x.to(torch.int64)
    return whole.amax(1), x.to(torch.int32).amin(1), (x.to(torch.int32) & 1023).sum(1)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fn", [as_integers, clamped, read_again], ids=["wide", "narrow", "read_again"])
def test_special_values_are_converted_as_eager_mode_converts_them(
    tune: Tune, fn: Callable[[Tensor], tuple[Tensor, ...]], source: torch.dtype
) -> None:
    inputs = [special(n, source, first=22) for n in LENGTHS]
    for x in inputs:
        assert tune(fn, (x,))
        want, got = fn(x), torch.compile(fn, backend="autotune", dynamic=False)(x)
        for k, (w, g) in enumerate(zip(want, got, strict=True)):
            assert torch.equal(w, g), f"result {k} of {len(x)} {source}: {w} of eager mode, {g} of the kernel"
    assert autotune.counters().hits >= len(inputs)
    assert autotune.counters().fallbacks == autotune.counters().wrong_results == 0


def test_eager_mode_inductor_and_kernels_agree(tune: Tune) -> None:
    x = special(257, torch.float32)
    assert tune(as_integers, (x,))
    want = as_integers(x)
    for compiled in (torch.compile(as_integers), torch.compile(as_integers, backend="autotune")):
        torch._dynamo.reset()
        assert all(map(torch.equal, want, compiled(x)))
    assert autotune.counters().hits


def test_conversions_inside_of_a_reduction(tune: Tune) -> None:
    for columns in (3, 33):
        x = special(8 * columns, torch.float32).view(8, columns)
        assert tune(summed, (x,))
        assert all(map(torch.equal, summed(x), torch.compile(summed, backend="autotune", dynamic=False)(x)))
    assert autotune.counters().hits


def test_the_oracle_agrees_with_the_kernels(tune: Tune) -> None:
    """A kernel that is checked at every call is not taken for a wrong one."""
    for fn in (as_integers, clamped, read_again):
        x = special(257, torch.float32)
        assert tune(fn, (x,))
        assert all(map(torch.equal, fn(x), autotune.compile(fn, verify="always")(x)))
    assert autotune.counters().hits
    assert autotune.counters().wrong_results == 0


def test_a_number_that_the_type_does_not_hold_is_left_to_inductor(tune: Tune) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        big = torch.full((64,), math.inf)
        return big.to(torch.int32) + x, torch.full((64,), 3e9).to(torch.int32) * x

    x = torch.arange(64, dtype=torch.int32)
    tune(fn, (x,))
    assert all(map(torch.equal, fn(x), torch.compile(fn, backend="autotune")(x)))
