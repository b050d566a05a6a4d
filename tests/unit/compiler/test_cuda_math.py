"""Errors of the functions that CUDA kernels approximate by default, in NumPy, over the range of each.

Hardware's own functions are taken for right here: theirs (1 to 2 ulp) come on top.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from autotune.compiler.targets.cuda import operation_intrinsics as operations

F = np.float32
Numbers = Any


def _fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(F)


NAMES = {
    "fma": _fma,
    "rcp": lambda x: (1 / np.float64(x)).astype(F),
    "ex2": lambda x: np.exp2(np.float64(x)).astype(F),
    "select": np.where,
    "types": types.SimpleNamespace(float32=F),
    "math": types.SimpleNamespace(copysign=np.copysign),
    "libdevice": types.SimpleNamespace(fmodf=np.fmod),
}


def device(name: str, *x: Numbers) -> Numbers:
    """A device function's own code on arrays."""
    functions = operations.DEVICE | operations.EXACT
    made = types.FunctionType(functions[name].__code__, {**vars(operations), **NAMES})
    with np.errstate(all="ignore"):
        return np.float64(made(*x))


def arguments(low: float, high: float) -> Numbers:
    near = np.logspace(-30, 0, 50_001)
    return np.concatenate([np.linspace(low, high, 500_001), near, -near, [0.0, -0.0]]).astype(F)


def test_tanh_within_two_units_in_the_last_place() -> None:
    x = arguments(-12, 12)
    want = np.tanh(np.float64(x))
    got = device("tanh_", x)
    off = np.abs(got - want)[want != 0] / np.abs(want[want != 0])
    assert off.max() < 2 * 2.0**-23


def test_erf_within_six_in_ten_million() -> None:
    """Absolute: relative to 1, as in gelu. Near 0 its relative precision is lost; strict kernels have it."""
    x = arguments(-6, 6)
    off = np.abs(device("erf_", x) - torch.erf(torch.from_numpy(np.float64(x))).numpy())
    assert 3e-7 < off.max() < 6e-7


def test_sigmoid_loses_digits_as_exponentials_do() -> None:
    """exp(x) is 2 ** (x log2(e)), whose product rounds: the error grows with |x|."""
    for most, bound in ((1, 2), (10, 8), (80, 64)):
        x = arguments(-most, most)
        want = 1 / (1 + np.exp(-np.float64(x)))
        assert (np.abs(device("sigmoid_", x) - want) / want).max() < bound * 2.0**-23


@pytest.mark.parametrize("name", ["tanh_", "erf_", "sigmoid_"])
def test_infinities_and_nan(name: str) -> None:
    got = device(name, np.array([np.inf, -np.inf, np.nan], F))
    assert got[:2].tolist() == [1.0, 0.0 if name == "sigmoid_" else -1.0]
    assert np.isnan(got[2])


def test_remainders_are_exact() -> None:
    """Also of multiples, whose quotient a fast division rounds down, and of numbers far larger than the divisor."""
    few = np.array(
        [0.0, -0.0, 0.1, 0.3, -0.7, 3.0, -6.0, 1e5, -1e6, 16777217.0, 1e10, -1e30, np.inf, -np.inf, np.nan], F
    )
    x, y = (a.ravel() for a in np.meshgrid(few, np.array([0.1, 2.0, 3.0, -3.0, 6.2831855, np.inf, -np.inf, 0.0], F)))
    want = torch.remainder(torch.from_numpy(x), torch.from_numpy(y)).numpy()
    np.testing.assert_array_equal(device("mod_", x, y), np.float64(want))
