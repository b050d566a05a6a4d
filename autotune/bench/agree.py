"""Whether two contenders compute the same thing, a check against comparing different programs; how far they are apart.

It is no verification (every kernel is verified against the oracle before it is stored): bounds are wide enough for the
roundings in which eager mode, fused kernels and XLA rightly differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_BOUND = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest difference over largest magnitude. A bfloat16 sum over rows, rounded now and then, is off by per cents."""


def disagreement(got: Any, want: Any) -> str:
    """What is wrong with ``got``, in one line; empty if nothing is.

    Args:
        got, want: results, nested alike, of equal shapes and types.
    """
    ours = [t for t in pytree.tree_leaves(got) if isinstance(t, Tensor)]
    theirs = [t for t in pytree.tree_leaves(want) if isinstance(t, Tensor)]
    if len(ours) != len(theirs):
        return f"{len(ours)} results, expected {len(theirs)}"
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {k} is {a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"
        if a.dtype not in _BOUND:
            if not torch.equal(a, b):
                return f"result {k} differs"
            continue
        if not a.numel():
            continue
        off = (a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)
        if not off <= _BOUND[a.dtype]:  # NaN is no agreement either
            return f"result {k} is off by {float(off):.2g} of its largest magnitude"
    return ""


_PIECE = 1 << 24
"""Elements that are compared at a time, so that doubles of a large tensor need not lie in memory beside it."""


def difference(got: Any, want: Any) -> float:
    """Root mean square of the difference of all floating results over that of ``want``'s.

    A gradient that is None counts as zeros, since compilers differ in which they make of one that nothing contributes
    to. Equal infinities, and NaN in the same place, are no difference.

    Returns:
        Infinity where results are of another number, shape or type, or finite in other places than ``want``'s.
    """
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(ours) != len(theirs):
        return float("inf")
    apart = whole = 0.0
    for a, b in zip(ours, theirs, strict=True):
        known = b if isinstance(b, Tensor) else a
        if not isinstance(known, Tensor) or not (known.is_floating_point() or known.is_complex()):
            continue
        x, y = (torch.zeros_like(known) if t is None else t for t in (a, b))
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        for p, q in zip(_pieces(x), _pieces(y), strict=True):
            off = torch.where((p == q) | (p.isnan() & q.isnan()), 0.0, p - q)
            apart += float(off.square().sum())
            whole += float(torch.where(q.isfinite(), q, 0.0).square().sum())
    ratio = (apart / max(whole, 1e-60)) ** 0.5
    return ratio if ratio == ratio else float("inf")


def largest(results: Any) -> float | None:
    """Largest magnitude in the first floating result: the loss, in training. None if there is none, or it is empty."""
    for t in pytree.tree_leaves(results):
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
            return float(t.abs().max()) if t.numel() else None
    return None


def _pieces(t: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor as doubles, :data:`_PIECE` at a time; complex numbers as their parts."""
    t = t.detach()
    t = t.to_dense() if t.layout is not torch.strided else t
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    flat = t.reshape(-1)
    for begin in range(0, len(flat), _PIECE):
        yield flat[begin : begin + _PIECE].double()
