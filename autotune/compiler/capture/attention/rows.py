"""Triton kernels for the query rows of an attention that its fused kernel cannot compute.

:mod:`.operators` runs a fused kernel as if only the mask's structure hid keys. The kernels here compute the rows for
which that is wrong, with the key mask. ``bounds`` has these rows on the device. A block without such a row returns at
once, so a launch on a batch without padding costs a few microseconds.

The fused kernel's logsumexp of these rows becomes infinite. Its backward pass then adds nothing for them, and the
kernels here add their contribution.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.compiler.capture.attention.kernels import launch

ROWS, KEYS = 64, 64
"""Query rows and keys of a block."""


@triton.jit
def _seen(valid, b, rows, cols, first, QUERIES, COUNT, vb, vs, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that each row sees, for those rows that are computed here."""
    key = (tl.load(valid + b * vb + cols * vs, mask=cols < COUNT, other=0) != 0) & (cols < COUNT)
    row = (rows >= first) & (rows < QUERIES)
    seen = row[:, None] & key[None, :]
    if CAUSAL:
        seen = seen & (cols[None, :] <= rows[:, None])
    if WINDOW > 0:
        seen = seen & (cols[None, :] > rows[:, None] - WINDOW)
    return seen


@triton.jit
def _kept(seed, offset, bh, rows, cols, COUNT, P: tl.constexpr):
    """The probabilities that dropout keeps."""
    place = rows[:, None] * COUNT + cols[None, :]
    return tl.rand(tl.load(seed) + tl.load(offset) + bh, place) >= P


