"""What is known of a value before it is computed: the numbers it lies between, and whether it is as memory has it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autotune.ir.graph import Value

_DEEPEST = 16
_ROUNDED = ("round", "trunc", "floor", "ceil", "cast")
Span = tuple[float, float]
_ANYTHING: Span = (-math.inf, math.inf)


def within(values: Sequence[Value], i: int, dtype: torch.dtype) -> bool:
    """Whether an integer type holds all that value ``i`` can be, NaN aside: as after a clamp to the type's range."""
    least, most = _span(values, i, _DEEPEST)
    info = torch.iinfo(dtype)
    return info.min <= least and most <= info.max


def _span(values: Sequence[Value], i: int, depth: int) -> Span:
    v = values[i]
    if v.op == "const":
        return (float(v.number), float(v.number)) if v.number == v.number else _ANYTHING
    if v.dtype == "bool":
        return 0.0, 1.0
    if depth == 0:
        return _ANYTHING
    if v.op in ("maximum", "minimum"):
        choose = max if v.op == "maximum" else min
        a, b = (_span(values, k, depth - 1) for k in v.args)
        return choose(a[0], b[0]), choose(a[1], b[1])
    if v.op == "where":
        a, b = (_span(values, k, depth - 1) for k in v.args[1:])
        return min(a[0], b[0]), max(a[1], b[1])
    if v.op in _ROUNDED:
        least, most = _span(values, v.args[0], depth - 1)
        return (math.floor(least) if math.isfinite(least) else least), (
            math.ceil(most) if math.isfinite(most) else most
        )
    return _ANYTHING


def in_memory(values: Sequence[Value], i: int) -> bool:
    """Whether a value is an element as it was loaded, or one of such elements, or a zero beside them."""
    v = values[i]
    if v.op == "where":
        return all(in_memory(values, k) for k in v.args[1:])
    return v.op in ("load", "gather") or (v.op == "const" and v.number == 0)
