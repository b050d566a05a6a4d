"""Kernels of attention with a mask that is an input: their selection, from measurements, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.compiler.capture.attention.calls import at_hints, fits

BY_LENGTHS, CUDNN, FLASH = "lengths", "cudnn", "flash"
"""The fused kernels: flash attention by lengths, and two of a structure. Only flash attention has windows."""
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 128
"""Largest head size; above it the kernels in Triton would spill."""
LEAST_QUERIES = 1024
"""Least query rows. With 512, launching the replacement of a mask takes the host longer than the mask (BERT-large)."""
_LARGEST_GRID = 65535
"""Most blocks along the second axis of a CUDA grid, one for each head of a batch row."""
_MOST_COMPILED = 4096
_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels by all that a launch is given. Lengths that vary bring other numbers, so that it is emptied at times."""


def kernel_of(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, dropout: float, scale: float
) -> str | None:
    """The fused kernel of a call without its key mask; None if the call is not rewritten.

    Symbolic sizes are compared as they are at compile time.

    On H100 and H200 flash attention by lengths took less device time than cuDNN with a mask, and cuDNN without a mask
    less than flash attention (`decision 028 <../decisions/028-masks-that-come-with-the-data.md>`_). Other devices were
    not measured.
    """
    given = _run_by_triton(query, key, value)
    if given is None or torch.are_deterministic_algorithms_enabled():
        return None
    cuda = torch.backends.cuda
    parameters = cuda.SDPAParams(*given, None, float(dropout), causal, True)
    if causal and not window and cuda.can_use_cudnn_attention(parameters, False):
        return CUDNN
    if not cuda.can_use_flash_attention(parameters, False):
        return None
    return FLASH if causal else BY_LENGTHS


def has_spans(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if a call whose rows see spans of keys runs by spans."""
    if dropout or _run_by_triton(query, key, value) is None:
        return False
    return fits(query.shape[2] * key.shape[2], 2**31 - 1)  # indices of 32 bits, into the mask of a batch row


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
            if len(_compiled) >= _MOST_COMPILED:
                _compiled.clear()
            _compiled[key] = known
    else:
        known[(*grid, 1)](*tensors, *numbers, stream=torch._C._cuda_getCurrentRawStream(device.index))


def _run_by_triton(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The tensors at compile time, if the kernels of :mod:`.rows` and :mod:`.spans` accept a call and gain by it."""
    if query.device.type != "cuda" or query.dtype not in _HALF:
        return None
    if any(type(t.stride(-1)) is not int or t.stride(-1) != 1 for t in (query, key, value)):
        return None
    if query.shape[-1] % 8 or query.shape[-1] > _LARGEST_HEAD:
        return None
    if torch.cuda.get_device_capability(query.device) != (9, 0) or not _has_triton():
        return None
    q, k, v = map(at_hints, (query, key, value))
    if q is None or k is None or v is None or q.shape[2] < LEAST_QUERIES:
        return None
    return (q, k, v) if fits(query.shape[0] * query.shape[1], _LARGEST_GRID) else None


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