@triton.jit
def _attention_rows(
    Q, K, V, VALID, BOUNDS, OUT, LSE, OWN, SEED, OFFSET,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, mb, ms,
    H, G, QUERIES, COUNT, scale, HIDDEN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * M
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    first = tl.load(BOUNDS + b * 3)
    if begin + M <= first:
        return
    low, high = tl.load(BOUNDS + b * 3 + 1), tl.load(BOUNDS + b * 3 + 2)
    if CAUSAL:
        high = tl.minimum(high, begin + M)
    if WINDOW > 0:
        low = tl.maximum(low, begin - WINDOW + 1)
    rows = begin + tl.arange(0, M)
    d = tl.arange(0, WIDE)
    ours = (rows >= first) & (rows < QUERIES)
    inside = ours[:, None] & (d < D)[None, :]
    q = tl.load(Q + b.to(tl.int64) * qb + h * qh + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)
    keys, values = K + b.to(tl.int64) * kb + (h // G) * kh, V + b.to(tl.int64) * vb + (h // G) * vh
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE], tl.float32)
    for n in range(low // N * N, high, N):
        cols = n + tl.arange(0, N)
        there = (cols < COUNT)[:, None] & (d < D)[None, :]
        k = tl.load(keys + cols[:, None] * ks + d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(_seen(VALID, b, rows, cols, first, QUERIES, COUNT, mb, ms, CAUSAL, WINDOW), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, 1)
        if P > 0:
            p = tl.where(_kept(SEED, OFFSET, bh, rows, cols, COUNT, P), p / (1 - P), 0.0)
        v = tl.load(values + cols[:, None] * vs + d[None, :], mask=there, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    place = bh * QUERIES + rows
    out = OUT + b.to(tl.int64) * ob + h * oh + rows[:, None] * os + d[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=inside)
    tl.store(OWN + place, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("inf")), mask=ours)
    tl.store(LSE + b * lb + h * lh + rows, tl.full([M], HIDDEN, tl.float32), mask=ours)


@triton.jit
def _attention_rows_active(
    GRAD, BOUNDS, ACTIVE, gb, gh, gs, H, QUERIES, D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr
):
    """The batch rows whose gradient is not zero in a row that is computed here."""
    begin = tl.program_id(0) * M
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    first = tl.load(BOUNDS + b * 3)
    if begin + M <= first:
        return
    rows = begin + tl.arange(0, M)
    d = tl.arange(0, WIDE)
    inside = ((rows >= first) & (rows < QUERIES))[:, None] & (d < D)[None, :]
    g = tl.load(GRAD + b.to(tl.int64) * gb + h * gh + rows[:, None] * gs + d[None, :], mask=inside, other=0.0)
    if tl.max((g != 0).to(tl.int32)) > 0:
        tl.atomic_max(ACTIVE + b, 1)


@triton.jit
def _attention_rows_of_queries(
    Q, K, V, VALID, BOUNDS, OUT, GRAD, OWN, ACTIVE, DQ, SEED, OFFSET,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, gb, gh, gs, db, dh, ds_, mb, ms,
    H, G, QUERIES, COUNT, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * M
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    first = tl.load(BOUNDS + b * 3)
    if begin + M <= first:
        return
    if CAUSAL:
        if tl.load(ACTIVE + b) == 0:
            return
    low, high = tl.load(BOUNDS + b * 3 + 1), tl.load(BOUNDS + b * 3 + 2)
    if CAUSAL:
        high = tl.minimum(high, begin + M)
    if WINDOW > 0:
        low = tl.maximum(low, begin - WINDOW + 1)
    rows = begin + tl.arange(0, M)
    d = tl.arange(0, WIDE)
    ours = (rows >= first) & (rows < QUERIES)
    inside = ours[:, None] & (d < D)[None, :]
    q = tl.load(Q + b.to(tl.int64) * qb + h * qh + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)
    g = tl.load(GRAD + b.to(tl.int64) * gb + h * gh + rows[:, None] * gs + d[None, :], mask=inside, other=0.0)
    lse = tl.load(OWN + bh * QUERIES + rows, mask=ours, other=float("inf"))
    o = tl.load(OUT + b.to(tl.int64) * ob + h * oh + rows[:, None] * os + d[None, :], mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    keys, values = K + b.to(tl.int64) * kb + (h // G) * kh, V + b.to(tl.int64) * vb + (h // G) * vh
    acc = tl.zeros([M, WIDE], tl.float32)
    for n in range(low // N * N, high, N):
        cols = n + tl.arange(0, N)
        there = (cols < COUNT)[:, None] & (d < D)[None, :]
        k = tl.load(keys + cols[:, None] * ks + d[None, :], mask=there, other=0.0)
        v = tl.load(values + cols[:, None] * vs + d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = _seen(VALID, b, rows, cols, first, QUERIES, COUNT, mb, ms, CAUSAL, WINDOW)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        dp = tl.dot(g, tl.trans(v), input_precision="ieee")
        if P > 0:
            dp = tl.where(_kept(SEED, OFFSET, bh, rows, cols, COUNT, P), dp / (1 - P), 0.0)
        ds = p * (dp - delta[:, None])
        acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    out = DQ + b.to(tl.int64) * db + h * dh + rows[:, None] * ds_ + d[None, :]
    tl.store(out, (acc * scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _attention_rows_of_keys(
    Q, K, V, VALID, BOUNDS, OUT, GRAD, OWN, ACTIVE, DK, DV, SEED, OFFSET,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, gb, gh, gs, xb, xh, xs, yb, yh, ys, mb, ms,
    H, G, QUERIES, COUNT, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * N
    few = H // G
    b, hk = tl.program_id(1) // few, tl.program_id(1) % few
    first = tl.load(BOUNDS + b * 3)
    low, high = tl.load(BOUNDS + b * 3 + 1), tl.load(BOUNDS + b * 3 + 2)
    if (first >= QUERIES) | (begin >= high) | (begin + N <= low):
        return
    if CAUSAL:
        if tl.load(ACTIVE + b) == 0:
            return
    start, stop = first, QUERIES
    if CAUSAL:
        start = tl.maximum(start, begin)
    if WINDOW > 0:
        stop = tl.minimum(stop, begin + N + WINDOW)
    cols = begin + tl.arange(0, N)
    d = tl.arange(0, WIDE)
    there = (cols < COUNT)[:, None] & (d < D)[None, :]
    k = tl.load(K + b.to(tl.int64) * kb + hk * kh + cols[:, None] * ks + d[None, :], mask=there, other=0.0)
    v = tl.load(V + b.to(tl.int64) * vb + hk * vh + cols[:, None] * vs + d[None, :], mask=there, other=0.0)
    dk = tl.zeros([N, WIDE], tl.float32)
    dv = tl.zeros([N, WIDE], tl.float32)
    for group in range(G):
        h = hk * G + group
        bh = b * H + h
        for m in range(start // M * M, stop, M):
            rows = m + tl.arange(0, M)
            ours = (rows >= first) & (rows < QUERIES)
            inside = ours[:, None] & (d < D)[None, :]
            q = tl.load(Q + b.to(tl.int64) * qb + h * qh + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)
            g = tl.load(GRAD + b.to(tl.int64) * gb + h * gh + rows[:, None] * gs + d[None, :], mask=inside, other=0.0)
            lse = tl.load(OWN + bh * QUERIES + rows, mask=ours, other=float("inf"))
            o = tl.load(OUT + b.to(tl.int64) * ob + h * oh + rows[:, None] * os + d[None, :], mask=inside, other=0.0)
            delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = _seen(VALID, b, rows, cols, first, QUERIES, COUNT, mb, ms, CAUSAL, WINDOW)
            p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
            dp = tl.dot(g, tl.trans(v), input_precision="ieee")
            dropped = p
            if P > 0:
                kept = _kept(SEED, OFFSET, bh, rows, cols, COUNT, P)
                dropped = tl.where(kept, p / (1 - P), 0.0)
                dp = tl.where(kept, dp / (1 - P), 0.0)
            dv += tl.dot(tl.trans(dropped).to(g.dtype), g, input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    x = DK + b.to(tl.int64) * xb + hk * xh + cols[:, None] * xs + d[None, :]
    y = DV + b.to(tl.int64) * yb + hk * yh + cols[:, None] * ys + d[None, :]
    tl.store(x, (tl.load(x, mask=there, other=0.0).to(tl.float32) + dk * scale).to(DK.dtype.element_ty), mask=there)
    tl.store(y, (tl.load(y, mask=there, other=0.0).to(tl.float32) + dv).to(DV.dtype.element_ty), mask=there)


def forward(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, out: Tensor, lse: Tensor,
    seeds: tuple[Tensor, Tensor], causal: bool, window: int, p: float, scale: float,
) -> Tensor:  # fmt: skip
    """Write the rows of ``bounds`` to ``out`` [B, H, S, D], and set them to infinity in ``lse``.

    Args:
        q: [B, H, S, D], with unit stride along D.
        k, v: [B, heads of keys, keys, D], with unit stride along D.
        valid: bool [B, keys], True where a key is seen.
        bounds: int32 [B, 3]: the first row to compute, the first valid key, and the end of the valid keys.
        out, lse: the results of the fused kernel; ``lse`` is [B, H, S], with unit stride along S.
        seeds: the seed and offset of dropout, one element each, read only if ``p`` is above 0.

    Returns:
        The logsumexp of these rows, [B, H, S] in fp32; the others are not written.
    """
    b, h, queries, d = q.shape
    own = torch.empty(b, h, queries, dtype=torch.float32, device=q.device)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()[:2], *valid.stride()
    launch(
        _attention_rows, (triton.cdiv(queries, ROWS), b * h),
        (q, k, v, valid, bounds, out, lse, own, *(seeds if p else (own, own))),
        (*strides, h, h // k.shape[1], queries, k.shape[2], scale, float("inf"), causal, window, p,
         d, triton.next_power_of_2(d), ROWS, KEYS),
    )  # fmt: skip
    return own


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, bounds: Tensor, out: Tensor, own: Tensor,
    seeds: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor, Tensor],
    causal: bool, window: int, p: float, scale: float,
) -> None:  # fmt: skip
    """Add the contribution of the rows of ``bounds`` to the gradients, which the fused kernel wrote without them."""
    b, h, queries, d = q.shape
    few, keys = k.shape[1:3]
    wide = triton.next_power_of_2(d)
    blocks = triton.cdiv(queries, ROWS), b * h
    active = bounds
    if causal:  # the gradient of padding is zeros in most programs
        active = torch.zeros(b, dtype=torch.int32, device=q.device)
        launch(_attention_rows_active, blocks, (grad, bounds, active), (*grad.stride()[:3], h, queries, d, wide, ROWS))
    dq, dk, dv = gradients
    given = q, k, v, valid, bounds, out, grad, own, active
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *grad.stride()[:3]
    rest = *valid.stride(), h, h // few, queries, keys, scale, causal, window, p, d, wide, ROWS, KEYS
    seeds = seeds if p else (own, own)
    launch(_attention_rows_of_queries, blocks, (*given, dq, *seeds), (*strides, *dq.stride()[:3], *rest))
    launch(
        _attention_rows_of_keys, (triton.cdiv(keys, KEYS), b * few), (*given, dk, dv, *seeds),
        (*strides, *dk.stride()[:3], *dv.stride()[:3], *rest),
    )  # fmt: skip
