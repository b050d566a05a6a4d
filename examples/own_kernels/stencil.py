"""A Numba kernel of one's own, tuned on the CPU: one step of heat flow over a grid, by blocks.

    autotune search kernel examples.own_kernels.stencil:heat --device cpu --timeout 60
    autotune lookup kernel examples.own_kernels.stencil:heat --device cpu

Afterwards ``heat(grid, out)`` runs the stored configuration of the grid's size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

import autotune

Array = np.ndarray[Any, Any]


@cache
def compiled(unroll: int, parallel: bool) -> Callable[..., None]:
    """The kernel for compile-time constants: Numba sees ``unroll`` as a number, and unrolls the loop over it."""

    @numba.njit(parallel=parallel, fastmath=True)
    def step(grid: Array, out: Array, rows: int, columns: int) -> None:
        height, width = grid.shape
        strips = (height - 2 + rows - 1) // rows
        for strip in numba.prange(strips):
            top = 1 + strip * rows
            bottom = min(top + rows, height - 1)
            for left in range(1, width - 1, columns):
                right = min(left + columns, width - 1)
                for i in range(top, bottom):
                    for j in range(left, right - unroll + 1, unroll):
                        for k in range(unroll):
                            out[i, j + k] = 0.6 * grid[i, j + k] + 0.1 * (
                                grid[i - 1, j + k] + grid[i + 1, j + k] + grid[i, j + k - 1] + grid[i, j + k + 1]
                            )
                    for j in range(right - (right - left) % unroll, right):
                        out[i, j] = 0.6 * grid[i, j] + 0.1 * (
                            grid[i - 1, j] + grid[i + 1, j] + grid[i, j - 1] + grid[i, j + 1]
                        )

    return step


def reference(grid: Array, out: Array) -> None:
    """The same in NumPy, in double precision."""
    g = grid.astype(np.float64)
    out[1:-1, 1:-1] = 0.6 * g[1:-1, 1:-1] + 0.1 * (g[:-2, 1:-1] + g[2:, 1:-1] + g[1:-1, :-2] + g[1:-1, 2:])


def make_inputs(height: int, width: int, seed: int = 0) -> dict[str, Array]:
    grid = np.random.default_rng(seed).random((height, width), dtype=np.float32)
    return {"grid": grid, "out": np.zeros_like(grid)}


@autotune.tunable(
    space={
        "rows": [1, 2, 4, 8, 16, 32, 64, 128],
        "columns": [64, 128, 256, 512, 1024, 4096],
        "unroll": [1, 4, 8, 16],
        "parallel": [False, True],
    },
    key=["grid"],
    constraints=["columns >= 8 * unroll"],
    reference=reference,
    inputs=make_inputs,
    shapes=[{"height": 1024, "width": 1024}, {"height": 512, "width": 4096}],
    metrics={"GB/s": lambda call: 2 * call.arguments["grid"].nbytes / call.us / 1e3},
)
def heat(
    grid: Array, out: Array, *, rows: int = 16, columns: int = 512, unroll: int = 1, parallel: bool = False
) -> None:
    """One step: each cell keeps 0.6 of its heat and takes a tenth of each neighbour's. The border stays as it is."""
    compiled(unroll, parallel)(grid, out, rows, columns)


if __name__ == "__main__":
    plate = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
    after = plate.copy()
    heat(plate, after)
    found = heat.lookup(plate, after)
    print(f"{found.level}: {found.config}{f' ({found.reason})' if found.reason else ''}")
