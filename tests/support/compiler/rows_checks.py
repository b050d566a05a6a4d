"""The Triton kernels of the rows of a key mask in Triton's interpreter, against torch's formula in fp64.

Runs in a separate process, as :mod:`tests.support.compiler.spans_checks` does. torch's formula replaces the fused
kernel, which sees the structure alone, or the keys between two lengths. Prints a JSON line for each mask.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from autotune.compiler.capture.attention import rows
from autotune.compiler.capture.attention.operators import _bounds
from tests.support.compiler.padded_attention import gradients, probabilities, seen_probabilities
from tests.support.compiler.spans_checks import accept_numpy

_SIZES = ((3, 1), (2, 33), (2, 70))
"""Batches and lengths, one after the other, as symbols take them."""
_HEADS, _FEW, _SIZE, _SCALE = 4, 2, 16, 0.3


def masks(batch: int, length: int) -> dict[str, Tensor]:
    place, row = torch.arange(length), torch.arange(batch)[:, None]
    count = (length - 9 * row).clamp(min=1)
    ones = torch.ones(batch, length, dtype=torch.bool)
    return {
        "ones": ones, "right": place < count, "left": place >= length - count, "empty": ones & (row != 0),
        "random": torch.rand(batch, length) < 0.5,
    }  # fmt: skip


def structure(queries: int, keys: int, causal: bool, window: int) -> Tensor:
    back = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    return ((back >= 0) | (not causal)) & ((back < window) | (not window))


def by_lengths(cum_query: Tensor, cum_key: Tensor, batch: int, keys: int) -> Tensor:
    """bool [B, 1, 1, keys]: the keys of the sequence that has a batch row's queries."""
    which = torch.tensor([2 * b + int(cum_query[2 * b + 1] == cum_query[2 * b]) for b in range(batch)])
    first, end = (cum_key[which + n] - torch.arange(batch) * keys for n in (0, 1))
    place = torch.arange(keys)
    return ((place >= first[:, None]) & (place < end[:, None]))[:, None, None]


def main() -> None:
    torch.manual_seed(0)
    accept_numpy()
    rows.ROWS, rows.KEYS = 32, 16
    for causal, window, ahead in ((False, 0, 0), (False, 0, 5), (True, 0, 0), (True, 9, 0)):
        for batch, length in _SIZES:
            for name, valid in masks(batch, length).items():
                keys, queries = length, length + ahead
                q, k, v = (torch.randn(batch, n, h, _SIZE).transpose(1, 2)
                           for n, h in ((queries, _HEADS), (keys, _FEW), (keys, _FEW)))  # fmt: skip
                grad = torch.randn(batch, queries, _HEADS, _SIZE).transpose(1, 2)
                wide = [x.double().requires_grad_() for x in (q, k, v)]
                want = probabilities(wide[0], wide[1], valid, causal, window, _SCALE)
                want = want @ wide[2].repeat_interleave(_HEADS // _FEW, 1)
                wants = want, *torch.autograd.grad(want, wide, grad.double())
                bounds, cum_query, cum_key = _bounds(valid, queries, causal)
                seen = structure(queries, keys, causal, window).expand(batch, 1, -1, -1)
                if not causal:
                    seen = by_lengths(cum_query, cum_key, batch, keys).expand(-1, -1, queries, -1)
                p = seen_probabilities(q, k, seen, _SCALE)
                out = (p @ v.repeat_interleave(_HEADS // _FEW, 1)).transpose(1, 2).contiguous().transpose(1, 2)
                lse = torch.zeros(batch, _HEADS, queries)
                how = (out[:1, 0, 0, 0], out[:1, 0, 0, 0]), causal, window, 0.0, _SCALE
                own = rows.forward(q, k, v, valid, bounds, out, lse, *how)
                found = gradients(grad, q, k, v, torch.where(torch.isinf(lse)[..., None], 0.0, p), _SCALE)
                rows.backward(grad, q, k, v, valid, bounds, out, own, how[0], found, *how[1:])
                apart = max(float((x - y).detach().abs().max()) for x, y in zip((out, *found), wants, strict=True))
                print(json.dumps([name, [batch, length, causal, window], bounds[:, 0].tolist(), apart]), flush=True)


if __name__ == "__main__":
    main()
