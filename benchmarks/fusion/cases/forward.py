"""Cases that compute something forward: normalisations, softmax, losses, cells, position encoding, quantisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.domains.fusion.builtin import (
    bias_gelu_residual_layer_norm,
    cross_entropy,
    layer_norm,
    rms_norm,
    softmax_mask,
    swiglu_rms_norm,
)
from benchmarks.fusion.cases.case import Arguments, Case, Draw, Shape

BLOCK = 32
"""Elements that share a scale, as in the microscaling formats."""
FP8_MAX = 448.0
"""Largest number of float8_e4m3, which scales map a block's largest magnitude to."""
GROUPS = 32


def softmax(x: Tensor) -> Tensor:
    """[R, C], along rows."""
    return torch.softmax(x, -1)


def outer_softmax(x: Tensor) -> Tensor:
    """[R, C], along columns."""
    return torch.softmax(x, 0)


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The element-wise part of an LSTM step: ``gates`` [B, 4H] (input, forget, cell, output) and ``cell`` [B, H]."""
    i, f, g, o = gates.chunk(4, -1)
    new = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new), new


def attention_gru(from_input: Tensor, from_hidden: Tensor, hidden: Tensor, attention: Tensor) -> Tensor:
    """The element-wise part of DIEN's attention GRU (AUGRU), a row for each item of the users' histories.

    Args:
        from_input, from_hidden: what the two matrix products gave, [B, T, 3H]: reset, update, candidate.
        hidden: state before the step, [B, T, H].
        attention: how much the item matters to the advertisement, [B, T]; it scales the update gate.
    """
    r1, u1, n1 = from_input.chunk(3, -1)
    r2, u2, n2 = from_hidden.chunk(3, -1)
    update = attention[..., None] * torch.sigmoid(u1 + u2)
    candidate = torch.tanh(n1 + torch.sigmoid(r1 + r2) * n2)
    return (1 - update) * hidden + update * candidate


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[N, C, H, W] in 32 groups of channels, as in the residual blocks of diffusion models."""
    return F.silu(F.group_norm(x, GROUPS, weight, bias))


def batch_norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Training: ([N, C, H, W] result, saved mean, saved reciprocal deviation, new running mean and variance)."""
    y, mean, rstd, new_mean, new_var = torch.ops.aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, True, 0.1, 1e-5
    )
    return torch.relu(y), mean, rstd, new_mean, new_var


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position encoding of [T, heads, D] by [T, D], the two halves of D turned against each other."""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


