"""The spaces of ``benchmarks/recordings``: groups of operators, and a typical user's kernel. Each is
small enough to measure every one of its schedules on one core."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import autotune

Array = np.ndarray[Any, Any]


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def layer_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    out: tuple[Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
        gradient, x, list(x.shape[-1:]), mean, rstd, weight, bias, [True, True, True]
    )
    return out


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    out: Tensor = torch.logsumexp(logits, -1) - logits.gather(1, target[:, None])[:, 0]
    return out


long_softmax = softmax


def softmax_backward(gradient: Tensor, out: Tensor) -> Tensor:
    gradient, out = gradient.float(), out.float()
    return (out * (gradient - (gradient * out).sum(-1, keepdim=True))).bfloat16()


GROUPS = ("column_sum", "bias_gelu", "layer_norm_backward", "layer_norm", "cross_entropy", "softmax")
HELD_OUT = ("softmax_backward", "long_softmax")
"""Groups that were recorded after the cost model had been fitted to the others: on a GPU, and by their names only."""
KERNELS = ("benchmarks.search_quality.spaces:product", "examples.own_kernels.stencil:heat")
GPU_KERNELS = ("benchmarks.search_quality.triton_product:product", "benchmarks.search_quality.gpu_kernels:convolve")
GPU_SPACES = {
    "softmax": "h200_rows.toml",
    "layer_norm": "h200_rows.toml",
    "cross_entropy": "h200_rows.toml",
    "layer_norm_backward": "h200_backward.toml",
    "bias_gelu": "h200_pointwise.toml",
    "column_sum": "h200_columns.toml",
    "softmax_backward": "h200_rows.toml",
    "long_softmax": "h200_long_rows.toml",
}
"""A group to the file beside this one that says which of its schedules are measured on a GPU."""


def inputs(name: str, device: str = "cpu") -> tuple[Tensor, ...]:
    """Arguments of the group called ``name``: two to four MiB in each full-size tensor; on a GPU 16 to 256, in bf16."""
    if device != "cpu":
        return _on_gpu(name, device)
    row = _randn(1024)
    return {
        "softmax": (_randn(1024, 1000),),
        "layer_norm": (_randn(512, 1024), row, row),
        "layer_norm_backward": (_randn(512, 1024), _randn(512, 1024), row, row),
        "bias_gelu": (_randn(512, 2048), _randn(2048)),
        "column_sum": (_randn(2048, 512),),
        "cross_entropy": (_randn(128, 8000), torch.arange(128) * 61),
    }[name]


def _on_gpu(name: str, device: str) -> tuple[Tensor, ...]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    row = randn(1024)
    return {
        "softmax": lambda: (randn(16384, 1000),),
        "layer_norm": lambda: (randn(8192, 1024), row, row),
        "layer_norm_backward": lambda: (randn(8192, 1024), randn(8192, 1024), row, row),
        "bias_gelu": lambda: (randn(8192, 4096), randn(4096)),
        "column_sum": lambda: (randn(16384, 1024),),
        "cross_entropy": lambda: (randn(4096, 32000), torch.arange(4096, device=device)),
        "softmax_backward": lambda: (randn(16384, 2048), randn(16384, 2048)),
        "long_softmax": lambda: (randn(512, 65536),),
    }[name]()


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@cache
def _compiled(pack: bool) -> Any:
    import numba

    @numba.njit(fastmath=True)
    def multiply(a: Array, b: Array, c: Array, rows: int, columns: int, depth: int, inner_rows: bool) -> None:
        m, k = a.shape
        n = b.shape[1]
        panel = np.empty((depth, columns), b.dtype)
        for k0 in range(0, k, depth):
            deep = min(depth, k - k0)
            for j0 in range(0, n, columns):
                wide = min(columns, n - j0)
                if pack:
                    for p in range(deep):
                        panel[p, :wide] = b[k0 + p, j0 : j0 + wide]
                for i0 in range(0, m, rows):
                    high = min(rows, m - i0)
                    for outer in range(deep if inner_rows else high):
                        for inner in range(high if inner_rows else deep):
                            p, i = (outer, i0 + inner) if inner_rows else (inner, i0 + outer)
                            factor = a[i, k0 + p]
                            if pack:
                                for j in range(wide):
                                    c[i, j0 + j] += factor * panel[p, j]
                            else:
                                for j in range(wide):
                                    c[i, j0 + j] += factor * b[k0 + p, j0 + j]

    return multiply


def _matrices(n: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {"a": rng.random((n, n), dtype=np.float32), "b": rng.random((n, n), dtype=np.float32)}


@autotune.tunable(
    space={
        "rows": [1, 4, 16, 64, 256],
        "columns": [16, 32, 64, 128, 256, 384],
        "depth": [4, 16, 64, 128, 384],
        "pack": [False, True],
        "inner_rows": [False, True],
    },
    key=["a"],
    inputs=_matrices,
    reference=lambda a, b: a.astype(np.float64) @ b.astype(np.float64),
    shapes=[{"n": 384}],
    tolerance=1e-3,
)
def product(a: Array, b: Array, *, rows: int = 16, columns: int = 64, depth: int = 64, pack: bool = False,
            inner_rows: bool = False) -> Array:  # fmt: skip
    """A product of two matrices by blocks."""
    c = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    _compiled(pack)(a, b, c, rows, columns, depth, inner_rows)
    return c
