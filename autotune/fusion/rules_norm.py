"""Rules of the normalisations (layer, root mean square, group, batch) and their backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autotune.errors import Unsupported
from autotune.fusion import views
from autotune.fusion.lazy import Lazy, Region, pointwise, reduce
from autotune.fusion.rules import rule
from autotune.fusion.rules_composite import mean, moments


def _affine(x: Lazy, weight: Lazy | None, bias: Lazy | None) -> Lazy:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _tail(x: Lazy, normalized_shape: Sequence[int]) -> list[int]:
    return list(range(x.ndim - len(normalized_shape), x.ndim))


@rule("native_layer_norm")
def _layer_norm(
    region: Region, input: Lazy, normalized_shape: Sequence[int], weight: Lazy | None, bias: Lazy | None, eps: float
) -> tuple[Lazy, ...]:
    centred, average, variance = moments(input, _tail(input, normalized_shape))
    rstd = pointwise("rsqrt", variance + eps)
    return _affine(centred * rstd, weight, bias), average, rstd


def _norm_backward(grad: Lazy, normed: Lazy, rstd: Lazy, dims: Sequence[int]) -> Lazy:
    """Through ``normed = (x - mean) * rstd``, all over ``dims``."""
    return rstd * (grad - mean(grad, dims, True) - normed * mean(grad * normed, dims, True))


@rule("native_layer_norm_backward")
def _layer_norm_backward(
    region: Region,
    grad_out: Lazy,
    input: Lazy,
    normalized_shape: Sequence[int],
    mean: Lazy,
    rstd: Lazy,
    weight: Lazy | None,
    bias: Lazy | None,
    output_mask: Sequence[bool],
) -> tuple[Lazy | None, ...]:
    dims = _tail(input, normalized_shape)
    lead = list(range(dims[0]))
    normed = (input - mean) * rstd
    grad = grad_out if weight is None else grad_out * weight
    return (
        _norm_backward(grad, normed, rstd, dims) if output_mask[0] else None,
        reduce("sum", grad_out * normed, lead) if output_mask[1] else None,
        reduce("sum", grad_out, lead) if output_mask[2] else None,
    )


@rule("_fused_rms_norm")
def _rms_norm(
    region: Region, input: Lazy, normalized_shape: Sequence[int], weight: Lazy | None, eps: float | None
) -> tuple[Lazy, ...]:
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    rstd = pointwise("rsqrt", mean(input * input, _tail(input, normalized_shape), True) + eps)
    return _affine(input * rstd, weight, None), rstd


@rule("_fused_rms_norm_backward")
def _rms_norm_backward(
    region: Region,
    grad_out: Lazy,
    input: Lazy,
    normalized_shape: Sequence[int],
    rstd: Lazy,
    weight: Lazy | None,
    output_mask: Sequence[bool],
) -> tuple[Lazy | None, ...]:
    dims = _tail(input, normalized_shape)
    normed = input * rstd
    grad = grad_out if weight is None else grad_out * weight
    return (
        rstd * (grad - normed * mean(grad * normed, dims, True)) if output_mask[0] else None,
        reduce("sum", grad_out * normed, range(dims[0])) if output_mask[1] else None,
    )


def _channels(x: Lazy | None, ndim: int) -> Lazy | None:
    """[C] shaped to broadcast along dimension 1."""
    return None if x is None else views.reshape(x, [1, x.shape[0]] + [1] * (ndim - 2))


@rule("native_group_norm")
def _group_norm(
    region: Region,
    input: Lazy,
    weight: Lazy | None,
    bias: Lazy | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Lazy, ...]:
    grouped = views.reshape(input, [N, group, C // group, HxW])
    centred, average, variance = moments(grouped, [2, 3])
    rstd = pointwise("rsqrt", variance + eps)
    normed = views.reshape(centred * rstd, input.shape)
    out = _affine(normed, _channels(weight, input.ndim), _channels(bias, input.ndim))
    return out, views.reshape(average, [N, group]), views.reshape(rstd, [N, group])


@rule("native_group_norm_backward")
def _group_norm_backward(
    region: Region,
    grad_out: Lazy,
    input: Lazy,
    mean: Lazy,
    rstd: Lazy,
    weight: Lazy | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Lazy | None, ...]:
    parts = [N, group, C // group, HxW]
    deviation = views.reshape(rstd, [N, group, 1, 1])
    normed = (views.reshape(input, parts) - views.reshape(mean, [N, group, 1, 1])) * deviation
    raw = views.reshape(grad_out, parts)
    grad = raw if weight is None else raw * views.reshape(weight, [1, group, C // group, 1])
    return (
        views.reshape(_norm_backward(grad, normed, deviation, [2, 3]), input.shape) if output_mask[0] else None,
        views.reshape(reduce("sum", raw * normed, [0, 3]), [C]) if output_mask[1] else None,
        views.reshape(reduce("sum", raw, [0, 3]), [C]) if output_mask[2] else None,
    )


def _batch_statistics(x: Lazy, eps: float) -> tuple[Lazy, Lazy, Lazy, Lazy]:
    """(centred, mean, biased variance, reciprocal deviation), each to broadcast along dimension 1."""
    centred, average, variance = moments(x, [d for d in range(x.ndim) if d != 1])
    return centred, average, variance, pointwise("rsqrt", variance + eps)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    region: Region,
    input: Lazy,
    weight: Lazy | None,
    bias: Lazy | None,
    running_mean: Lazy,
    running_var: Lazy,
    momentum: float,
    eps: float,
) -> tuple[Lazy | None, ...]:
    shift, scale = _channels(running_mean, input.ndim), _channels(running_var, input.ndim)
    assert shift is not None
    assert scale is not None
    normed = (input - shift) * pointwise("rsqrt", scale + eps)
    return _affine(normed, _channels(weight, input.ndim), _channels(bias, input.ndim)), None, None


@rule("_native_batch_norm_legit", "_native_batch_norm_legit_functional")
def _batch_norm(
    region: Region, input: Lazy, weight: Lazy | None, bias: Lazy | None, *rest: Any
) -> tuple[Lazy | None, ...]:
    *running, training, momentum, eps = rest
    if not training:
        raise Unsupported("batch norm with running statistics in this form")
    centred, average, variance, rstd = _batch_statistics(input, eps)
    out = _affine(centred * rstd, _channels(weight, input.ndim), _channels(bias, input.ndim))
    c = [input.shape[1]]
    results: list[Lazy | None] = [out, views.reshape(average, c), views.reshape(rstd, c)]
    if len(running) == 2 and running[0] is not None and len(region.out) == 5:
        n = input.numel // input.shape[1]
        unbiased = views.reshape(variance, c) * (n / max(n - 1, 1))
        results.append(running[0] * (1 - momentum) + views.reshape(average, c) * float(momentum))
        results.append(running[1] * (1 - momentum) + unbiased * float(momentum))
    elif any(r is not None for r in running):
        raise Unsupported("batch norm that updates its statistics in place")
    return tuple(results)


@rule("native_batch_norm_backward")
def _batch_norm_backward(
    region: Region,
    grad_out: Lazy,
    input: Lazy,
    weight: Lazy | None,
    running_mean: Lazy | None,
    running_var: Lazy | None,
    save_mean: Lazy | None,
    save_invstd: Lazy | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Lazy | None, ...]:
    if not train or save_mean is None or save_invstd is None:
        raise Unsupported("the backward of a batch norm with running statistics")
    dims = [d for d in range(input.ndim) if d != 1]
    average, rstd, scale = (_channels(x, input.ndim) for x in (save_mean, save_invstd, weight))
    assert average is not None
    assert rstd is not None
    normed = (input - average) * rstd
    grad = grad_out if scale is None else grad_out * scale
    return (
        _norm_backward(grad, normed, rstd, dims) if output_mask[0] else None,
        reduce("sum", grad_out * normed, dims) if output_mask[1] else None,
        reduce("sum", grad_out, dims) if output_mask[2] else None,
    )
