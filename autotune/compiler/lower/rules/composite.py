"""Rules of reductions, softmaxes and losses, each written out in few values, the same for every torch release.

Statistics are two-pass (mean, then mean of centred squares), which is what the row-in-registers kernels want and loses
no digits. Means multiply by the reciprocal of the count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import Lazy, Number, Region, cast, pointwise, reduce
from autotune.compiler.lower.rules.pointwise import compare
from autotune.compiler.lower.rules.table import alike, rule, rules
from autotune.errors import Unsupported

F32 = torch.float32
Dim = int | Sequence[int] | None


def _dims(x: Lazy, dim: Dim) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return views.numbers(dim)


def _count(x: Lazy, dims: Sequence[int]) -> int:
    return math.prod(x.shape[x.dim(d)] for d in dims) if x.ndim else 1


def total(x: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    return reduce("sum", x, _dims(x, dim), keepdim)


def mean(x: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    dims = _dims(x, dim)
    return reduce("sum", x, dims, keepdim) * (1 / _count(x, dims))


def moments(x: Lazy, dims: Sequence[int], correction: float = 0) -> tuple[Lazy, Lazy, Lazy]:
    """(centred, mean, variance); the last two keep the reduced dimensions with extent 1."""
    average = mean(x, dims, True)
    centred = x - average
    n = _count(x, dims) - correction
    variance = reduce("sum", centred * centred, dims, True) * (1 / n if n > 0 else math.inf)
    return centred, average, variance


# Plain reductions -----------------------------------------------------------------------------------------------------


@rule("sum")
def _sum(
    region: Region, self: Lazy, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Lazy:
    return total(cast(self, region.out[0][1]), dim, keepdim)


@rule("mean")
def _mean(
    region: Region, self: Lazy, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Lazy:
    return mean(cast(self, region.out[0][1]), dim, keepdim)


@rule("prod")
def _prod(
    region: Region, self: Lazy, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Lazy:
    return reduce("prod", cast(self, region.out[0][1]), _dims(self, dim), keepdim)


def _extreme(op: str, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    if self.dtype == torch.bool:
        raise Unsupported("the extreme of booleans")
    return reduce(op, self, _dims(self, dim), keepdim)


def _with_index(op: str, self: Lazy, dim: int | None = None, keepdim: bool = False) -> Any:
    """``max(x)`` and the values of ``max(x, dim)``; whoever wants the indices stays with torch."""
    values = _extreme(op, self, dim, keepdim)
    return values if len(self.region.out) == 1 else (values, None)


def _any(op: str, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    ones = cast(cast(self, torch.bool), torch.int32)
    return compare("ne", reduce(op, ones, _dims(self, dim), keepdim), 0)


rules(_extreme, {"amax": "max", "amin": "min"})
rules(_with_index, alike("max", "min"))
rules(_any, {"any": "max", "all": "min"})


@rule("var", "var_mean")
def _variance(
    region: Region, self: Lazy, dim: Dim = None, *, correction: Number | None = None, keepdim: bool = False
) -> Any:
    dims = _dims(self, dim)
    _, average, variance = moments(self, dims, 1.0 if correction is None else float(correction))
    out = [x if keepdim else _drop(x, self, dims) for x in (variance, average)]
    return tuple(out) if len(region.out) == 2 else out[0]


def _drop(x: Lazy, like: Lazy, dims: Sequence[int]) -> Lazy:
    return views.squeeze(x, [like.dim(d) for d in dims]) if like.ndim else x


# Softmax --------------------------------------------------------------------------------------------------------------


@rule("prepare_softmax_online")
def _prepare_softmax(region: Region, a: Lazy, dim: int) -> tuple[Lazy, Lazy]:
    """Inductor's name for a row's maximum and the sum of exponentials less that."""
    top = reduce("max", a, [dim], True)
    return top, total(pointwise("exp", a - top), dim, True)
