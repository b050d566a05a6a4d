"""Selection of the kernel for attention with a mask that is an input, from measurements."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 128
"""Largest head size; above it the kernels in Triton would spill."""
LEAST_QUERIES = 1024
"""Least query rows. With 512, launching the replacement of a mask takes the host longer than the mask (BERT-large)."""
_LARGEST_GRID = 65535
"""Most blocks along the second axis of a CUDA grid, one for each head of a batch row."""


def kernel_of(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, dropout: float, scale: float
) -> str | None:
    """The fused kernel of a call without its key mask; None if the call is not rewritten.

    On H100 and H200 flash attention by lengths took less device time than cuDNN with a mask, and cuDNN without a mask
    less than flash attention (`decision 028 <../decisions/028-masks-that-come-with-the-data.md>`_). Other devices were
    not measured.
    """
    if not _run_by_triton(query, key, value) or torch.are_deterministic_algorithms_enabled():
        return None
    # Imported for a call that is rewritten: registering operators takes tens of milliseconds.
    from autotune.compiler.capture.attention.padded import BY_LENGTHS, CUDNN, FLASH

    cuda = torch.backends.cuda
    told = cuda.SDPAParams(query, key, value, None, float(dropout), causal, True)
    if causal and not window and cuda.can_use_cudnn_attention(told, False):
        return CUDNN
    if not cuda.can_use_flash_attention(told, False):
        return None
    return FLASH if causal else BY_LENGTHS


def has_spans(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if a call whose rows see spans of keys runs by spans."""
    indices_fit = query.shape[2] * key.shape[2] < 2**31  # of 32 bits, into the mask of a batch row
    return not dropout and indices_fit and _run_by_triton(query, key, value)


def _run_by_triton(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernels of :mod:`.rows` and :mod:`.spans` accept a call and gain by it."""
    if query.device.type != "cuda" or query.dtype not in _HALF:
        return False
    if query.shape[0] * query.shape[1] > _LARGEST_GRID or query.shape[2] < LEAST_QUERIES:
        return False
    if query.shape[-1] % 8 or query.shape[-1] > _LARGEST_HEAD or any(t.stride(-1) != 1 for t in (query, key, value)):
        return False
    return torch.cuda.get_device_capability(query.device) == (9, 0) and _has_triton()


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
