"""Kernels that tests tune: one that works, and one that does to its process whatever kernels do."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np

import autotune
from autotune.domains.kernel.kernel import Call
from tests.support.clock import stuck, timed

FACTOR = 2.0


def doubled(x: Any) -> Any:
    """The reference."""
    timed().busy(5.0)
    return x.astype(np.float64) * FACTOR


def make(n: int, seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).standard_normal(n).astype(np.float32)}


def _part(x: Any) -> Any:
    timed().busy(10.0)
    return x * np.float32(FACTOR)


@autotune.tunable(
    space={"block": [16, 64, 256], "late": [False, True]},
    key=["x"],
    reference=doubled,
    inputs=make,
    shapes=[{"n": 256}],
    constraints=["block <= 128 or not late"],
    metrics={"MB/s": lambda call: 2 * call.arguments["x"].nbytes / (call.us or 1.0)},
)
def scale(x: Any, block: int = 16, *, late: bool = False) -> Any:
    """Twice ``x``, by blocks; the smaller they are, the longer it takes."""
    out = np.empty_like(x)
    for lo in range(0, len(x), block):
        out[lo : lo + block] = _part(x[lo : lo + block])
    if late:
        timed().busy(2000.0)
    return out


@autotune.tunable(
    space={"how": ["good", "wrong", "raise", "exit", "crash", "hang", "unlike"]},
    default={"how": "good"},
    key=["x"],
    reference=doubled,
    inputs=make,
    shapes=[{"n": 64}],
)
def odd(x: Any, how: str = "good") -> Any:
    """Effects of kernels, by their names."""
    if how == "raise":
        raise ValueError("no luck")
    if how == "exit":
        os._exit(3)
    if how == "crash":
        ctypes.string_at(0)
    while how == "hang":
        stuck()
        time.sleep(60)
    if how == "unlike":
        return _part(x), 1
    return _part(x) + (1 if how == "wrong" else 0)


def _entropy(call: Call) -> float:
    return 100.0 - float(call.config["level"])


@autotune.tunable(
    space={"level": [1, 2, 3]},
    key=["x"],
    inputs=make,
    shapes=[{"n": 8}],
    objective=autotune.Objective(lambda call: 10.0 * call.config["level"], "points", "max", name="score"),
    metrics={"left": _entropy},
)
def scored(x: Any, level: int = 1) -> Any:
    """Its objective is no time: the highest level is best."""
    return x + 1


@autotune.tunable(space={"a": [1, 2]}, key=["x"], reference=lambda x, out: out.__setitem__(..., x + 1), inputs=make)
def written(x: Any, out: Any = None, a: int = 1) -> None:
    """Not searched: its inputs lack what it writes to."""


def refused(x: Any) -> Any:
    raise RuntimeError("no reference today")


def endless(x: Any) -> Any:
    while True:
        stuck()
        time.sleep(60)


def no_inputs(n: int) -> Any:
    raise MemoryError(f"{n} is too much")


def dying(n: int) -> Any:
    os._exit(7)


def _plain(x: Any, block: int = 1) -> Any:
    return x


def plain(x: Any, block: int = 1) -> Any:
    """Declared by files alone."""
    return _plain(x, block)


def _kernel(name: str, **how: Any) -> Any:
    def kernel(x: Any, block: int = 1) -> Any:
        return x

    kernel.__qualname__ = name
    return autotune.tunable(space={"block": [1, 2]}, key=["x"], shapes=[{"n": 4}], **how)(kernel)


refuses = _kernel("refuses", inputs=make, reference=refused)
hangs = _kernel("hangs", inputs=make, reference=endless)
lacks = _kernel("lacks", inputs=no_inputs)
dies = _kernel("dies", inputs=dying)
unfit = _kernel("unfit", inputs=lambda n: {"y": n})
doubly = _kernel("doubly", inputs=lambda n: {"x": n, "block": 2})