def dual_axis_amax(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale [R, C] by the largest magnitude of every 32 elements, along rows and along columns.

    What block-scaled matrix products take, forward and backward: 32 elements share a scale that maps their largest
    magnitude to 448. Scales are not rounded to powers of two, and scaled values keep the type of ``x``.

    Returns:
        ``x`` over its row scales [R, C], those scales [R, C/32] in float32, ``x`` over its column scales [R, C], and
        those scales [R/32, C].
    """
    rows, cols = x.shape
    b = x.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK).float()
    magnitude = b.abs()
    along_row = magnitude.amax(3, keepdim=True).clamp_min(1e-12) / FP8_MAX
    along_col = magnitude.amax(1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (
        (b / along_row).to(x.dtype).view(rows, cols),
        along_row.view(rows, cols // BLOCK),
        (b / along_col).to(x.dtype).view(rows, cols),
        along_col.view(rows // BLOCK, cols),
    )


def _norm(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.positive(shape[-1]), draw.normal(shape[-1])


def _rms(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.positive(shape[-1])


def _feed_forward(draw: Draw, shape: Shape) -> Arguments:
    cols = shape[-1]
    return draw.normal(*shape), draw.normal(cols), draw.normal(*shape), draw.positive(cols), draw.normal(cols)


def _swiglu(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.normal(*shape), draw.positive(shape[-1])


def _one(draw: Draw, shape: Shape) -> Arguments:
    return (draw.normal(*shape),)


def _masked(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.normal(1, *shape[1:])


def _loss(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.index(shape[1], shape[0])


def _lstm(draw: Draw, shape: Shape) -> Arguments:
    batch, gates, hidden = shape
    return draw.normal(batch, gates * hidden), draw.normal(batch, hidden)


def _attention_gru(draw: Draw, shape: Shape) -> Arguments:
    *rows, hidden = shape
    gates = (*rows, 3 * hidden)
    return draw.normal(*gates), draw.normal(*gates), draw.normal(*shape), draw.positive(*rows)


def _channels(draw: Draw, shape: Shape) -> Arguments:
    return draw.normal(*shape), draw.positive(shape[1]), draw.normal(shape[1])


def _batch_norm(draw: Draw, shape: Shape) -> Arguments:
    return *_channels(draw, shape), draw.normal(shape[1]), draw.positive(shape[1])


def _rope(draw: Draw, shape: Shape) -> Arguments:
    angles = draw.normal(shape[0], shape[2], dtype=torch.float32)
    return draw.normal(*shape), angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)


_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16


def _case(
    name: str, title: str, dtype: torch.dtype, gpu: Shape, cpu: Shape, fn: object, inputs: object, twin: str = ""
) -> Case:
    return Case(name, "forward", title, dtype, gpu, cpu, fn, inputs, twin or title)  # type: ignore[arg-type]


_BGRL, _bgrl = "bias_gelu_residual_layer_norm", bias_gelu_residual_layer_norm

FORWARD = (
    _case("layer_norm", "layer_norm", _F32, (16384, 1024), (2048, 1024), layer_norm, _norm),
    _case("layer_norm_bf16", "layer_norm", _BF16, (8192, 4096), (512, 4096), layer_norm, _norm),
    _case("rms_norm", "rms_norm", _BF16, (8192, 8192), (128, 8192), rms_norm, _rms),
    _case("bias_gelu_residual_layer_norm", _BGRL, _F32, (8192, 768), (1024, 768), _bgrl, _feed_forward),
    _case("bias_gelu_residual_layer_norm_bf16", _BGRL, _BF16, (8192, 4096), (256, 4096), _bgrl, _feed_forward),
    _case("softmax_scale_mask", "softmax_scale_mask", _F32, (384, 512, 512), (8, 256, 512), softmax_mask, _masked),
    _case("softmax", "softmax", _F32, (512, 65536), (16, 65536), softmax, _one),
    _case("outer_softmax", "outer softmax", _F32, (4096, 2048), (512, 1024), outer_softmax, _one, "outer_softmax"),
    _case("swiglu_rms_norm", "swiglu_rms_norm", _BF16, (4096, 14336), (64, 14336), swiglu_rms_norm, _swiglu),
    _case("cross_entropy", "cross_entropy", _BF16, (2048, 128256), (16, 128256), cross_entropy, _loss),
    _case("lstm_cell", "lstm cell", _F32, (256, 4, 1024), (128, 4, 1024), lstm_cell, _lstm, "lstm_cell"),
    _case(
        "attention_gru", "DIEN attention GRU", _F32, (256, 100, 72), (64, 100, 72), attention_gru, _attention_gru,
        "attention_gru",
    ),
    _case("group_norm_silu", "group_norm_silu", _F16, (16, 320, 64, 64), (4, 320, 32, 32), group_norm_silu, _channels),
    _case(
        "batch_norm_relu", "batch_norm_relu training", _F32, (64, 256, 28, 28), (16, 64, 28, 28), batch_norm_relu,
        _batch_norm, "batch_norm_relu",
    ),
    _case("rope", "rope", _BF16, (8192, 32, 128), (256, 32, 128), rope, _rope),
    _case(
        "dual_axis_amax", "dual-axis 32-block amax scaling", _BF16, (8192, 8192), (512, 1024), dual_axis_amax, _one,
        "dual_axis_amax",
    ),
)  # fmt: skip
