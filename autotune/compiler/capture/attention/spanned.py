"""Attention by spans of keys, as operators: masks of packed documents, computed without a look at the data on the host.

A query row's *span* reaches from the first key that it sees to the last. :func:`_spans` computes all spans of a mask on
the device, once for all layers. The kernels of :mod:`.spans` skip the blocks outside of spans, and read the mask only
if a row does not see all keys of its span. So results are right for any mask, and no number of documents is a limit.

A query that sees no key gets zeros, as in torch's formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.compiler.capture.attention.launching import differentiable
from autotune.compiler.capture.attention.sizes import LAST, index_dtype

_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mask_spans(Tensor mask) -> (Tensor, Tensor, Tensor)")
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor mask, Tensor rows, Tensor keys, Tensor holes"
_library.define(f"spanned_attention({_GIVEN}, float scale) -> Tensor")
_library.define(f"spanned_attention_forward({_GIVEN}, float scale) -> (Tensor, Tensor)")
_library.define(
    f"spanned_attention_backward(Tensor grad, {_GIVEN}, Tensor output, Tensor logsumexp, float scale) "
    "-> (Tensor, Tensor, Tensor)"
)


def _spans(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the spans of a mask, without a synchronisation.

    Args:
        mask: bool [B, queries, keys], True where a key is seen.

    Returns:
        int32 ``[B, 2, queries]``: the first key that each row sees, and the end of the keys that it sees. int32
        ``[B, 2, keys]``: the first row that sees each key, and the end of these rows. int32 ``[B]``: 1 if a row does
        not see all keys of its span. An empty span begins behind the last index and ends at 0.
    """
    queries, keys = mask.shape[1:]
    dtype = index_dtype(queries, keys)
    row = torch.arange(queries, device=mask.device, dtype=dtype)[:, None]
    key = torch.arange(keys, device=mask.device, dtype=dtype)
    low, high = torch.where(mask, key, LAST).amin(2).clamp(max=keys), torch.where(mask, key + 1, 0).amax(2)
    first, end = torch.where(mask, row, LAST).amin(1).clamp(max=queries), torch.where(mask, row + 1, 0).amax(1)
    holes = (mask.sum(2, dtype=torch.int32) < high - low).any(1)
    return torch.stack([low, high], 1).int(), torch.stack([first, end], 1).int(), holes.int()


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from autotune.compiler.capture.attention import spans

    return spans.forward(q, k, v, mask, rows, holes, scale)


def _backward_cuda(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from autotune.compiler.capture.attention import spans

    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    return spans.backward(grad, q, k, v, mask, rows, keys, holes, out, lse, scale)


def _forward_fake(q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, size = q.shape
    out = q.new_empty(batch, queries, heads, size).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.float32)


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_library.impl("mask_spans", _spans, "CompositeImplicitAutograd")
_library.impl("spanned_attention", differentiable("spanned_attention"), "CompositeImplicitAutograd")
_library.impl("spanned_attention_forward", _forward_cuda, "CUDA")
_library.impl("spanned_attention_backward", _backward_cuda, "CUDA")
torch.library.register_fake("autotune::spanned_attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("autotune::spanned_attention_backward", _backward_fake, lib=_library)

SPANS, SPANNED = torch.ops.autotune.mask_spans.default, torch.ops.autotune.spanned_attention.default
