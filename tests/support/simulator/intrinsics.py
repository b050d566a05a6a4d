"""Functions of kernels that need no machine, in NumPy's fp32 and Python's integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from autotune.ir.nodes import LIBRARY

float32 = np.float32


def integer(bits: int, signed: bool = True) -> Callable[[Any], int]:
    """``int32(x)`` and the like: Python's integer, wrapped to the type."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)

    def wrapped(x: Any) -> int:
        if type(x) is int and low <= x <= high:
            return x
        if isinstance(x, (float, np.floating)) and not np.isfinite(x):
            return 0 if np.isnan(x) else (1 << (bits - 1)) - (1 if x > 0 else 0)
        n = int(x) & ((1 << bits) - 1)
        return n - (1 << bits) if signed and n >> (bits - 1) else n

    return wrapped


int32, uint32, int64 = integer(32), integer(32, signed=False), integer(64)


def _largest(a: Any, b: Any) -> Any:
    """As ``np.maximum``, which takes ten times as long for two numbers: NaN if either is."""
    return a if a >= b or a != a else b


def _smallest(a: Any, b: Any) -> Any:
    return a if a <= b or a != a else b


def _divide(a: int, b: int, bits: int = 32) -> tuple[int, int]:
    assert a >= 0 <= b, f"unsigned division of {a} by {b}"
    assert a >> (bits - 1) == 0 == b >> (bits - 1), f"division of {a} by {b} in {bits} bits"
    return divmod(a, b)


def _one(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: float32(f(float32(x)))


def _library(name: str) -> Callable[[Any], Any]:
    function = getattr(torch, name)
    return lambda x: float32(function(torch.tensor(float32(x))).item())


def _erf(x: Any) -> Any:
    return float32(math.erf(float(x)))


PLAIN: dict[str, Callable[..., Any]] = {
    "ex2": _one(np.exp2),
    "rcp": lambda x: float32(1) / float32(x),
    "fma": lambda a, b, c: float32(float(a) * float(b) + float(c)),
    "sel": lambda c, a, b: a if c else b,
    "fmax": _largest,
    "fmin": _smallest,
    "rsqrt": lambda x: float32(1) / np.sqrt(float32(x)),
    "sqrt": _one(np.sqrt),
    "rint": _one(np.rint),
    "pin": int32,
    "popc": lambda x: (int(x) & 0xFFFFFFFF).bit_count(),
    "to_l2": lambda p, at: p.check_access(at, 1, p.short),
    "rounds": int,
    "least": lambda a, b: min(int32(a), int32(b)),
    "least64": lambda a, b: min(int64(a), int64(b)),
    "udiv": lambda a, b: _divide(a, b)[0],
    "urem": lambda a, b: _divide(a, b)[1],
    "udiv64": lambda a, b: _divide(a, b, 64)[0],
    "urem64": lambda a, b: _divide(a, b, 64)[1],
    "tanh_": _one(np.tanh),
    "sigmoid_": lambda x: float32(1) / (float32(1) + np.exp(-float32(x))),
    "mod_": lambda x, y: float32(np.remainder(float32(x), float32(y))),
    "rcp_rn": lambda x: float32(1) / float32(x),
    "sqrt_rn": _one(np.sqrt),
    "rsqrt_rn": lambda x: float32(1) / np.sqrt(float32(x)),
    "sigmoid_rn": lambda x: float32(1) / (float32(1) + np.exp(-float32(x))),
    "erf_": _erf,
    "cluster_arrive": lambda: None,
}
"""Also what the operators of ``targets.cuda.printer`` are made of."""
_LIBDEVICE = {
    "expf": _one(np.exp),
    "exp2f": _one(np.exp2),
    "erff": _erf,
    "tanhf": _one(np.tanh),
    **{f"{name}f": _library(name) for name in LIBRARY},
    "powf": lambda a, b: float32(np.power(float32(a), float32(b))),
    "floorf": _one(np.floor),
    "ceilf": _one(np.ceil),
    "truncf": _one(np.trunc),
}
_MATH = {"log": _one(np.log), "log2": _one(np.log2), "copysign": lambda a, b: float32(np.copysign(a, b))}


def names() -> dict[str, Any]:
    """The names that every kernel uses."""
    return {
        "math": SimpleNamespace(**_MATH),
        "libdevice": SimpleNamespace(**_LIBDEVICE),
        "inf": float32(np.inf),
        "float32": float32,
        "int32": int32,
        "uint32": uint32,
        "int64": int64,
        "boolean": bool,
        **PLAIN,
    }
