"""Runs kernels that are written as text, those of C3's collectives, in which no thread waits for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotune.compiler.targets.cuda.source import Listing
from tests.support.simulator import intrinsics


def run_listing(
    listing: Listing,
    grid: int,
    args: Sequence[Any],
    functions: Mapping[str, Callable[..., Any]],
    seed: int = 0,
    barriers: bool = False,
) -> None:
    """Run the threads of a launch one after the other, in a random order.

    Args:
        functions: the functions that the kernel calls, in addition to arithmetic.
        barriers: barriers are allowed, and do nothing; else one is an error.
    """
    code: dict[str, Any] = {**intrinsics.names(), **functions}
    exec(compile(listing.text, "<kernel>", "exec"), code)
    kernel = code["kernel"]
    for number in np.random.default_rng(seed).permutation(grid * listing.block).tolist():
        block, thread = divmod(number, listing.block)
        places = {"threadIdx": thread, "blockIdx": block, "gridDim": grid}
        code["cuda"] = SimpleNamespace(**{name: SimpleNamespace(x=x) for name, x in places.items()})
        if barriers:
            code["cuda"].syncthreads = lambda: None
        kernel(*args)
