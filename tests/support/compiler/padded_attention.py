"""The operators of attention with a mask of keys on a CPU: torch's formula, so that graphs with them run in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autotune.compiler.capture.attention.operators  # noqa: F401

REFERENCE = "flash"
_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]


def probabilities(q: Tensor, k: Tensor, valid: Tensor, causal: bool, window: int, scale: float) -> Tensor:
    """[B, H, queries, keys]; zeros for a query that sees no key."""
    back = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None, :]
    seen = valid[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    if causal:
        seen = seen & (back >= 0)
    if window:
        seen = seen & (back < window)
    return seen_probabilities(q, k, seen, scale)


def seen_probabilities(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[B, H, queries, keys] by bool [B, 1, queries, keys], True where a key is seen."""
    scores = q @ _repeated(k, q).transpose(-1, -2) * scale
    return torch.where(seen, scores, -torch.inf).softmax(-1).nan_to_num(0.0).where(seen, 0.0)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, cum_query: Tensor, cum_key: Tensor,
    causal: bool, window: int, dropout: float, scale: float, kernel: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dropout == 0, "the reference has no dropout"
    found = probabilities(q, k, valid, causal, window, scale) @ _repeated(v, q)
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2).copy_(found)
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
    return out, lse, lse.clone(), torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    causal, window, _, scale, _ = rest[-5:]
    return gradients(grad, q, k, v, probabilities(q, k, valid, causal, window, scale), scale)


def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, by the probabilities."""
    dp = grad @ _repeated(v, q).transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = ((x.transpose(-1, -2) @ y).unflatten(1, groups).sum(2) for x, y in ((ds, q), (p, grad)))
    given = (ds @ _repeated(k, q), q), (dk, k), (dv, v)
    dq, dk, dv = (torch.empty_like(like).copy_(x) for x, like in given)
    return dq, dk, dv


_library.impl("padded_attention_forward", _forward, "CPU")
_library.impl("padded_attention_backward", _backward, "CPU")
