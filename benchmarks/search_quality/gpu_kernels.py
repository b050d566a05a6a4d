"""A kernel for a GPU that anybody might bring, in a space that is measured whole: a convolution in Numba CUDA, with the
parameters that such kernels have.

    autotune search kernel benchmarks.search_quality.gpu_kernels:convolve --device cuda:0
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cuda, float32

import autotune

SIDE = 17
"""Of the filter."""


@cache
def compiled(threads_x: int, threads_y: int, across: int, down: int, keep: str) -> Any:
    """The kernel for compile-time constants. Blocks of ``threads_x`` by ``threads_y`` threads make ``across`` times
    ``down`` results a thread, with the image in global memory, in shared memory, or there with rows of odd length."""
    wide, high = threads_x * across, threads_y * down
    rows, columns = high + SIDE - 1, wide + SIDE - 1
    length = columns + (1 - columns % 2 if keep == "padded" else 0)

    def direct(image, weights, out):  # type: ignore[no-untyped-def]
        x = cuda.blockIdx.x * wide + cuda.threadIdx.x
        y = cuda.blockIdx.y * high + cuda.threadIdx.y
        sums = cuda.local.array((down, across), float32)
        for b in range(down):
            for a in range(across):
                sums[b, a] = 0
        for i in range(SIDE):
            for j in range(SIDE):
                weight = weights[i, j]
                for b in range(down):
                    for a in range(across):
                        sums[b, a] += weight * image[y + b * threads_y + i, x + a * threads_x + j]
        for b in range(down):
            for a in range(across):
                out[y + b * threads_y, x + a * threads_x] = sums[b, a]

    def staged(image, weights, out):  # type: ignore[no-untyped-def]
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        left, top = cuda.blockIdx.x * wide, cuda.blockIdx.y * high
        part = cuda.shared.array((rows, length), float32)
        for i in range(y, rows, threads_y):
            for j in range(x, columns, threads_x):
                part[i, j] = image[top + i, left + j]
        cuda.syncthreads()
        sums = cuda.local.array((down, across), float32)
        for b in range(down):
            for a in range(across):
                sums[b, a] = 0
        for i in range(SIDE):
            for j in range(SIDE):
                weight = weights[i, j]
                for b in range(down):
                    for a in range(across):
                        sums[b, a] += weight * part[y + b * threads_y + i, x + a * threads_x + j]
        for b in range(down):
            for a in range(across):
                out[top + y + b * threads_y, left + x + a * threads_x] = sums[b, a]

    with _folder(f"{threads_x}-{threads_y}-{across}-{down}-{keep}") as kept:
        return cuda.jit(cache=kept)(direct if keep == "global" else staged)


@contextmanager
def _folder(name: str) -> Iterator[bool]:
    """A folder for each candidate under $NUMBA_CACHE_DIR, if that is set: Numba's index of a folder is not made for
    several processes that write it."""
    from numba.cuda.core import config

    above = os.environ.get("NUMBA_CACHE_DIR", "")
    before = config.CACHE_DIR
    config.CACHE_DIR = str(Path(above, name)) if above else before
    try:
        yield bool(above)
    finally:
        config.CACHE_DIR = before


def make_image(n: int, device: str = "cuda", seed: int = 0) -> dict[str, torch.Tensor]:
    """An image with a margin, and a filter; ``n`` is a multiple of 512."""
    made = torch.Generator(device).manual_seed(seed)
    image = torch.randn(n + SIDE - 1, n + SIDE - 1, generator=made, device=device)
    weights = torch.randn(SIDE, SIDE, generator=made, device=device)
    return {"image": image, "weights": weights, "out": torch.zeros(n, n, device=device)}


def convolved(image: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same in double precision, by shifted images."""
    n, m = out.shape
    total = torch.zeros(n, m, dtype=torch.float64, device=image.device)
    for i in range(SIDE):
        for j in range(SIDE):
            total += weights[i, j].double() * image[i : i + n, j : j + m].double()
    return total


@autotune.tunable(
    space={
        "threads_x": [16, 32, 64, 128],
        "threads_y": [1, 2, 4, 8],
        "across": [1, 2, 4],
        "down": [1, 2, 4],
        "keep": ["global", "shared", "padded"],
    },
    constraints=[
        "threads_x * threads_y >= 64",
        "keep == 'global' or (threads_x * across + 17) * (threads_y * down + 16) <= 12288",
        "keep != 'padded' or threads_x <= 32",
    ],
    default={"threads_x": 32, "threads_y": 4, "across": 1, "down": 1, "keep": "global"},
    key=["image"],
    inputs=make_image,
    reference=convolved,
    outputs=["out"],
    shapes=[{"n": 4096}],
    metrics={"GFLOP/s": lambda call: 2e-3 * SIDE * SIDE * call.arguments["out"].numel() / call.us},
)
def convolve(image, weights, out, threads_x=32, threads_y=4, across=1, down=1, keep="global"):  # type: ignore[no-untyped-def]
    """A square filter over an image whose sides are multiples of a block's, on torch's current stream."""
    height, width = out.shape
    grid = (width // (threads_x * across), height // (threads_y * down))
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    compiled(threads_x, threads_y, across, down, keep)[grid, (threads_x, threads_y), stream](image, weights, out)
