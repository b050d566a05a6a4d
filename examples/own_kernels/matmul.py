"""A matrix product in Triton, with the configurations of a ``triton.autotune`` list as its space.

    autotune search kernel examples.own_kernels.matmul:product --device cuda:0

Without a GPU, Triton's interpreter runs it. This checks the results, and its times mean nothing:

    TRITON_INTERPRET=1 autotune search kernel examples.own_kernels.matmul:product --device cpu --shapes small.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

import autotune


def make_inputs(m: int, n: int, k: int, device: str = "cuda") -> dict[str, Any]:
    dtype = torch.float16 if device != "cpu" else torch.float32
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return {"a": a, "b": b, "c": torch.empty(m, n, device=device, dtype=dtype), "m": m, "n": n, "k": k}


def reference(a: Any, b: Any, c: Any, m: int, n: int, k: int) -> Any:
    return a.double() @ b.double()


def grid(meta: Mapping[str, Any]) -> tuple[int]:
    """A program for each tile of the result."""
    return (triton.cdiv(meta["m"], meta["TILE_M"]) * triton.cdiv(meta["n"], meta["TILE_N"]),)


def flops(call: Any) -> float:
    given = call.arguments
    return 2e-6 * given["m"] * given["n"] * given["k"] / float(call.us)


# A program that has @triton.autotune(configs=..., key=...) here changes this one line.
@autotune.triton_autotune(
    configs=[
        triton.Config({"TILE_M": 128, "TILE_N": 256, "TILE_K": 64, "BAND": 8}, num_stages=3, num_warps=8),
        triton.Config({"TILE_M": 64, "TILE_N": 256, "TILE_K": 32, "BAND": 8}, num_stages=4, num_warps=4),
        triton.Config({"TILE_M": 128, "TILE_N": 128, "TILE_K": 32, "BAND": 8}, num_stages=4, num_warps=4),
        triton.Config({"TILE_M": 128, "TILE_N": 64, "TILE_K": 32, "BAND": 8}, num_stages=4, num_warps=4),
        triton.Config({"TILE_M": 64, "TILE_N": 128, "TILE_K": 32, "BAND": 4}, num_stages=4, num_warps=4),
        triton.Config({"TILE_M": 64, "TILE_N": 32, "TILE_K": 32, "BAND": 4}, num_stages=5, num_warps=2),
        triton.Config({"TILE_M": 32, "TILE_N": 32, "TILE_K": 32, "BAND": 1}, num_stages=5, num_warps=2),
    ],
    key=["m", "n", "k"],
    inputs=make_inputs,
    reference=reference,
    outputs=["c"],
    grid=grid,
    shapes=[{"m": 4096, "n": 4096, "k": 4096}, {"m": 512, "n": 8192, "k": 1024}],
    metrics={"TFLOP/s": flops},
)
@triton.jit
def product(a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """c = a @ b, of matrices stored by rows. Programs walk through bands of BAND tiles, so that tiles that run side by
    side read the same columns of ``b``."""
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    at = tl.program_id(0)
    band = at // (BAND * tiles_n)
    first = band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    inside = at % (BAND * tiles_n)
    row, column = first + inside % height, inside // height
    rows = row * TILE_M + tl.arange(0, TILE_M)
    columns = column * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        left = k - start
        x = tl.load(
            a + rows[:, None] * k + (start + depth)[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < left),
            other=0.0,
        )
        y = tl.load(
            b + (start + depth)[:, None] * n + columns[None, :],
            mask=(depth[:, None] < left) & (columns[None, :] < n),
            other=0.0,
        )
        total = tl.dot(x, y, total)
    inner = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inner)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product, by the configuration that was found for its sizes; nothing is measured here."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    product[grid](a, b, c, m, n, k)
    return c
