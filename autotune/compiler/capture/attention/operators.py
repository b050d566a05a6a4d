"""Attention with a mask that comes with the data, as operators without decisions on the host.

**By lengths**, for a mask of ``valid[b, key]`` and a known structure: none, a triangle, a window. Most batches need no
dense mask for it. :func:`_bounds` computes the lengths on the device, once for all layers. Then:

- Without a structure, flash attention runs by lengths. Each batch row is two sequences: the valid keys with all
  queries, and the padding without queries. Nothing is gathered, and gradients of padding are zeros.
- With a structure, the fused kernel runs as if no other key were hidden.
- :mod:`.rows` computes the rows for which that is wrong: those of a mask with holes, and those after the first hidden
  key of a causal mask. Without such rows, its kernels return at once.

**By spans**, for other masks, such as those of packed documents. A query row's *span* reaches from the first key that
it sees to the last. :func:`_spans` computes all spans on the device, once for all layers. The kernels of :mod:`.spans`
skip the blocks outside of spans, and read the mask only if a row does not see all keys of its span. So results are
right for any mask, and no number of documents is a limit.

A query that sees no key gets zeros, as in torch's formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune.compiler.capture.attention.kernels import BY_LENGTHS, CUDNN, FLASH

aten = torch.ops.aten

_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mask_bounds(Tensor valid, SymInt queries, bool causal) -> (Tensor, Tensor, Tensor)")
_PADDED = (
    "Tensor query, Tensor key, Tensor value, Tensor valid, Tensor bounds, Tensor cum_query, Tensor cum_key, "
    "bool causal, int window, float dropout_p, float scale, str kernel"
)
_library.define(f"padded_attention({_PADDED}) -> Tensor")
_library.define(
    f"padded_attention_forward({_PADDED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    "padded_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor valid, Tensor bounds, "
    "Tensor cum_query, Tensor cum_key, Tensor output, Tensor logsumexp, Tensor own, Tensor seed, Tensor offset, "
    "bool causal, int window, float dropout_p, float scale, str kernel) -> (Tensor, Tensor, Tensor)"
)
_library.define("mask_spans(Tensor mask) -> (Tensor, Tensor, Tensor)")
_SPANNED = "Tensor query, Tensor key, Tensor value, Tensor mask, Tensor rows, Tensor keys, Tensor holes"
_library.define(f"spanned_attention({_SPANNED}, float scale) -> Tensor")
_library.define(f"spanned_attention_forward({_SPANNED}, float scale) -> (Tensor, Tensor)")
_library.define(
    f"spanned_attention_backward(Tensor grad, {_SPANNED}, Tensor output, Tensor logsumexp, float scale) "
    "-> (Tensor, Tensor, Tensor)"
)

_ours: Any = torch.ops.autotune
BOUNDS, PADDED = _ours.mask_bounds.default, _ours.padded_attention.default
SPANS, SPANNED = _ours.mask_spans.default, _ours.spanned_attention.default

_TENSORS = 7
"""Leading arguments of both operators that are tensors; the first three have gradients."""
_LAST = 2**31 - 1
"""The largest int32, behind all indices."""


def _differentiable(name: str) -> Callable[..., Tensor]:
    """The function of an attention operator with a gradient.

    AOTAutograd traces through it, so that a step calls operators without autograd.

    Args:
        name: of two operators. ``autotune::NAME_forward`` returns the output, then tensors for the backward pass.
            ``NAME_backward`` takes the output's gradient, the tensors among the arguments, all results, and the
            other arguments. It returns the gradients of query, key and value.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            found = getattr(_ours, f"{name}_forward").default(*given)
            ctx.save_for_backward(*given[:_TENSORS], *found)
            ctx.how = given[_TENSORS:]
            ctx.set_materialize_grads(False)
            return found[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
            found = (None,) * 3
            if grad is not None:
                found = getattr(_ours, f"{name}_backward").default(grad, *ctx.saved_tensors, *ctx.how)
            return (*found, *[None] * (_TENSORS - 3 + len(ctx.how)))

    return lambda *given: Attention.apply(*given)  # type: ignore[no-untyped-call]


def _index_dtype(*sizes: Any) -> torch.dtype:
    """Return the type for minima and maxima of indices along axes of these sizes: int64 if one is a symbol.

    Triton's kernel for a part of a reduction counts from a symbol in int64. Torch 2.11 accumulates by the operator's
    type, and Triton refuses an int32 accumulator of int64 numbers.
    """
    return torch.int32 if all(type(size) is int for size in sizes) else torch.int64


# By lengths


def _bounds(valid: Tensor, queries: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the bounds of a key mask, without a synchronisation.

    Args:
        valid: bool [B, keys], True where a key is seen.
        queries: the number of query rows.
        causal: True if a query sees no later key; then only rows after a hidden key differ from those without a mask.

    Returns:
        int32 ``[B, 3]``: the first query row that :mod:`.rows` computes, the first valid key, and the end of the valid
        keys. int32 ``[2 B + 1]`` twice: the first query and the first key of each sequence, then their total numbers.
    """
    batch, keys = valid.shape
    place = torch.arange(keys, device=valid.device, dtype=_index_dtype(keys))
    low = torch.where(valid, place, _LAST).amin(1).clamp(max=keys).int()
    high = torch.where(valid, place + 1, 0).amax(1).int()
    if causal:
        first = torch.where(valid, _LAST, place).amin(1).clamp(max=keys).int()
    else:
        seen = valid.sum(1, dtype=torch.int32)
        one_side = (seen == 0) | ((seen == high - low) & ((low == 0) | (high == keys)))
        first = torch.where(one_side, queries, 0).int()  # torch 2.15 specializes the sizes of a stack of several dtypes
    # The first of a batch row's two sequences has the padding on the left, or all queries.
    is_left = (low > 0) & (high > 0)
    row = torch.arange(batch, device=valid.device, dtype=torch.int32)
    starts_of_queries = torch.stack([row * queries, torch.where(is_left, row, row + 1) * queries], 1).flatten()
    starts_of_keys = torch.stack([row * keys, row * keys + torch.where(is_left, low, high)], 1).flatten()
    ends = (torch.full_like(row[:1], batch * n) for n in (queries, keys))
    cumulative = [torch.cat([s, e]).int() for s, e in zip((starts_of_queries, starts_of_keys), ends, strict=True)]
    return torch.stack([first, low, high], 1), cumulative[0], cumulative[1]


def _flat(x: Tensor) -> Tensor:
    """View [B, H, S, D] as [B S, H, D]; other strides cost a copy."""
    (batch, heads, length, size), strides = x.shape, x.stride()
    if strides[0] == length * strides[2]:  # one operator, where the host's time matters
        return x.as_strided((batch * length, heads, size), (strides[2], strides[1], strides[3]))
    return x.transpose(1, 2).flatten(0, 1)


def _as_rows(x: Tensor, batch: int) -> Tensor:
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, cums: tuple[Tensor, Tensor], causal: bool, window: int, p: float, scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output [B, H, S, D], the logsumexp, and the seed and offset of dropout from a fused kernel."""
    queries, keys = q.shape[2], k.shape[2]
    if kernel == BY_LENGTHS:
        # For sequences of one query, torch moves the heads that share a key into the queries, and takes no empty ones.
        longest = max(queries, 2)
        out, lse, seed, offset, _ = aten._flash_attention_forward.default(
            _flat(q), _flat(k), _flat(v), *cums, longest, keys, p, False, False, scale=scale
        )
        return _as_rows(out, q.shape[0]), lse, seed, offset
    if kernel == CUDNN:
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, causal, False, scale=scale)
        return found[0], found[1], found[6], found[7]
    out, lse, seed, offset, _ = aten._flash_attention_forward.default(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, queries, keys, p, causal, False, scale=scale,
        **_sides(window),
    )  # fmt: skip
    return out.transpose(1, 2), lse, seed, offset


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cums: tuple[Tensor, Tensor], out: Tensor, lse: Tensor,
    seed: Tensor, offset: Tensor, causal: bool, window: int, p: float, scale: float, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    queries, keys = q.shape[2], k.shape[2]
    if kernel == CUDNN:
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, None, None, queries, keys, p, causal, scale=scale
        )
        return dq, dk, dv
    if kernel == BY_LENGTHS:
        found = aten._flash_attention_backward.default(
            _flat(grad), _flat(q), _flat(k), _flat(v), _flat(out), lse, *cums, queries, keys, p, False, seed, offset,
            scale=scale,
        )  # fmt: skip
        dq, dk, dv = (_as_rows(x, q.shape[0]) for x in found)
        return dq, dk, dv
    found = aten._flash_attention_backward.default(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, None, None, queries, keys, p, causal, seed, offset,
        scale=scale, **_sides(window),
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, dk, dv


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _lse_of_rows(lse: Tensor, batch: int, kernel: str) -> Tensor:
    """A kernel's logsumexp as [B, H, S]."""
    return lse.view(lse.shape[0], batch, -1).transpose(0, 1) if kernel == BY_LENGTHS else lse.flatten(2)


def _padded_forward(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, cum_query: Tensor, cum_key: Tensor,
    causal: bool, window: int, dropout: float, scale: float, kernel: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    from autotune.compiler.capture.attention import rows

    how = causal, window, dropout, scale
    out, lse, seed, offset = _fused(q, k, v, (cum_query, cum_key), *how, kernel)
    seeds = _numbers(seed, offset, kernel)
    own = rows.forward(q, k, v, valid, bounds, out, _lse_of_rows(lse, len(q), kernel), seeds, *how)
    return out, lse, own, seed, offset


def _padded_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, cum_query: Tensor, cum_key: Tensor,
    out: Tensor, lse: Tensor, own: Tensor, seed: Tensor, offset: Tensor,
    causal: bool, window: int, dropout: float, scale: float, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from autotune.compiler.capture.attention import rows

    how = causal, window, dropout, scale
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    found = _fused_backward(grad, q, k, v, (cum_query, cum_key), out, lse, seed, offset, *how, kernel)
    rows.backward(grad, q, k, v, valid, bounds, out, own, _numbers(seed, offset, kernel), found, *how)
    return found


def _numbers(seed: Tensor, offset: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """The seed and offset of dropout, one element each."""
    return (seed, offset) if kernel == CUDNN else (seed[:1], seed[1:])


def _padded_forward_fake(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, cum_query: Tensor, cum_key: Tensor,
    causal: bool, window: int, dropout: float, scale: float, kernel: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, queries, _ = q.shape
    shape = {BY_LENGTHS: (heads, batch * queries), CUDNN: (batch, heads, queries, 1), FLASH: (batch, heads, queries)}
    lse, own = (q.new_empty(s, dtype=torch.float32) for s in (shape[kernel], shape[FLASH]))
    if kernel == CUDNN:
        return torch.empty_like(q), lse, own, *(q.new_empty((), dtype=torch.int64) for _ in range(2))
    out = _as_rows(torch.empty_like(_flat(q)), batch)
    if kernel == FLASH:
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    return out, lse, own, q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


def _padded_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, cum_query: Tensor, cum_key: Tensor,
    out: Tensor, lse: Tensor, own: Tensor, seed: Tensor, offset: Tensor,
    causal: bool, window: int, dropout: float, scale: float, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if kernel != BY_LENGTHS:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq, dk, dv = (_as_rows(torch.empty_like(_flat(x)), q.shape[0]) for x in (q, k, v))
    return dq, dk, dv


# By spans


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
    dtype = _index_dtype(queries, keys)
    row = torch.arange(queries, device=mask.device, dtype=dtype)[:, None]
    key = torch.arange(keys, device=mask.device, dtype=dtype)
    low, high = torch.where(mask, key, _LAST).amin(2).clamp(max=keys), torch.where(mask, key + 1, 0).amax(2)
    first, end = torch.where(mask, row, _LAST).amin(1).clamp(max=queries), torch.where(mask, row + 1, 0).amax(1)
    holes = (mask.sum(2, dtype=torch.int32) < high - low).any(1)
    return torch.stack([low, high], 1).int(), torch.stack([first, end], 1).int(), holes.int()


def _spanned_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from autotune.compiler.capture.attention import spans

    return spans.forward(q, k, v, mask, rows, holes, scale)


def _spanned_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from autotune.compiler.capture.attention import spans

    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    return spans.backward(grad, q, k, v, mask, rows, keys, holes, out, lse, scale)


def _spanned_forward_fake(q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, size = q.shape
    out = q.new_empty(batch, queries, heads, size).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.float32)


def _spanned_backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_library.impl("mask_bounds", _bounds, "CompositeImplicitAutograd")
_library.impl("mask_spans", _spans, "CompositeImplicitAutograd")
for _name, _on_cuda, _on_fakes in (
    ("padded_attention_forward", _padded_forward, _padded_forward_fake),
    ("padded_attention_backward", _padded_backward, _padded_backward_fake),
    ("spanned_attention_forward", _spanned_forward, _spanned_forward_fake),
    ("spanned_attention_backward", _spanned_backward, _spanned_backward_fake),
):
    _library.impl(_name, _on_cuda, "CUDA")
    torch.library.register_fake(f"autotune::{_name}", _on_fakes, lib=_library)
for _name in ("padded_attention", "spanned_attention"):
    _library.impl(_name, _differentiable(_name), "CompositeImplicitAutograd")
