"""Selection of the kernel for attention with a mask that is an input, from measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.compiler.capture.attention.sizes import at_hints, fits

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

    Symbolic sizes are compared as they are at compile time.

    On H100 and H200 flash attention by lengths took less device time than cuDNN with a mask, and cuDNN without a mask
    less than flash attention (`decision 028 <../decisions/028-masks-that-come-with-the-data.md>`_). Other devices were
    not measured.
    """
    given = _run_by_triton(query, key, value)
    if given is None or torch.are_deterministic_algorithms_enabled():
        return None
    # Imported for a call that is rewritten: registering operators takes tens of milliseconds.
    from autotune.compiler.capture.attention.padded import BY_LENGTHS, CUDNN, FLASH

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
