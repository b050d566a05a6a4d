"""A kernel of Numba CUDA with parameters, as a user has it; see ``user_check.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import autotune


@cache
def compiled(unroll: int) -> Any:
    from numba import cuda

    @cuda.jit
    def kernel(x, y, out):  # type: ignore[no-untyped-def]
        first = cuda.grid(1) * unroll
        for k in range(unroll):
            at = first + k
            if at < x.shape[0]:
                out[at] = 2.0 * x[at] + y[at]

    return kernel


def make(n: int, seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(n, generator=made), "y": torch.randn(n, generator=made), "out": torch.zeros(n)}


def reference(x: Any, y: Any, out: Any) -> Any:
    return 2.0 * x.double() + y.double()


@autotune.tunable(
    space={"unroll": [1, 2, 4, 8], "threads": [64, 128, 256, 512]},
    key=["x"],
    inputs=make,
    reference=reference,
    outputs=["out"],
    shapes=[{"n": 1 << 24}],
    metrics={"GB/s": lambda call: 12e-3 * call.arguments["x"].numel() / call.us},
)
def scaled_sum(x, y, out, unroll=1, threads=128):  # type: ignore[no-untyped-def]
    """``out = 2 x + y`` on torch's current stream."""
    from numba import cuda

    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    blocks = -(-x.shape[0] // (threads * unroll))
    compiled(unroll)[blocks, threads, stream](x, y, out)
