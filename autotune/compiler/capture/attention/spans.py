"""Triton kernels for attention by spans of keys, which skip the blocks that no query row sees.

A row's *span* reaches from the first key that it sees to the last. Causal, windowed and padded masks, and those of
packed documents, hide nothing inside of spans. Then the kernels read no mask. A batch row with other masks reads it, so
results are right for any mask.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.compiler.capture.attention.kernels import launch

LOG2_E = 1.4426950408889634


@triton.jit
def _scores_of_block(
    acc, top, total, q, keys, values, mask, low, high, rows, begin, end, ks, vs, mr, mc, COUNT, scale,
    MODE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``begin`` to ``end`` to the running softmax of a block of rows."""
    d = tl.arange(0, WIDE)
    for n in range(begin, end, N):
        cols = n + tl.arange(0, N)
        there = (cols < COUNT)[:, None] & (d < D)[None, :]
        k = tl.load(keys + cols[:, None] * ks + d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MODE > 0:
            seen = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
            if MODE > 1:
                seen = seen & (tl.load(mask + rows[:, None] * mr + cols[None, :] * mc, mask=seen, other=0) != 0)
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = higher
        if MODE > 0:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + cols[:, None] * vs + d[None, :], mask=there, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    return acc, top, total


@triton.jit
def _limits(low, high, ours, COUNT, N: tl.constexpr):
    """The keys that some row sees, and the blocks of them that all rows see: begin, inner begin, inner end, end."""
    begin = tl.min(tl.where(ours, low, COUNT)) // N * N
    end = tl.max(tl.where(ours, high, 0))
    inner = tl.cdiv(tl.max(tl.where(ours, low, 0)), N) * N
    inner_end = tl.min(tl.where(ours, high, COUNT)) // N * N
    inner = tl.minimum(tl.maximum(inner, begin), end)
    return begin, inner, tl.maximum(tl.minimum(inner_end, end), inner), end


@triton.jit
def _spans_forward(
    Q, K, V, MASK, ROWS, HOLES, OUT, LSE,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, mb, mr, mc,
    H, G, QUERIES, COUNT, scale,
    D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    b64 = b.to(tl.int64)
    rows = begin + tl.arange(0, M)
    d = tl.arange(0, WIDE)
    ours = rows < QUERIES
    inside = ours[:, None] & (d < D)[None, :]
    low = tl.load(ROWS + b * 2 * QUERIES + rows, mask=ours, other=0)
    high = tl.load(ROWS + (b * 2 + 1) * QUERIES + rows, mask=ours, other=0)
    a, inner, inner_end, end = _limits(low, high, ours, COUNT, N)
    q = tl.load(Q + b64 * qb + h * qh + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)
    keys, values, mask = K + b64 * kb + (h // G) * kh, V + b64 * vb + (h // G) * vh, MASK + b64 * mb
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE], tl.float32)
    if tl.load(HOLES + b) == 0:
        acc, top, total = _scores_of_block(
            acc, top, total, q, keys, values, mask, low, high, rows, a, inner, ks, vs, mr, mc, COUNT, scale,
            1, D, WIDE, N,
        )  # fmt: skip
        acc, top, total = _scores_of_block(
            acc, top, total, q, keys, values, mask, low, high, rows, inner, inner_end, ks, vs, mr, mc, COUNT, scale,
            0, D, WIDE, N,
        )  # fmt: skip
        acc, top, total = _scores_of_block(
            acc, top, total, q, keys, values, mask, low, high, rows, inner_end, end, ks, vs, mr, mc, COUNT, scale,
            1, D, WIDE, N,
        )  # fmt: skip
    else:
        acc, top, total = _scores_of_block(
            acc, top, total, q, keys, values, mask, low, high, rows, a, end, ks, vs, mr, mc, COUNT, scale,
            2, D, WIDE, N,
        )  # fmt: skip
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(OUT + b64 * ob + h * oh + rows[:, None] * os + d[None, :], acc.to(OUT.dtype.element_ty), mask=inside)
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    tl.store(LSE + bh.to(tl.int64) * QUERIES + rows, lse, mask=ours)


@triton.jit
def _gradient_of_block(
    acc, q, g, lse, delta, keys, values, mask, low, high, rows, begin, end, ks, vs, mr, mc, COUNT, scale,
    MODE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, WIDE)
    for n in range(begin, end, N):
        cols = n + tl.arange(0, N)
        there = (cols < COUNT)[:, None] & (d < D)[None, :]
        k = tl.load(keys + cols[:, None] * ks + d[None, :], mask=there, other=0.0)
        v = tl.load(values + cols[:, None] * vs + d[None, :], mask=there, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        if MODE > 0:
            seen = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
            if MODE > 1:
                seen = seen & (tl.load(mask + rows[:, None] * mr + cols[None, :] * mc, mask=seen, other=0) != 0)
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    return acc


@triton.jit
def _spans_of_queries(
    Q, K, V, MASK, ROWS, HOLES, OUT, GRAD, LSE, DELTA, DQ,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, gb, gh, gs, db, dh, ds_, mb, mr, mc,
    H, G, QUERIES, COUNT, scale, factor,
    D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, and for each row the sum of the products of its output and its gradient."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    b64 = b.to(tl.int64)
    rows = begin + tl.arange(0, M)
    d = tl.arange(0, WIDE)
    ours = rows < QUERIES
    inside = ours[:, None] & (d < D)[None, :]
    low = tl.load(ROWS + b * 2 * QUERIES + rows, mask=ours, other=0)
    high = tl.load(ROWS + (b * 2 + 1) * QUERIES + rows, mask=ours, other=0)
    a, inner, inner_end, end = _limits(low, high, ours, COUNT, N)
    q = tl.load(Q + b64 * qb + h * qh + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)
    g = tl.load(GRAD + b64 * gb + h * gh + rows[:, None] * gs + d[None, :], mask=inside, other=0.0)
    o = tl.load(OUT + b64 * ob + h * oh + rows[:, None] * os + d[None, :], mask=inside, other=0.0)
    place = bh.to(tl.int64) * QUERIES + rows
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(DELTA + place, delta, mask=ours)
    lse = tl.load(LSE + place, mask=ours, other=float("inf"))
    keys, values, mask = K + b64 * kb + (h // G) * kh, V + b64 * vb + (h // G) * vh, MASK + b64 * mb
    acc = tl.zeros([M, WIDE], tl.float32)
    if tl.load(HOLES + b) == 0:
        acc = _gradient_of_block(
            acc, q, g, lse, delta, keys, values, mask, low, high, rows, a, inner, ks, vs, mr, mc, COUNT, scale,
            1, D, WIDE, N,
        )  # fmt: skip
        acc = _gradient_of_block(
            acc, q, g, lse, delta, keys, values, mask, low, high, rows, inner, inner_end, ks, vs, mr, mc, COUNT, scale,
            0, D, WIDE, N,
        )  # fmt: skip
        acc = _gradient_of_block(
            acc, q, g, lse, delta, keys, values, mask, low, high, rows, inner_end, end, ks, vs, mr, mc, COUNT, scale,
            1, D, WIDE, N,
        )  # fmt: skip
    else:
        acc = _gradient_of_block(
            acc, q, g, lse, delta, keys, values, mask, low, high, rows, a, end, ks, vs, mr, mc, COUNT, scale,
            2, D, WIDE, N,
        )  # fmt: skip
    out = DQ + b64 * db + h * dh + rows[:, None] * ds_ + d[None, :]
    tl.store(out, (acc * factor).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _gradients_of_rows(
    dk, dv, k, v, queries, grads, LSE, DELTA, mask, SPANS, cols, start, stop, qs, gs, mr, mc, QUERIES, scale,
    MODE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Add the query rows from ``start`` to ``stop`` to the gradients of a block of keys."""
    d = tl.arange(0, WIDE)
    for m in range(start, stop, M):
        rows = m + tl.arange(0, M)
        ours = rows < QUERIES
        inside = ours[:, None] & (d < D)[None, :]
        q = tl.load(queries + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)
        g = tl.load(grads + rows[:, None] * gs + d[None, :], mask=inside, other=0.0)
        lse = tl.load(LSE + rows, mask=ours, other=float("inf"))
        delta = tl.load(DELTA + rows, mask=ours, other=0.0)
        low = tl.load(SPANS + rows, mask=ours, other=0)
        high = tl.load(SPANS + QUERIES + rows, mask=ours, other=0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])
        seen = (cols[:, None] >= low[None, :]) & (cols[:, None] < high[None, :])
        if MODE > 1:
            seen = seen & (tl.load(mask + rows[None, :] * mr + cols[:, None] * mc, mask=seen, other=0) != 0)
        p = tl.where(seen, p, 0.0)
        dv += tl.dot(p.to(g.dtype), g, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
        dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    return dk, dv


@triton.jit
def _spans_of_keys(
    Q, K, V, MASK, ROWS, KEYS, HOLES, GRAD, LSE, DELTA, DK, DV,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, gb, gh, gs, xb, xh, xs, yb, yh, ys, mb, mr, mc,
    H, G, QUERIES, COUNT, scale, factor,
    D: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * N
    few = H // G
    b, hk = tl.program_id(1) // few, tl.program_id(1) % few
    b64 = b.to(tl.int64)
    cols = begin + tl.arange(0, N)
    d = tl.arange(0, WIDE)
    ours = cols < COUNT
    there = ours[:, None] & (d < D)[None, :]
    start = tl.min(tl.load(KEYS + b * 2 * COUNT + cols, mask=ours, other=QUERIES)) // M * M
    stop = tl.max(tl.load(KEYS + (b * 2 + 1) * COUNT + cols, mask=ours, other=0))
    k = tl.load(K + b64 * kb + hk * kh + cols[:, None] * ks + d[None, :], mask=there, other=0.0)
    v = tl.load(V + b64 * vb + hk * vh + cols[:, None] * vs + d[None, :], mask=there, other=0.0)
    dk = tl.zeros([N, WIDE], tl.float32)
    dv = tl.zeros([N, WIDE], tl.float32)
    holes = tl.load(HOLES + b)
    for group in range(G):
        h = hk * G + group
        place = (b64 * H + h) * QUERIES
        queries, grads, mask = Q + b64 * qb + h * qh, GRAD + b64 * gb + h * gh, MASK + b64 * mb
        if holes == 0:
            dk, dv = _gradients_of_rows(
                dk, dv, k, v, queries, grads, LSE + place, DELTA + place, mask, ROWS + b * 2 * QUERIES, cols,
                start, stop, qs, gs, mr, mc, QUERIES, scale, 1, D, WIDE, M,
            )  # fmt: skip
        else:
            dk, dv = _gradients_of_rows(
                dk, dv, k, v, queries, grads, LSE + place, DELTA + place, mask, ROWS + b * 2 * QUERIES, cols,
                start, stop, qs, gs, mr, mc, QUERIES, scale, 2, D, WIDE, M,
            )  # fmt: skip
    x = DK + b64 * xb + hk * xh + cols[:, None] * xs + d[None, :]
    y = DV + b64 * yb + hk * yh + cols[:, None] * ys + d[None, :]
    tl.store(x, (dk * factor).to(DK.dtype.element_ty), mask=there)
    tl.store(y, dv.to(DV.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class Blocks:
    """Query rows and keys of a block, warps, and stages of the loop's loads."""

    rows: int
    keys: int
    warps: int
    stages: int


def blocks_of(size: int) -> tuple[Blocks, Blocks, Blocks]:
    """Blocks of the forward pass and of the gradients of queries and of keys, as measured for a head size."""
    if size <= 64:
        return Blocks(64, 64, 4, 3), Blocks(64, 32, 4, 3), Blocks(64, 64, 4, 3)
    return Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(32, 64, 4, 3)


def _launch(kernel: Any, grid: tuple[int, int], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], blocks: Blocks):
    launch(kernel, grid, tensors, (*numbers, blocks.rows, blocks.keys), blocks.warps, blocks.stages)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, holes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, laid out as [B, S, H, D], and the binary logarithm of the softmax's denominators, [B, H, S] in fp32.

    Args:
        q: [B, H, S, D], with unit stride along D.
        k, v: [B, heads of keys, keys, D], with unit stride along D.
        mask: bool [B, S, keys], True where a key is seen.
        rows: int32 [B, 2, S]: the first key that each row sees, and the end of these keys; contiguous.
        holes: int32 [B], not 0 if a row does not see all keys of its span.
    """
    b, h, queries, d = q.shape
    out = q.new_empty(b, queries, h, d).transpose(1, 2)
    lse = torch.empty(b, h, queries, dtype=torch.float32, device=q.device)
    blocks = blocks_of(d)[0]
    _launch(
        _spans_forward, (triton.cdiv(queries, blocks.rows), b * h), (q, k, v, mask, rows, holes, out, lse),
        (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *mask.stride(),
         h, h // k.shape[1], queries, k.shape[2], scale * LOG2_E, d, triton.next_power_of_2(d)),
        blocks,
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor, keys: Tensor, holes: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, laid out as ``q``, ``k`` and ``v``.

    Args:
        keys: int32 [B, 2, keys]: the first row that sees each key, and the end of these rows; contiguous.
    """
    b, h, queries, d = q.shape
    few, count = k.shape[1:3]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    _, of_queries, of_keys = blocks_of(d)
    qkv = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    rest = (
        *mask.stride(), h, h // few, queries, count, scale * LOG2_E, scale, d, triton.next_power_of_2(d)
    )  # fmt: skip
    _launch(
        _spans_of_queries, (triton.cdiv(queries, of_queries.rows), b * h),
        (q, k, v, mask, rows, holes, out, grad, lse, delta, dq),
        (*qkv, *out.stride()[:3], *grad.stride()[:3], *dq.stride()[:3], *rest), of_queries,
    )  # fmt: skip
    _launch(
        _spans_of_keys, (triton.cdiv(count, of_keys.keys), b * few),
        (q, k, v, mask, rows, keys, holes, grad, lse, delta, dk, dv),
        (*qkv, *grad.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], *rest), of_keys,
    )  # fmt: skip
    return dq, dk, dv
