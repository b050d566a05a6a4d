"""Rules of element-wise losses and their backwards."""

from __future__ import annotations

from collections.abc import Callable

from autotune.errors import Unsupported
from autotune.fusion.lazy import Lazy, Region, pointwise
from autotune.fusion.rules import rule
from autotune.fusion.rules_composite import mean, total
from autotune.fusion.rules_pointwise import clamp, compare, select

_REDUCE: tuple[Callable[[Lazy], Lazy], ...] = (lambda x: x, mean, total)
"""By torch's number of a reduction: none, mean, sum."""


def _spread(grad: Lazy, like: Lazy, reduction: int) -> Lazy:
    """The gradient of each element's loss."""
    return grad * (1 / like.numel) if reduction == 1 else grad


@rule("mse_loss")
def _mse(region: Region, self: Lazy, target: Lazy, reduction: int = 1) -> Lazy:
    d = self - target
    return _REDUCE[reduction](d * d)


@rule("mse_loss_backward")
def _mse_backward(region: Region, grad_output: Lazy, self: Lazy, target: Lazy, reduction: int) -> Lazy:
    return (self - target) * 2.0 * _spread(grad_output, self, reduction)


@rule("smooth_l1_loss")
def _smooth_l1(region: Region, self: Lazy, target: Lazy, reduction: int = 1, beta: float = 1.0) -> Lazy:
    d = pointwise("abs", self - target)
    if beta == 0:
        return _REDUCE[reduction](d)
    return _REDUCE[reduction](select(compare("lt", d, beta), d * d * (0.5 / beta), d - 0.5 * beta))


@rule("smooth_l1_loss_backward")
def _smooth_l1_backward(
    region: Region, grad_output: Lazy, self: Lazy, target: Lazy, reduction: int, beta: float
) -> Lazy:
    d = self - target
    slope = pointwise("sign", d) if beta == 0 else clamp(d * (1 / beta), -1, 1)
    return slope * _spread(grad_output, self, reduction)


@rule("huber_loss")
def _huber(region: Region, self: Lazy, target: Lazy, reduction: int = 1, delta: float = 1.0) -> Lazy:
    d = pointwise("abs", self - target)
    return _REDUCE[reduction](select(compare("le", d, delta), d * d * 0.5, (d - 0.5 * delta) * delta))


@rule("huber_loss_backward")
def _huber_backward(region: Region, grad_output: Lazy, self: Lazy, target: Lazy, reduction: int, delta: float) -> Lazy:
    return clamp(self - target, -delta, delta) * _spread(grad_output, self, reduction)


def _log(x: Lazy) -> Lazy:
    """At least -100, as torch has it in this loss."""
    return pointwise("maximum", pointwise("log", x), -100.0)


@rule("binary_cross_entropy")
def _bce(region: Region, self: Lazy, target: Lazy, weight: Lazy | None = None, reduction: int = 1) -> Lazy:
    low = pointwise("maximum", pointwise("log1p", -self), -100.0)
    loss = (target - 1) * low - target * _log(self)
    return _REDUCE[reduction](loss if weight is None else loss * weight)


@rule("binary_cross_entropy_backward")
def _bce_backward(
    region: Region, grad_output: Lazy, self: Lazy, target: Lazy, weight: Lazy | None = None, reduction: int = 1
) -> Lazy:
    slope = (self - target) / pointwise("maximum", (1 - self) * self, 1e-12)
    grad = slope * _spread(grad_output, self, reduction)
    return grad if weight is None else grad * weight


@rule("binary_cross_entropy_with_logits")
def _bce_with_logits(
    region: Region,
    self: Lazy,
    target: Lazy,
    weight: Lazy | None = None,
    pos_weight: Lazy | None = None,
    reduction: int = 1,
) -> Lazy:
    if pos_weight is not None:
        raise Unsupported("a binary cross entropy with weights of the positives")
    softplus = pointwise("log1p", pointwise("exp", -pointwise("abs", self)))
    loss = (1 - target) * self + softplus - pointwise("minimum", self, 0.0)
    return _REDUCE[reduction](loss if weight is None else loss * weight)
