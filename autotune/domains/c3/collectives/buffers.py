"""Small helpers that collectives share."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LINE = 128
"""Bytes that chunks are cut at: a cache line, and what wide accesses need."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of "bf16", "f16" or "f32"."""
    import torch

    return {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[name]


def cuts(nbytes: int, chunks: int) -> list[tuple[int, int]]:
    """``nbytes`` in ``chunks`` pieces (offset, size), cut at whole cache lines; the last ones may be empty."""
    step = -(-nbytes // (chunks * _LINE)) * _LINE
    out = []
    for c in range(chunks):
        begin = min(nbytes, c * step)
        out.append((begin, min(nbytes, begin + step) - begin))
    return out


def pieces(numel: int, chunks: int) -> list[tuple[int, int]]:
    """``numel`` elements in ``chunks`` pieces (begin, end) that differ by one element at most; some may be empty."""
    bounds = [numel * c // chunks for c in range(chunks + 1)]
    return list(itertools.pairwise(bounds))
