"""The operators of attention by spans on a CPU, so that graphs with them run in tests.

As the kernels, they read a mask only for batch rows with holes in a span.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autotune.compiler.capture.attention.operators  # noqa: F401
from tests.support.compiler.padded_attention import gradients, seen_probabilities

_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]


def seen(mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor) -> Tensor:
    """[B, queries, keys] by the spans, checked against the mask."""
    queries, count = mask.shape[1:]
    place, row = torch.arange(count), torch.arange(queries)[:, None]
    by_rows = (place >= rows[:, 0, :, None]) & (place < rows[:, 1, :, None])
    by_keys = (row >= keys[:, 0, None, :]) & (row < keys[:, 1, None, :])
    assert not bool((mask & ~by_rows).any())
    assert not bool((mask & ~by_keys).any())
    return torch.where((holes != 0)[:, None, None], mask, by_rows)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    found = seen_probabilities(q, k, seen(mask, rows, keys, holes)[:, None], scale)
    found = found @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.empty_like(q.transpose(1, 2)).transpose(1, 2).copy_(found), q.new_zeros(q.shape[:3]).float()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = seen_probabilities(q, k, seen(mask, rows, keys, holes)[:, None], scale)
    return gradients(grad, q, k, v, p, scale)


_library.impl("spanned_attention_forward", _forward, "CPU")
_library.impl("spanned_attention_backward", _backward, "CPU")
