"""Launches of Triton kernels with little time of the host, for operators that run in each layer of a step."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: tuple[Any, ...],
    warps: int = 4, stages: int = 3,
) -> None:  # fmt: skip
    """Launch a kernel that Triton compiled for the same numbers, types and alignments.

    Triton's own launch inspects each argument again, which takes longer than many of these kernels.

    Args:
        kernel: a function under ``triton.jit`` whose parameters are the tensors, then the numbers.
        grid: blocks along the first and the second axis.
        tensors: the tensors, on one device.
        numbers: the other arguments, constants of the kernel included.
        warps: the warps of a block.
        stages: the stages in which a loop's loads are pipelined.
    """
    device = tensors[0].device
    key = (kernel, numbers, warps, stages, device, *[(t.dtype, t.data_ptr() % 16) for t in tensors])
    known = _compiled.get(key)
    if known is None:
        known = kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages)
        if known is not None:  # None of Triton's interpreter
            _compiled[key] = known
    else:
        known[(*grid, 1)](*tensors, *numbers, stream=torch._C._cuda_getCurrentRawStream(device.index))
