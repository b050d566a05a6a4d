"""The Triton product of ``examples/own_kernels`` in a space that is measured whole, and with a list of configurations
as ``triton.autotune`` takes it."""

from __future__ import annotations

import itertools

import triton

import autotune
from examples.own_kernels.matmul import flops, grid, make_inputs, reference
from examples.own_kernels.matmul import product as example

SIDE = 4096
KEY = ["m", "n", "k"]

product = autotune.tunable(
    space={
        "TILE_M": [64, 128, 256],
        "TILE_N": [64, 128, 256],
        "TILE_K": [32, 64, 128],
        "BAND": [1, 8],
        "num_warps": [4, 8],
        "num_stages": [2, 3, 4],
    },
    constraints=["TILE_M * TILE_N <= 32768"],
    default={"TILE_M": 128, "TILE_N": 128, "TILE_K": 32, "BAND": 8, "num_warps": 4, "num_stages": 4},
    key=KEY,
    inputs=make_inputs,
    reference=reference,
    outputs=["c"],
    grid=grid,
    shapes=[{"m": SIDE, "n": SIDE, "k": SIDE}],
    metrics={"TFLOP/s": flops},
    name="triton_product",
)(example.kernel.fn)
"""288 candidates, of which some need more shared memory than there is."""

CONFIGS = [
    triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k, "BAND": 8}, num_stages=stages, num_warps=warps)
    for (m, n), k, stages, warps in itertools.product(
        [(64, 128), (128, 64), (128, 128), (128, 256), (256, 128)], [32, 64], [3, 4], [4, 8]
    )
]
"""40 of them, as a program lists them for ``triton.autotune``."""

theirs = triton.autotune(configs=CONFIGS, key=KEY)(example.kernel.fn)
"""The kernel as a program has it that does not know this package."""

ours = autotune.tunable.from_triton(
    theirs,
    inputs=make_inputs,
    reference=reference,
    outputs=["c"],
    grid=grid,
    shapes=[{"m": SIDE, "n": SIDE, "k": SIDE}],
    name="triton_product_listed",
)
"""The same, converted by one line."""
