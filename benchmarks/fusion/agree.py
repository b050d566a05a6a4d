"""Comparison of two contenders' results, a check against comparing different programs.

It is no verification (every kernel is verified against the oracle before it is stored): bounds are wide enough for the
roundings in which eager mode, fused kernels and XLA rightly differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_BOUND = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest difference over largest magnitude. A bfloat16 sum over rows, rounded now and then, is off by per cents."""


def disagreement(got: Any, want: Any) -> str:
    """The difference of ``got`` from ``want`` in one line; empty without one.

    Args:
        got, want: results of equal nesting, shapes and types.
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
