"""Functions of every kind that a kernel must cope with, at sizes small enough to run anywhere.

Each is traced to aten calls on fake tensors, cut into regions and made canonical as in a search; nothing is allocated.
Scripts for GPU hosts use this list too, so it imports no pytest.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.schedules.cuda import Scheme
from autotune.ir.graph import Graph
from autotune.ir.nodes import LIBRARY
from autotune.space import load_space
from autotune.task import Config, Task, config_key
from autotune.workload import Workload

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
I64, I32, I16, I8, U8, BOOL = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool


def T(*shape: int, d: torch.dtype = F32, strides: tuple[int, ...] | None = None) -> Callable[[], Tensor]:
    """A tensor to be made later, under a fake mode; ``strides`` in elements where it is not contiguous."""

    def make() -> Tensor:
        return torch.empty(shape, dtype=d) if strides is None else torch.empty_strided(shape, strides, dtype=d)

    return make


@dataclass(frozen=True)
class Case:
    """``groups`` is how many groups each of its regions has on a CPU, ``on_cuda`` on a GPU where that differs."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Callable[[], Tensor], ...]
    groups: tuple[int, ...] = (1,)
    on_cuda: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w).to(x.dtype)


def softmax_mask(s: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(s * 0.125 + mask, -1)


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return torch.logsumexp(x.float(), -1) - x.gather(-1, t[:, None])[:, 0].float()


def swiglu_rms(g: Tensor, u: Tensor, w: Tensor) -> Tensor:
    return rms_norm(F.silu(g) * u, w)


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c2 = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c2), c2


