"""Rules of reductions, softmaxes and losses, each written out in few values, the same for every torch release.

Statistics are two-pass (mean, then mean of centred squares), which is what the row-in-registers kernels want and loses
no digits. Means multiply by the reciprocal of the count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autotune.errors import Unsupported
from autotune.fusion import views
from autotune.fusion.lazy import Lazy, Number, Region, cast, iota, pointwise, reduce, scalar
from autotune.fusion.rules import numbers, pick, rule
from autotune.fusion.rules_pointwise import compare, to_float

F32 = torch.float32
Dim = int | Sequence[int] | None


def _dims(x: Lazy, dim: Dim) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return numbers(dim)


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


@rule("amax")
def _amax(region: Region, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    return _extreme("max", self, dim, keepdim)


@rule("amin")
def _amin(region: Region, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    return _extreme("min", self, dim, keepdim)


def _extreme(op: str, x: Lazy, dim: Dim, keepdim: bool) -> Lazy:
    if x.dtype == torch.bool:
        raise Unsupported("the extreme of booleans")
    return reduce(op, x, _dims(x, dim), keepdim)


def _with_index(op: str) -> Any:
    """``max(x)`` and the values of ``max(x, dim)``; whoever wants the indices stays with torch."""

    def apply(region: Region, self: Lazy, dim: int | None = None, keepdim: bool = False) -> Any:
        values = _extreme(op, self, dim, keepdim)
        return values if len(region.out) == 1 else (values, None)

    return apply


rule("max")(_with_index("max"))
rule("min")(_with_index("min"))


def _any(x: Lazy, dim: Dim, keepdim: bool, op: str) -> Lazy:
    ones = cast(cast(x, torch.bool), torch.int32)
    return compare("ne", reduce(op, ones, _dims(x, dim), keepdim), 0)


@rule("any")
def _any_rule(region: Region, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    return _any(self, dim, keepdim, "max")


@rule("all")
def _all_rule(region: Region, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    return _any(self, dim, keepdim, "min")


def _var_rule(name: str) -> None:
    def apply(
        region: Region,
        self: Lazy,
        dim: Dim = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: Number | None = None,
    ) -> Any:
        if isinstance(dim, bool):  # the overload (self, unbiased)
            dim, unbiased = None, dim
        given = correction if correction is not None else 1 if unbiased is None else int(unbiased)
        dims = _dims(self, dim)
        _, average, variance = moments(self, dims, float(given))
        out = [pointwise("sqrt", variance) if name == "std" else variance, average]
        if not keepdim:
            out = [_drop(x, self, dims) for x in out]
        return tuple(out) if name == "var_mean" else out[0]

    rule(name)(apply)


def _drop(x: Lazy, like: Lazy, dims: Sequence[int]) -> Lazy:
    return views.squeeze(x, [like.dim(d) for d in dims]) if like.ndim else x


for _name in ("var", "std", "var_mean"):
    _var_rule(_name)


@rule("linalg_vector_norm")
def _vector_norm(
    region: Region,
    self: Lazy,
    ord: Number = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Lazy:
    dims = _dims(self, dim)
    if ord == 2:
        return pointwise("sqrt", reduce("sum", self * self, dims, keepdim))
    size = pointwise("abs", self)
    if ord == 1:
        return reduce("sum", size, dims, keepdim)
    if ord == math.inf:
        return reduce("max", size, dims, keepdim)
    raise Unsupported(f"the {ord}-norm")


# Softmax --------------------------------------------------------------------------------------------------------------


@rule("_softmax")
def _softmax(region: Region, self: Lazy, dim: int, half_to_float: bool = False) -> Lazy:
    e = pointwise("exp", self - reduce("max", self, [dim], True))
    return e / total(e, dim, True)


@rule("_safe_softmax")
def _safe_softmax(region: Region, self: Lazy, dim: int, dtype: torch.dtype | None = None) -> Lazy:
    top = reduce("max", self, [dim], True)
    e = pointwise("exp", self - top)
    masked = compare("eq", top, -math.inf)
    return pointwise("where", masked, scalar(region, 0, self.dtype), e / total(e, dim, True), dtype=self.dtype)


@rule("_log_softmax")
def _log_softmax(region: Region, self: Lazy, dim: int, half_to_float: bool = False) -> Lazy:
    shifted = self - reduce("max", self, [dim], True)
    return shifted - pointwise("log", total(pointwise("exp", shifted), dim, True))


@rule("_softmax_backward_data")
def _softmax_backward(region: Region, grad_output: Lazy, output: Lazy, dim: int, input_dtype: torch.dtype) -> Lazy:
    weighted = grad_output * output
    return weighted - output * total(weighted, dim, True)


@rule("_log_softmax_backward_data")
def _log_softmax_backward(region: Region, grad_output: Lazy, output: Lazy, dim: int, input_dtype: torch.dtype) -> Lazy:
    return grad_output - pointwise("exp", output) * total(grad_output, dim, True)


@rule("logsumexp")
def _logsumexp(region: Region, self: Lazy, dim: Dim, keepdim: bool = False) -> Lazy:
    x, dims = to_float(self), _dims(self, dim)
    top = reduce("max", x, dims, True)
    # An infinite maximum would make inf - inf; torch shifts by 0 there.
    top = pointwise("where", pointwise("isinf", top, dtype=torch.bool), scalar(region, 0, F32), top, dtype=F32)
    out = pointwise("log", total(pointwise("exp", x - top), dims, True)) + top
    return out if keepdim else _drop(out, self, dims)


# Losses ---------------------------------------------------------------------------------------------------------------


def _valid(target: Lazy, ignore_index: int) -> tuple[Lazy, Lazy]:
    """(which targets count, the targets with 0 in place of those that do not)."""
    keep = compare("ne", target, ignore_index)
    return keep, pointwise("where", keep, target, scalar(target.region, 0, target.dtype), dtype=target.dtype)


@rule("nll_loss_forward")
def _nll_loss(
    region: Region, self: Lazy, target: Lazy, weight: Lazy | None, reduction: int, ignore_index: int
) -> tuple[Lazy, ...]:
    if weight is not None or self.ndim != 2:
        raise Unsupported("a negative log likelihood with weights or without a batch")
    keep, safe = _valid(target, ignore_index)
    column = views.unsqueeze(safe, 1)
    picked = views.squeeze(pick(self, 1, column), 1)
    loss = pointwise("where", keep, -picked, scalar(region, 0, self.dtype), dtype=self.dtype)
    if reduction == 0:
        return loss, views.full(region, (), 0, self.dtype)
    count = total(cast(keep, F32))
    return (total(loss) / count if reduction == 1 else total(loss)), count


@rule("nll_loss_backward")
def _nll_loss_backward(
    region: Region,
    grad_output: Lazy,
    self: Lazy,
    target: Lazy,
    weight: Lazy | None,
    reduction: int,
    ignore_index: int,
    total_weight: Lazy,
) -> Lazy:
    if weight is not None or self.ndim != 2:
        raise Unsupported("a negative log likelihood with weights or without a batch")
    keep, safe = _valid(target, ignore_index)
    grad = grad_output / total_weight if reduction == 1 else grad_output
    if grad.ndim == 1:
        grad = views.unsqueeze(grad, 1)
    position = iota(region, self.shape[1], target.dtype)
    hit = compare("eq", position, views.unsqueeze(safe, 1))
    hit = pointwise("and", hit, views.unsqueeze(keep, 1), dtype=torch.bool)
    return pointwise("where", hit, -grad, scalar(region, 0, self.dtype), dtype=self.dtype)
