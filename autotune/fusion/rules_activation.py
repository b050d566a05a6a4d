"""Rules of the activation functions and their backwards."""

from __future__ import annotations

import math

import torch

from autotune.fusion import views
from autotune.fusion.lazy import Lazy, Number, Region, cast, pointwise
from autotune.fusion.rules import rule
from autotune.fusion.rules_pointwise import arithmetic, clamp, compare, select


@rule("relu")
def _relu(region: Region, self: Lazy) -> Lazy:
    return arithmetic("maximum", self, 0)


@rule("threshold_backward")
def _threshold_backward(region: Region, grad_output: Lazy, self: Lazy, threshold: Number) -> Lazy:
    return select(compare("le", self, threshold), 0, grad_output)


@rule("sigmoid_backward")
def _sigmoid_backward(region: Region, grad_output: Lazy, output: Lazy) -> Lazy:
    return grad_output * (1 - output) * output


@rule("tanh_backward")
def _tanh_backward(region: Region, grad_output: Lazy, output: Lazy) -> Lazy:
    return grad_output * (1 - output * output)


@rule("silu")
def _silu(region: Region, self: Lazy) -> Lazy:
    return self * pointwise("sigmoid", self)


@rule("silu_backward")
def _silu_backward(region: Region, grad_output: Lazy, self: Lazy) -> Lazy:
    s = pointwise("sigmoid", self)
    return grad_output * s * (1 + self * (1 - s))


_BETA = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5
_KAPPA = 0.044715


@rule("gelu")
def _gelu(region: Region, self: Lazy, *, approximate: str = "none") -> Lazy:
    if approximate == "tanh":
        return 0.5 * self * (1 + pointwise("tanh", _BETA * (self + _KAPPA * (self * self * self))))
    return 0.5 * self * (1 + pointwise("erf", self * math.sqrt(0.5)))


@rule("gelu_backward")
def _gelu_backward(region: Region, grad: Lazy, self: Lazy, *, approximate: str = "none") -> Lazy:
    if approximate == "tanh":
        square = self * self
        t = pointwise("tanh", _BETA * (self + _KAPPA * (square * self)))
        slope = _BETA * (1 + 3 * _KAPPA * square)
        return grad * (0.5 * (1 + t) + 0.5 * self * ((1 - t * t) * slope))
    cdf = 0.5 * (1 + pointwise("erf", self * math.sqrt(0.5)))
    pdf = pointwise("exp", self * self * -0.5) * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + self * pdf)


@rule("leaky_relu")
def _leaky_relu(region: Region, self: Lazy, negative_slope: Number = 0.01) -> Lazy:
    return select(compare("gt", self, 0), self, self * negative_slope)


@rule("leaky_relu_backward")
def _leaky_relu_backward(
    region: Region, grad_output: Lazy, self: Lazy, negative_slope: Number, self_is_result: bool
) -> Lazy:
    return select(compare("gt", self, 0), grad_output, grad_output * negative_slope)


@rule("hardtanh")
def _hardtanh(region: Region, self: Lazy, min_val: Number = -1, max_val: Number = 1) -> Lazy:
    return clamp(self, min_val, max_val)


@rule("elu")
def _elu(region: Region, self: Lazy, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Lazy:
    low = pointwise("expm1", self * float(input_scale)) * (float(alpha) * float(scale))
    return select(compare("gt", self, 0), self * float(scale), low)


@rule("softplus")
def _softplus(region: Region, self: Lazy, beta: Number = 1, threshold: Number = 20) -> Lazy:
    scaled = self * float(beta)
    low = pointwise("log1p", pointwise("exp", scaled)) / float(beta)
    return select(compare("gt", scaled, threshold), self, low)


@rule("hardsigmoid")
def _hardsigmoid(region: Region, self: Lazy) -> Lazy:
    return clamp(self + 3.0, 0, 6) * (1 / 6)


@rule("hardswish")
def _hardswish(region: Region, self: Lazy) -> Lazy:
    return self * clamp(self + 3.0, 0, 6) * (1 / 6)


@rule("glu")
def _glu(region: Region, self: Lazy, dim: int = -1) -> Lazy:
    a, b = views.split(self, self.shape[self.dim(dim)] // 2, dim)
    return a * pointwise("sigmoid", b)


@rule("glu_backward")
def _glu_backward(region: Region, grad_output: Lazy, self: Lazy, dim: int) -> Lazy:
    a, b = views.split(self, self.shape[self.dim(dim)] // 2, dim)
    s = pointwise("sigmoid", b)
    return views.cat([grad_output * s, grad_output * a * s * (1 - s)], self.dim(dim))


@rule("hardtanh_backward")
def _hardtanh_backward(region: Region, grad_output: Lazy, self: Lazy, min_val: Number, max_val: Number) -> Lazy:
    outside = pointwise("or", compare("le", self, min_val), compare("ge", self, max_val), dtype=torch.bool)
    return select(outside, 0, grad_output)


@rule("elu_backward")
def _elu_backward(
    region: Region,
    grad_output: Lazy,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
    self_or_result: Lazy,
) -> Lazy:
    x, factor = self_or_result, float(input_scale)
    if is_result:
        low = (x + float(alpha) * float(scale)) * factor
    else:
        low = pointwise("exp", x * factor) * (factor * float(alpha) * float(scale))
    return grad_output * select(compare("le", x, 0), low, float(scale))


@rule("softplus_backward")
def _softplus_backward(region: Region, grad_output: Lazy, self: Lazy, beta: Number, threshold: Number) -> Lazy:
    scaled = self * float(beta)
    return select(compare("gt", scaled, threshold), grad_output, grad_output * pointwise("sigmoid", scaled))


@rule("hardsigmoid_backward")
def _hardsigmoid_backward(region: Region, grad_output: Lazy, self: Lazy) -> Lazy:
    inside = pointwise("and", compare("gt", self, -3.0), compare("lt", self, 3.0), dtype=torch.bool)
    return select(inside, grad_output * (1 / 6), 0)


@rule("hardswish_backward")
def _hardswish_backward(region: Region, grad_output: Lazy, self: Lazy) -> Lazy:
    middle = select(compare("lt", self, 3.0), grad_output * (self * (1 / 3) + 0.5), grad_output)
    return select(compare("le", self, -3.0), 0, middle)


@rule("mish")
def _mish(region: Region, self: Lazy) -> Lazy:
    return self * pointwise("tanh", _softplus(region, self))


@rule("_prelu_kernel")
def _prelu(region: Region, self: Lazy, weight: Lazy) -> Lazy:
    return select(compare("gt", self, 0), self, self * weight)


@rule("_prelu_kernel_backward")
def _prelu_backward(region: Region, grad_output: Lazy, self: Lazy, weight: Lazy) -> tuple[Lazy, ...]:
    positive = compare("gt", self, 0)
    return select(positive, grad_output, grad_output * weight), select(positive, 0, grad_output * self)


@rule("threshold")
def _threshold(region: Region, self: Lazy, threshold: Number, value: Number) -> Lazy:
    return select(compare("gt", self, threshold), self, value)


@rule("native_dropout_backward")
def _dropout_backward(region: Region, grad_output: Lazy, mask: Lazy, scale: Number) -> Lazy:
    return grad_output * cast(mask, torch.float32) * float(scale)
