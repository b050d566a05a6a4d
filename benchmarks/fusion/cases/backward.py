"""Backward cases: what autograd computes from the incoming gradient and the tensors that the forward saved."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.fusion.cases.case import Arguments, Case, Draw, Shape


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of a layer norm over the last axis; ``mean`` and ``rstd`` [R, 1] were saved."""
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )
    return dx, dweight, dbias


def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of ``x * rstd * weight``, computed in float32; ``rstd`` [R, 1] was saved in float32."""
    dy32, normal = dy.float(), x.float() * rstd
    g = dy32 * weight.float()
    dx = rstd * (g - normal * (g * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy32 * normal).sum(0).to(weight.dtype)


def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """dx of a softmax over the last axis whose result ``y`` was saved."""
    dx: Tensor = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)
    return dx


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dbias) of ``gelu(x + bias)``."""
    dx = torch.ops.aten.gelu_backward(dy, x + bias)
    return dx, dx.sum(0)


def cross_entropy_backward(dloss: Tensor, logits: Tensor, lse: Tensor, target: Tensor) -> Tensor:
    """dlogits of ``logsumexp(logits) - logits[target]``; ``dloss`` and the saved ``lse`` are float32, a value a row."""
    p = torch.exp(logits.float() - lse[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    return (torch.where(hit, p - 1, p) * dloss[:, None]).to(logits.dtype)


def _layer_norm(draw: Draw, shape: Shape) -> Arguments:
    x, weight, bias = draw.normal(*shape), draw.positive(shape[-1]), draw.normal(shape[-1])
    _, mean, rstd = torch.native_layer_norm(x, shape[-1:], weight, bias, 1e-5)
    return draw.normal(*shape), x, mean, rstd, weight, bias


def _rms_norm(draw: Draw, shape: Shape) -> Arguments:
    x = draw.normal(*shape)
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return draw.normal(*shape), x, rstd, draw.positive(shape[-1])


def _softmax(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), torch.softmax(draw.normal(*shape), -1)


def _bias_gelu(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1])


def _cross_entropy(draw: Draw, shape: Shape) -> Arguments:
    rows, classes = shape
    logits = draw.normal(*shape)
    lse = torch.logsumexp(logits.float(), -1)
    dloss = torch.full((rows,), 1 / rows, device=draw.device)
    return dloss, logits, lse, draw.index(classes, rows)


_F32, _BF16 = torch.float32, torch.bfloat16


def _case(
    name: str, title: str, dtype: torch.dtype, gpu: Shape, cpu: Shape, fn: object, inputs: object, twin: str
) -> Case:
    return Case(name, "backward", f"{title} backward", dtype, gpu, cpu, fn, inputs, twin)  # type: ignore[arg-type]


_LN, _ln, _twin = "layer_norm", layer_norm_backward, "layer_norm_backward"

BACKWARD = (
    _case("layer_norm_backward", _LN, _F32, (8192, 1024), (2048, 1024), _ln, _layer_norm, _twin),
    _case("layer_norm_backward_narrow", _LN, _F32, (32768, 256), (8192, 256), _ln, _layer_norm, _twin),
    _case("layer_norm_backward_bf16", _LN, _BF16, (2048, 4096), (512, 4096), _ln, _layer_norm, _twin),
    _case(
        "rms_norm_backward", "rms_norm", _BF16, (65536, 2048), (256, 2048), rms_norm_backward, _rms_norm,
        "rms_norm_backward",
    ),
    _case(
        "softmax_backward", "softmax", _F32, (384, 512, 512), (16, 256, 512), softmax_backward, _softmax,
        "softmax_backward",
    ),
    _case(
        "bias_gelu_backward", "bias_gelu", _BF16, (8192, 16384), (64, 16384), bias_gelu_backward, _bias_gelu,
        "bias_gelu_backward",
    ),
    _case(
        "cross_entropy_backward", "cross_entropy", _BF16, (2048, 128256), (8, 128256), cross_entropy_backward,
        _cross_entropy, "cross_entropy_backward",
    ),
)  # fmt: skip