def gru_step(h: Tensor, projected: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A step of a GRU with the product that makes its gates."""
    xr, xu, xn = projected.chunk(3, 1)
    hr, hu, hn = F.linear(h, w, b).chunk(3, 1)
    update = torch.sigmoid(xu + hu)
    return (1 - update) * h + update * torch.tanh(xn + torch.sigmoid(xr + hr) * hn)


def lstm_steps(h: Tensor, c: Tensor, projected: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A step of several LSTMs side by side, weights [n, k, gates]."""
    return lstm(projected + torch.bmm(h, w), c)


def gated_vector(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The first half of a decoder's feed-forward layer for one token."""
    return F.silu(x @ gate.t()) * (x @ up.t())


def vector_residual_rms(x: Tensor, down: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Its second half, the residual and the next layer's norm."""
    h = r + torch.mv(down, x[0])
    return h, rms_norm(h, w)


def dequantized_vector(x: Tensor, w: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    """A layer whose weights are stored as bytes with a scale a row, for one token."""
    return F.linear(x, w.to(x.dtype) * scale, b)


def classify(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.log_softmax(F.linear(x, w, b).float(), -1)


def bias_gelu_residual_ln(x: Tensor, bias: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return layer_norm(F.gelu(x + bias) + r, w, b)


def residual_ln(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + y
    return h, layer_norm(h, w, b)


def rope(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return x * c + torch.cat((-x[..., h:], x[..., :h]), -1) * s


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 8, w, b))


def integers(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.where(m, x * 2 + 1, x // 3)
    return y, (y > 0).sum(-1), y.amax(-1) & 7


def bits(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = (x ^ y) | (x & ~y)
    return z, (z % 5 == y % 3) | (x < y)


def dropout(x: Tensor, keep: Tensor, r: Tensor) -> Tensor:
    return torch.where(keep, x * (1 / 0.9), 0.0) + r


def mean_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t)


def momentum(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """A step of an optimizer on several tensors: parameters, gradients and moments in turn."""
    new: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p, g, m in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True):
        moment = 0.9 * m + g
        new[0].append(p - 0.01 * moment / (torch.sqrt(moment * moment) + 1e-3))
        new[1].append(moment)
    return new


def unrelated(x: Tensor, y: Tensor, z: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x, -1), F.gelu(y), z.sum(0), torch.tanh(s) + 1


def relu_statistics(x: Tensor) -> tuple[Tensor, ...]:
    y = F.relu(x)
    return y.mean(0), y.var(0, unbiased=False), y.amax(1), torch.softmax(y, -1)


def expanded(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A row of sums written out over all columns, and a column vector over all rows."""
    return (x.sum(-1, keepdim=True) + 1).expand(x.shape).contiguous(), x + y[:, None]


def dequantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (x.float() - zero) * scale


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127 + 1e-6
    return torch.round(x / scale).to(torch.int8), scale


def scalars(x: Tensor, a: Tensor, n: Tensor) -> Tensor:
    return x * a + n


def every_function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    p = (x + 0.1 * y).abs() + 0.5
    q = p - 2
    return (
        torch.tanh(x) + torch.erf(y) + torch.sigmoid(x) + torch.exp(-p) + torch.expm1(-p) + torch.log1p(p),
        torch.log(p) + torch.log2(p) + torch.sqrt(p) + torch.rsqrt(p) + torch.reciprocal(p) + torch.pow(p, 1.7),
        torch.sin(q) + torch.cos(y) + torch.exp2(-p) + torch.maximum(x, y) * torch.minimum(x, y) + torch.sign(x),
        torch.floor(q) + torch.ceil(y) + torch.round(q * 4) + torch.trunc(y) + torch.remainder(q, 0.75),
        torch.isnan(q) | (q >= y) & (x != 0),
    )


def library_functions(x: Tensor) -> Tensor:
    """Every function that an entry in ``autotune.ir.nodes`` alone makes known, where it has values."""
    inside, above = 0.9 * torch.tanh(x), x.abs() + 1.25
    near = {"acosh": above, "lgamma": above, "log1p": above}
    terms = [getattr(torch, name)(near.get(name, inside)) for name in LIBRARY]
    return functools.reduce(torch.add, terms)


def minmax_prod(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1.25
    return y.amin(-1), y.amax(-1), y.prod(-1), (y > 2.5).any(-1), (y < 4).all(-1)


def embedding_ln(table: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return layer_norm(F.embedding(ids, table), w, b)


def dropped(x: Tensor, p: float = 0.1) -> tuple[Tensor, Tensor]:
    """Dropout, a hash of each element's place by then, and the mask."""
    return torch.native_dropout(x, p, True)


def dropout_residual_ln(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The end of half a BERT layer in training: the mask, the sum and the statistics are kept for the backward."""
    y, keep = dropped(x)
    h = r + y
    return keep, h, *torch.ops.aten.native_layer_norm.default(h, list(w.shape), w, b, 1e-12)


def upsample_silu(x: Tensor) -> Tensor:
    return F.interpolate(F.silu(x), scale_factor=2.0, mode="nearest") + 1


def points_ln(x: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Rows of a table that two indices choose together, one of them counted from the end."""
    return F.layer_norm(x[rows, -1 - cols], x.shape[-1:])


def embeddings_ln_dropout(
    words: Tensor, ids: Tensor, places: Tensor, types: Tensor, kinds: Tensor, w: Tensor, b: Tensor
) -> tuple[Tensor, ...]:
    """The beginning of BERT in training; the mask is computed again in the backward."""
    at = torch.arange(ids.shape[1], device=ids.device)
    h = F.embedding(ids, words) + F.embedding(at, places) + F.embedding(kinds, types)
    y, *statistics = torch.ops.aten.native_layer_norm.default(h, list(w.shape), w, b, 1e-12)
    return h, *statistics, dropped(y)[0]


def window_backward(p: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Window attention: gradients of scores [windows, heads, queries, keys], and of a bias for all windows."""
    weighted = grad.float() * p
    d = weighted - p * weighted.sum(-1, keepdim=True)
    return d.half(), d.sum(0)


def scatter_tied(extent: int, padding: int = -1) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The gradient of an embedding of so many rows, and that of a decoder tied to it."""

    def fn(grad: Tensor, ids: Tensor, tied: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, ids, extent, padding, False) + tied

    return fn


def scatter_twice(g: Tensor, ids: Tensor, h: Tensor, others: Tensor, tied: Tensor) -> Tensor:
    """The gradient of an embedding with two readers, an encoder and a decoder."""
    backward = torch.ops.aten.embedding_dense_backward
    return backward(g, ids, 40, 1, False) + backward(h, others, 40, -1, False) + tied


def gather_backward(extent: int, dim: int = -1) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient of ``gather(x, dim, index)`` with indices that several batches share."""

    def fn(grad: Tensor, index: Tensor) -> Tensor:
        shape = list(grad.shape)
        shape[dim] = extent
        return torch.scatter_add(grad.new_zeros(shape), dim, index.expand(grad.shape), grad)

    return fn


def gather_scaled_backward(grad: Tensor, index: Tensor, base: Tensor) -> Tensor:
    """With operators before and after the sums, and a tensor that they are added to."""
    return torch.scatter_add(base, -1, index, grad / 3.0) * torch.sigmoid(base)


def gather_across_backward(grad: Tensor, index: Tensor) -> Tensor:
    """Adjacent terms belong to adjacent rows, as in the second gradient of disentangled attention."""
    terms = grad.transpose(-1, -2)
    return torch.scatter_add(grad.new_zeros((*terms.shape[:-1], 24)), -1, index.expand(terms.shape), terms)


def scatter_made(grad: Tensor, gate: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With pointwise operators before the sums, and two results after them, of two types."""
    d = torch.ops.aten.embedding_dense_backward(grad * torch.sigmoid(gate), ids, weight.shape[0], -1, False)
    return d.to(weight.dtype), weight - 0.01 * d


def log_softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    return g - torch.exp(y) * g.sum(-1, keepdim=True)


def layer_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-1]
    d = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)
    h, gw = d * r, g * w
    dx = (gw - gw.sum(-1, keepdim=True) / n - h * (gw * h).sum(-1, keepdim=True) / n) * r
    return dx, (g * h).sum(0), g.sum(0)


def packed_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients [batch, heads, steps, width] of the parts of one packed projection: its output's, and its
    bias's."""
    b, h, s, d = q.shape
    parts = [torch.ops.aten.select_backward(x, [3, b, h, s, d], 0, n) for n, x in enumerate((q, k, v))]
    packed = (parts[2] + parts[1] + parts[0]).permute(1, 3, 0, 2, 4).reshape(b * s, 3 * h * d)
    return packed, packed.sum(0)


def layer_norm_0(x: Tensor, w: Tensor) -> Tensor:
    d = x - x.mean(0, keepdim=True)
    return d * torch.rsqrt(d.pow(2).mean(0, keepdim=True) + 1e-5) * w


def scaled_both_ways(x: Tensor) -> tuple[Tensor, ...]:
    """Blocks of 32 neighbours scaled by their largest element, along rows and along columns."""
    rows, cols = x.shape
    v = x.view(rows // 32, 32, cols // 32, 32).float()
    across, down = v.abs().amax(3, keepdim=True) / 448, v.abs().amax(1, keepdim=True) / 448
    return (v / across).bfloat16().view(x.shape), (v / down).bfloat16().view(x.shape), across, down


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return x.clamp(min=-most, max=most).to(dtype)


def float8_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantised by one scale for all, as torchao's dynamic scaling does."""
    scale = 448 / torch.max(torch.abs(x)).float().clamp(min=1e-12)
    return saturated(x.float() * scale, E4M3), scale


def rows_as(x: Tensor, d: torch.dtype) -> tuple[Tensor, Tensor]:
    """By a scale for each row."""
    scale = torch.finfo(d).max / torch.amax(torch.abs(x), -1, keepdim=True).float().clamp(min=1e-12)
    return saturated(x.float() * scale, d), scale.reciprocal()


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return rows_as(x, E4M3)


def float8_rms(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return float8_rows(rms_norm(x, w))


def float8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """By a scale for each 128 neighbours."""
    v = x.view(x.shape[0], -1, 128).float()
    top = v.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return saturated(v * (448 / top), E4M3).view(x.shape), (top / 448).squeeze(-1)


def float8_both_ways(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In both layouts, as the two products of a backward read it."""
    q, scale = float8_tensor(x)
    return q, q.t().contiguous(), scale


def float8_read(q: Tensor, scale: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Stored floats of eight bits, scaled back, and the same numbers in the other type's range and layout."""
    x = q.float() * scale
    return x + g.float(), saturated(x, E5M2).t().contiguous()


def every_second(x: Tensor, y: Tensor) -> Tensor:
    return torch.slice_scatter(x.exp(), y.float() * 2, 1, 1, None, 2) + 1


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.amax(torch.abs(x), -1, keepdim=True).float() / 127
    return torch.clamp(torch.round(x / scale.clamp(min=1e-6)), -128, 127).to(I8), scale


def norm_then_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised over dim 0, then softmax over dim 1."""
    h = (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-3)
    return torch.softmax(h, -1), x.amax((0, 1))


def nhwc(x: Tensor, b: Tensor) -> Tensor:
    """A convolution's bias and activation, written with the channels last."""
    return F.silu(x + b[:, None, None]).contiguous(memory_format=torch.channels_last)


def both_ways(x: Tensor, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors that have their neighbours along different axes, read and written."""
    h = torch.where(m.t(), x * 2 + y.t(), 0.5)
    return h, (h.abs() * y.t()).t().contiguous()


def _ln(rows: int, cols: int, d: torch.dtype) -> tuple[Callable[[], Tensor], ...]:
    return T(rows, cols, d=d), T(cols, d=d), T(cols, d=d)


def _brl(rows: int, cols: int, d: torch.dtype) -> tuple[Callable[[], Tensor], ...]:
    return T(rows, cols, d=d), T(cols, d=d), T(rows, cols, d=d), T(cols, d=d), T(cols, d=d)


def heads(b: int, h: int, s: int, d: int, dtype: torch.dtype) -> tuple[Callable[[], Tensor], ...]:
    """Three tensors [b, h, s, d] with strides of [b, s, h, d]."""
    return (T(b, h, s, d, d=dtype, strides=(s * h * d, d, h * d, 1)),) * 3


ZOO: tuple[Case, ...] = (
    Case("ln_f32", layer_norm, _ln(30, 1024, F32)),
    Case("ln_bf16", layer_norm, _ln(33, 4096, BF16)),
    Case("ln_f16", layer_norm, _ln(50, 640, F16)),
    Case("ln_1", layer_norm, _ln(40, 1, F32)),
    Case("ln_3", layer_norm, _ln(70, 3, F32)),
    Case("ln_17", layer_norm, _ln(129, 17, F16)),
    Case("ln_1001", layer_norm, _ln(7, 1001, F32)),
    Case("ln_1001_bf16", layer_norm, _ln(7, 1001, BF16)),
    Case("ln_one_row", layer_norm, _ln(1, 768, F32)),
    Case("ln_long", layer_norm, _ln(2, 40000, F32)),
    Case("rms_bf16", rms_norm, (T(40, 2048, d=BF16), T(2048, d=BF16))),
    Case("bgrl_f32", bias_gelu_residual_ln, _brl(50, 768, F32)),
    Case("bgrl_bf16", bias_gelu_residual_ln, _brl(20, 4096, BF16)),
    Case("softmax_mask", softmax_mask, (T(3, 16, 512), T(1, 16, 512))),
    Case("softmax_odd", softmax_mask, (T(5, 3001), T(1, 3001))),
    Case("cross_entropy", cross_entropy, (T(5, 32064, d=BF16), T(5, d=I64))),
    Case("cross_entropy_f32", cross_entropy, (T(9, 1000), T(9, d=I64))),
    Case("swiglu_rms", swiglu_rms, (T(8, 3584, d=BF16), T(8, 3584, d=BF16), T(3584, d=BF16))),
    Case("lstm", lstm, (T(16, 256), T(16, 64))),
    Case("gru_step", gru_step, (T(12, 36), T(12, 108), T(108, 36), T(108))),
    Case("gru_step_odd", gru_step, (T(5, 7, d=BF16), T(5, 21, d=BF16), T(21, 7, d=BF16), T(21, d=BF16))),
    Case(
        "lstm_steps",
        lstm_steps,
        (T(2, 3, 40, d=F16), T(2, 3, 24, d=F16), T(2, 3, 96, d=F16), T(2, 40, 96, d=F16)),
    ),
    Case("gated_vector", gated_vector, (T(1, 520, d=BF16), T(48, 520, d=BF16), T(48, 520, d=BF16))),
    Case("vector_residual_rms", vector_residual_rms, (T(1, 96), T(64, 96), T(64), T(64)), groups=(2,)),
    Case(
        "dequantized_vector",
        dequantized_vector,
        (T(1, 272, d=BF16), T(40, 272, d=I8), T(40, 1, d=BF16), T(40, d=BF16)),
    ),
    Case("classify", classify, (T(6, 64, d=BF16), T(37, 64, d=BF16), T(37, d=BF16)), groups=(2,), on_cuda=(1,)),
    Case("gelu", F.gelu, (T(64, 768),)),
    Case("gelu_13", F.gelu, (T(13, d=BF16),)),
    Case("residual_ln", residual_ln, (T(4, 16, 768), T(4, 16, 768), T(768), T(768))),
    Case("transposed", lambda x: x + x.t(), (T(96, 96),)),
    Case("transposed_types", both_ways, (T(45, 130, d=BF16), T(130, 45), T(130, 45, d=BOOL))),
    Case("nhwc", nhwc, (T(3, 56, 10, 10, d=F16), T(56, d=F16))),
    Case("rope", rope, (T(8, 16, 128, d=BF16), T(8, 1, 128, d=BF16), T(8, 1, 128, d=BF16))),
    Case("rope_odd", rope, (T(5, 3, 30), T(5, 1, 30), T(5, 1, 30))),
    Case("group_norm", group_norm, (T(4, 32, 8, 8), T(32), T(32))),
    Case("integers", integers, (T(33, 70, d=I64), T(33, 70, d=BOOL))),
    Case("integers_32", integers, (T(33, 64, d=I32), T(33, 64, d=BOOL))),
    Case("bits", bits, (T(21, 64, d=I32), T(21, 64, d=I32))),
    Case("int16", dequantize, (T(16, 96, d=I16), T(16, 1), T(96))),
    Case("dropout", dropout, (T(20, 300), T(20, 300, d=BOOL), T(20, 300))),
    Case("mean_cross_entropy", mean_cross_entropy, (T(100, 500), T(100, d=I64)), groups=(1,)),
    Case("momentum", momentum, tuple(T(n) for n in (1, 3, 37, 1001, 4096) for _ in range(3)), groups=(5,)),
    Case("unrelated", unrelated, (T(24, 130), T(777, d=BF16), T(40, 64), T()), groups=(4,)),
    Case("relu_statistics", relu_statistics, (T(96, 128),), groups=(1,)),
    Case("expanded", expanded, (T(24, 48), T(24)), groups=(2,)),
    Case("strided", softmax_mask, (T(12, 64, strides=(160, 1)), T(12, 64, strides=(1, 12)))),
    Case("strided_inner", layer_norm, (T(12, 64, strides=(128, 2)), T(64), T(64))),
    Case("int8", dequantize, (T(16, 96, d=I8), T(16, 1), T(16, 1))),
    Case("uint8", dequantize, (T(16, 97, d=U8), T(97), T(97))),
    Case("quantize", quantize, (T(16, 256),)),
    Case("scalars", scalars, (T(40, 36), T(), T(d=I64))),
    Case("library_functions", library_functions, (T(31, 41),)),
    Case("every_function", every_function, (T(31, 41), T(31, 41))),
    Case("minmax_prod", minmax_prod, (T(30, 40),)),
    Case("upsample_silu", upsample_silu, (T(3, 5, 6, 7, d=BF16),)),
    Case("points_ln", points_ln, (T(9, 6, 40), T(7, 1, d=I64), T(5, d=I64))),
    Case("embedding_ln", embedding_ln, (T(100, 64), T(7, 5, d=I64), T(64), T(64))),
    Case(
        "dropout_residual_ln", dropout_residual_ln, (T(13, 96, d=BF16), T(13, 96, d=BF16), T(96, d=BF16), T(96, d=BF16))
    ),
    Case(
        "embeddings_ln_dropout",
        embeddings_ln_dropout,
        (T(50, 96), T(5, 7, d=I64), T(7, 96), T(2, 96), T(5, 7, d=I64), T(96), T(96)),
    ),
    Case("log_softmax_backward", log_softmax_backward, (T(16, 500, d=F16), T(16, 500, d=F16))),
    Case("layer_norm_backward", layer_norm_backward, (T(64, 128), T(64, 128), T(128)), groups=(1,)),
    Case("packed_backward", packed_backward, heads(2, 4, 40, 8, BF16)),
    Case("packed_backward_odd", packed_backward, heads(3, 5, 33, 3, F32)),
    Case("outer_softmax", lambda x: torch.softmax(x, 0), (T(517, 96),)),
    Case("outer_softmax_bf16", lambda x: torch.softmax(x, 1), (T(3, 77, 64, d=BF16),)),
    Case("outer_logsumexp", lambda x: torch.logsumexp(x, 1), (T(5, 300, 24),)),
    Case("outer_layer_norm", layer_norm_0, (T(260, 48, d=F16), T(48, d=F16))),
    Case("tile_scaling", scaled_both_ways, (T(96, 160, d=BF16),), groups=(2,), on_cuda=(1,)),
    Case("tile_norm_softmax", norm_then_softmax, (T(77, 64),), groups=(2,), on_cuda=(1,)),
    Case("float8_tensor", float8_tensor, (T(40, 96, d=BF16),)),
    Case("float8_rows", float8_rows, (T(40, 1024, d=BF16),)),
    Case("float8_rows_odd", lambda x: rows_as(x, E5M2), (T(21, 131),)),
    Case("float8_rms", float8_rms, (T(24, 2048, d=BF16), T(2048, d=BF16))),
    Case("float8_blocks", float8_blocks, (T(12, 640, d=BF16),)),
    Case("float8_both_ways", float8_both_ways, (T(64, 192, d=BF16),)),
    Case("float8_read", float8_read, (T(33, 70, d=E4M3), T(33, 1), T(33, 70, d=E5M2))),
    Case("int8_rows", int8_rows, (T(33, 256, d=BF16),)),
    Case("flipped", lambda x, y: torch.flip(torch.cat([x, y], 1), (0, 1)) * 2, (T(21, 40, d=BF16), T(21, 24))),
    Case("every_second", every_second, (T(12, 64), T(12, 32, d=BF16))),
)
SCATTERS = (
    Case("scatter_tied", scatter_tied(50, 0), (T(5, 8, 96, d=BF16), T(5, 8, d=I64), T(50, 96, d=BF16))),
    Case("scatter_types", scatter_tied(2), (T(120, 64), T(120, d=I64), T())),
    Case("scatter_odd", scatter_tied(37), (T(33, 5, d=F16, strides=(11, 1)), T(33, d=I32), T(37, 1))),
    Case("scatter_numbers", scatter_tied(19), (T(77, 1), T(77, d=I64), T(19, 1))),
    Case(
        "scatter_twice",
        scatter_twice,
        (T(6, 31, 24, d=F16), T(6, 31, d=I64), T(90, 24, d=F16), T(90, d=I32), T(40, 24, d=F16)),
    ),
    Case("scatter_made", scatter_made, (T(40, 3, 20), T(40, 3, 20), T(40, 3, d=I64), T(61, 20, d=BF16))),
)
"""Sums at places that other data tell, which are in regions on a GPU only."""
GATHERS = (
    Case("gather_backward", gather_backward(48), (T(6, 20, 40, d=BF16), T(1, 20, 40, d=I64))),
    Case("gather_own_backward", gather_backward(64), (T(5, 7, 72), T(5, 7, 72, d=I64))),
    Case("gather_few_backward", gather_backward(2), (T(3, 33, 20, d=F16), T(3, 33, 20, d=I32))),
    Case("gather_odd_backward", gather_backward(13), (T(19, 45), T(19, 45, d=I64))),
    Case("gather_middle_backward", gather_backward(10, 1), (T(3, 40, 8), T(3, 40, 8, d=I64))),
    Case(
        "gather_scaled_backward",
        gather_scaled_backward,
        (T(4, 9, 64, d=BF16), T(4, 9, 64, d=I64), T(4, 9, 32, d=BF16)),
    ),
    Case("gather_across_backward", gather_across_backward, (T(4, 40, 16, d=BF16), T(1, 16, 40, d=I64))),
    Case("gather_across_own_backward", gather_across_backward, (T(3, 24, 40), T(3, 40, 24, d=I64))),
)
"""Gradients of ``gather``: such sums along rows."""
BY_NAME = {c.name: c for c in (*ZOO, *SCATTERS, *GATHERS)}


@functools.cache
def workloads(name: str) -> tuple[Workload, ...]:
    """The workloads of a case of the zoo."""
    return workloads_of(BY_NAME[name])


def workloads_of(case: Case) -> tuple[Workload, ...]:
    """The workloads of a case's regions, as a search on any device would have them."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from autotune.compiler.capture.hooks import hash_random_numbers
    from autotune.compiler.regions.find import find_regions

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, V.set_fake_mode(mode), torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        args = [make() for make in case.inputs]
        gm = make_fx(case.fn, decomposition_table=select_decomp_table())(*args)
        replace_random_passes(gm)
        hash_random_numbers(gm.graph)
        gm.graph.eliminate_dead_code()
        regions = find_regions(gm, "cuda")
    for r in regions:
        if r.workload is None:
            raise AssertionError(f"{case}: {r.reason}")
    return tuple(r.workload for r in regions if r.workload is not None)


def workload(name: str) -> Workload:
    """The one workload of a case that is one region."""
    (only,) = workloads(name)
    return only


def random_configs(task: Task, n: int, seed: int) -> list[Config]:
    """Up to ``n`` different configurations of the task's space that it does not reject, as they would run."""
    rng, space = random.Random(seed), task.space()
    found: dict[str, Config] = {}
    for _ in range(60 * n):
        if len(found) == n:
            break
        config = task.normalize(space.sample(rng))
        if task.reject(config) is None:
            found[config_key(config)] = config
    return list(found.values())


def drawn(
    scheme: Scheme, graph: Graph, n: int, seed: int, fits: Callable[[Config], object] = lambda config: True
) -> list[Config]:
    """``n`` different random configurations of one group that its scheme does not reject, as they would run."""
    rng, space = random.Random(seed), scheme.space_of(graph, load_space("fusion", "cuda"))
    found: list[Config] = []
    while len(found) < n:
        config = scheme.normalize(graph, space.sample(rng))
        if fits(config) and config not in found and scheme.reject(graph, config) is None:
            found.append(config)
    return found


def candidates(task: Task, n: int, seed: int) -> list[Config]:
    """The default, the seeds that are possible, and ``n`` random configurations; each once."""
    begin = [task.default(), *(c for c in task.seeds() if task.reject(c) is None)]
    return list({config_key(c): c for c in (*begin, *random_configs(task, n, seed))}.values())
