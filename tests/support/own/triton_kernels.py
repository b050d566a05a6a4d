"""Triton kernels that tests tune with Triton's interpreter: set TRITON_INTERPRET=1 before this is imported."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import autotune


def make(n: int) -> dict[str, Any]:
    return {"x": torch.arange(float(n)), "y": torch.zeros(n), "n": n}


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def reference(x: Any, y: Any, n: int) -> Any:
    return 2 * x.double()


CONFIGS = [
    triton.Config({"BLOCK": 16}, num_warps=2),
    triton.Config({"BLOCK": 32}, num_warps=4),
    triton.Config({"BLOCK": 64}, num_warps=4, num_stages=2),
]


def _double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


double = triton.autotune(configs=CONFIGS, key=["n"])(triton.jit(_double))
"""With Triton's own decorator, as many programs have it; see :data:`tuned`."""

tuned = autotune.tunable.from_triton(
    double, inputs=make, grid=grid, reference=reference, outputs=["y"], shapes=[{"n": 100}], name="tuned"
)


@autotune.triton_autotune(
    configs=CONFIGS, key=["n"], inputs=make, grid=grid, shapes=[{"n": 100}], reset_to_zero=["y"], name="added"
)
@triton.jit
def added(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds to what ``y`` holds, so that it has to be zero before each run."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@autotune.tunable(
    space={"BLOCK": [16, 32], "num_warps": [1, 4]},
    key=["n"],
    inputs=make,
    grid=grid,
    default={"BLOCK": 16},
    shapes=[{"n": 100}],
)
@triton.jit
def product(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product of choices, as other kernels have; no reference, so that the default is one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * tl.load(x + at, mask=at < n), mask=at < n)
