"""Graphs compute what the aten calls they come from compute, for forwards and backwards of many functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.lower.translate import translate
from autotune.compiler.regions.find import Region
from autotune.ir.graph import Graph
from autotune.ir.oracle import interpret
from tests.support.capture_helpers import check, only_region, regions_of

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def t(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_(grad)


def ints(*shape: int, low: int = 0, high: int = 8, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def logsumexp_gather(x: Tensor, y: Tensor) -> Tensor:
    x = x.float()
    return torch.logsumexp(x, -1) - x.gather(1, y[:, None])[:, 0]


def batch_and_row_softmax(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r = torch.relu(x)
    v, m = torch.var_mean(r, 0)
    return v, m, torch.softmax(r - r.amax(1, keepdim=True), 1)


def qkv_heads(x: Tensor) -> Tensor:
    q, k, v = x.view(2, 6, 3, 4, 5).unbind(2)
    return (q.transpose(1, 2) * k.transpose(1, 2) + v.transpose(1, 2)).contiguous()


def assign_strided(first: int, step: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        x[:, first::step] = y.exp()
        return x + 1

    return fn


bf16, f16 = torch.bfloat16, torch.float16

FORWARD: dict[str, Case] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (24,), w, b), (t(4, 6, 24), t(24), t(24))),
    "layer_norm_two_dims": (lambda x: F.layer_norm(x, (6, 24)), (t(4, 6, 24),)),
    "layer_norm_bf16": (lambda x, w: F.layer_norm(x, (24,), w), (t(6, 24, dtype=bf16), t(24, dtype=bf16))),
    "softmax_mask": (lambda x, m: torch.softmax(x * 0.5 + m, -1), (t(3, 5, 7), t(1, 5, 7))),
    "softmax_dim0": (lambda x: torch.softmax(x, 0), (t(5, 7),)),
    "softmax_to_float": (lambda x: torch.softmax(x, -1, dtype=torch.float32), (t(5, 7, dtype=f16),)),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), (t(5, 7),)),
    "logsumexp_gather": (logsumexp_gather, (t(6, 31, dtype=bf16), ints(6, high=31))),
    "logsumexp_all": (lambda x: torch.logsumexp(x, (0, 1)), (t(6, 31),)),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y), (t(6, 31), ints(6, high=31))),
    "cross_entropy_rows": (lambda x, y: F.cross_entropy(x, y, reduction="none"), (t(6, 31), ints(6, high=31))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (24,), w), (t(6, 24), t(24))),
    "swiglu": (lambda a, b: F.rms_norm(F.silu(a) * b, (24,)), (t(6, 24), t(6, 24))),
    "lstm": (lstm, (t(4, 32), t(4, 8))),
    "transpose_sum": (lambda x: x + x.T, (t(9, 9),)),
    "transpose_softmax": (lambda x: torch.softmax(x + x.T, 0) * x.sum(0), (t(9, 9),)),
    "rope": (rope, (t(2, 3, 5, 8), t(5, 8), t(5, 8))),
    "cat_three": (lambda a, b, c: torch.cat([a, b, c * 2], 1) * 2, (t(4, 3), t(4, 5), t(4, 2))),
    "cat_reduced": (lambda a, b: torch.cat([a, b], 1).sum(1), (t(4, 3), t(4, 5))),
    "cat_sliced": (lambda a, b: torch.cat([a, b], 1)[:, 2:6].exp(), (t(4, 3), t(4, 5))),
    "stack": (lambda a, b: torch.stack([a, b], -1) + 1, (t(4, 3), t(4, 3))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (t(2, 8, 3, 5), t(8), t(8))),
    "batch_norm_eval": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        (t(2, 8, 3, 5), t(8), t(8).abs() + 1, t(8), t(8)),
    ),
    "batch_norm_train": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (t(4, 8, 3), t(8), t(8))),
    "batch_norm_running": (
        lambda x, m, v: (F.batch_norm(x, m, v, training=True), m, v),
        (t(4, 8, 3), t(8), t(8).abs()),
    ),
    "expand": (lambda a, b: a[:, None].expand(4, 3, 5) * b, (t(4, 5), t(5))),
    "sum_of_expanded": (lambda a: (a[:, None].expand(4, 3, 5) * 1.5).sum(1), (t(4, 5),)),
    "strided": (lambda x: x[1::2, 3:20:4] * x[::2, :5], (t(8, 24),)),
    "narrowed_view": (lambda x: x[:, 8:16].reshape(6, 2, 4).softmax(-1), (t(6, 24),)),
    "select": (lambda x: x[:, 3] + x[:, -1], (t(6, 5),)),
    "diagonal": (lambda x: torch.diagonal(x, 1) * 2, (t(6, 5),)),
    "heads": (qkv_heads, (t(2, 6, 60),)),
    "merge_heads": (lambda x: x.transpose(1, 2).reshape(2, 6, 20) * 2, (t(2, 4, 6, 5),)),
    "repeat": (lambda x, y: x.repeat(2, 3) * y, (t(3, 4), t(6, 12))),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1), value=3.0) * 2, (t(3, 4),)),
    "pad_zero": (lambda x: F.pad(x, (1, 2)) * 2, (t(3, 4),)),
    "triangle": (lambda x: torch.softmax(x.masked_fill(torch.ones(7, 7).tril() == 0, -math.inf), -1), (t(7, 7),)),
    "embedding": (lambda w, i, p: F.layer_norm(F.embedding(i, w) + p, (8,)), (t(11, 8), ints(3, 4, high=11), t(4, 8))),
    "index": (lambda x, i: x[:, i] * 2, (t(5, 9), ints(4, low=-9, high=9))),
    "index_select": (lambda x, i: torch.index_select(x, 1, i).exp(), (t(5, 9, 3), ints(4, high=9))),
    "index_two": (lambda x, i, j: x[:, i, j] * 2, (t(4, 5, 6, 7), ints(3, 1, low=-5, high=5), ints(2, low=-6, high=6))),
    "index_two_apart": (lambda x, i, j: x[i, :, j] * 2, (t(4, 5, 6, 7), ints(3, 1, high=4), ints(2, high=6))),
    "index_three": (
        lambda x, i, j, k: torch.relu(x)[i, j, :, k],
        (t(4, 5, 6, 7), ints(3, 1, high=4), ints(2, high=5), ints(1, 1, high=7)),
    ),
    "index_two_strided": (
        lambda x, i, j: x.transpose(0, 2)[i, j].softmax(-1),
        (t(4, 5, 6), ints(3, high=6), ints(3, high=5)),
    ),
    "index_two_of_one": (lambda x, i, j: x[:1][i, j].exp(), (t(4, 5, 6), ints(3, high=1), ints(3, high=5))),
    "index_two_computed": (
        lambda x, i, j: F.layer_norm(x, (7,))[i + 1, j // 2] + 1,
        (t(5, 5, 7), ints(3, high=4), ints(3, high=5)),
    ),
    "last_of_each": (lambda x, n: x[torch.arange(4), n].tanh(), (t(4, 5, 6), ints(4, high=5))),
    "mask_of_cache": (
        lambda m, i, j: torch.where(m[i, j], 0.0, -math.inf),
        (ints(4, 9, high=2).bool(), ints(4, 1, 1, 1, high=4), ints(9, high=9)),
    ),
    "upsample": (lambda x: F.interpolate(x * 2, scale_factor=2.0) + 1, (t(2, 3, 4, 5),)),
    "upsample_bilinear": (lambda x: F.interpolate(x * 2, scale_factor=1.5, mode="bilinear") + 1, (t(2, 3, 4, 6),)),
    "gather_of_computed": (lambda x, i: (x * 2 + 1).gather(1, i), (t(5, 9), ints(5, 4, high=9))),
    "one_hot_scatter": (lambda x, i: x.scatter(1, i[:, None], 1.0) * 2, (t(5, 9), ints(5, high=9))),
    "reductions": (
        lambda x: (x.sum(0), x.mean(), x.amax(1), x.amin((0, 1)), x.prod(1), x.norm(dim=1), x.std(0), x.var(1)),
        (t(6, 5),),
    ),
    "max_values": (lambda x: x.max(1).values + x.min(1).values, (t(6, 5),)),
    "two_axes": (batch_and_row_softmax, (t(6, 10),)),
    "alternating": (
        lambda x: (((x - x.mean(0)) - (x - x.mean(0)).mean(1, keepdim=True)).softmax(0)).sum(1),
        (t(6, 5),),
    ),
    "integers": (lambda i, j: (i + j * 2 - 1) // 3 % 5 + (i & j) * (i | 3), (ints(6), ints(6))),
    "int32": (lambda i: (i.to(torch.int32) + 1).sum(0), (ints(6, 4),)),
    "int_division": (lambda i, j: i / (j + 1), (ints(6), ints(6))),
    "uint8_mask": (lambda x, m: torch.where(m != 0, x, -1.0), (t(4, 5), ints(4, 5, high=2, dtype=torch.uint8))),
    "compare": (lambda x, y: ((x > y) & ~(x == 0)) | torch.isnan(y), (t(4, 5), t(4, 5))),
    "any_all": (lambda x: ((x > 0).any(1), (x > 0).all(0), (x > 0).sum()), (t(4, 5),)),
    "float_to_int": (lambda x: (x * 3).to(torch.int64) + 1, (t(4, 5),)),
    "arange": (lambda x: x * torch.arange(5) + torch.arange(2, 12, 2), (t(4, 5),)),
    "clamp_pow": (lambda x: x.clamp(-1, 1) ** 2 + x.abs() ** 1.5 + x.abs() ** 0.5 + 2.0**x, (t(4, 5),)),
    "activations": (
        lambda x: (
            F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.leaky_relu(x, 0.2) + F.elu(x) + F.softplus(x)
        ),
        (t(4, 5),),
    ),
    "more_activations": (lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.logsigmoid(x) + F.relu6(x), (t(4, 5),)),
    "addcmul": (
        lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.lerp(x, y, 0.3) + torch.rsub(x, y, alpha=2),
        (t(4, 5), t(4, 5)),
    ),
    "adam": (
        lambda p, g, m, v: p - 1e-3 * (m * 0.9 + g * 0.1) / ((v * 0.999 + g * g * 0.001).sqrt() + 1e-8),
        (t(9), t(9), t(9), t(9).abs()),
    ),
    "column_major": (lambda x: F.layer_norm(x, (6,)), (t(6, 5).t(),)),
    "channels_last": (lambda x: F.relu(x) * 2, (t(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "glu": (lambda x: F.glu(x * 2, 1), (t(3, 8, 5),)),
    "prelu_threshold_mish": (
        lambda x, w: F.prelu(x, w) + F.threshold(x, 0.1, 2.0) + F.mish(x) + F.selu(x),
        (t(3, 8, 5), t(8)),
    ),
    "max_pool": (lambda x: F.max_pool2d(F.relu(x), 2, 2), (t(2, 3, 6, 9),)),
    "max_pool_padded": (lambda x: F.max_pool2d(x, (2, 3), (2, 1), (0, 1)), (t(2, 3, 6, 9),)),
    "max_pool_overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True) * 2, (t(2, 3, 7, 8),)),
    "max_pool_dilated": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), (t(2, 3, 7, 8),)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1) + 1, (t(2, 3, 7, 8),)),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), (t(2, 3, 7, 8),)),
    "roll": (lambda x: torch.roll(x, (1, -2), (0, 1)) * 2, (t(5, 7),)),
    "flip": (lambda x: torch.flip(x, (0, 2)) * 2, (t(5, 1, 7),)),
    "flip_of_computed": (lambda x, y: (x + torch.flip(x * y, (1,))).softmax(-1), (t(5, 7), t(5, 7))),
    "flip_of_parts": (lambda a, b: torch.flip(torch.cat([a, b * 2, a], 1), (1,)) + 1, (t(5, 3), t(5, 1))),
    "flip_twice": (lambda x: torch.flip(torch.flip(x, (0,)) + 1, (0,)), (t(5, 7),)),
    "gather_of_parts": (
        lambda a, b, i: torch.cat([a, b.exp()], 1).gather(1, i) + 1,
        (t(5, 3), t(5, 4), ints(5, 6, high=7)),
    ),
    "roll_of_both": (
        lambda x: torch.roll(x.view(4, 6, 8, 3), (-2, 3), (1, 2)).reshape(4, 48, 3) * 2,
        (t(4, 48, 3),),
    ),
    "assigned_to_every_second": (assign_strided(1, 2), (t(6, 8), t(6, 4))),
    "assigned_to_every_third": (assign_strided(0, 3), (t(6, 9), t(6, 3))),
    "losses": (
        lambda x, y: (
            F.mse_loss(x, y)
            + F.smooth_l1_loss(x, y, beta=0.5)
            + F.huber_loss(x, y, delta=0.7)
            + F.l1_loss(x, y)
            + F.binary_cross_entropy_with_logits(x, y)
        ),
        (t(6, 7), t(7, 6).t()),
    ),
    "shift": (lambda i: (i >> 3) + (i.to(torch.int32) >> 1), (ints(64, low=-1000, high=1000),)),
    "place": (lambda x: x * torch.arange(35).view(5, 7), (t(5, 7),)),
    "scalar": (lambda x, s: x * s + s, (t(4, 5), torch.tensor(1.5))),
    "constant_tensor": (lambda x: x * torch.tensor([1.0, 2.0, 3.0]), (t(4, 3),)),
}


@functools.cache
def forward(name: str) -> list[Region]:
    fn, args = FORWARD[name]
    return regions_of(fn, *args, grad=False)


def one_region(name: str) -> Region:
    (region,) = forward(name)
    assert region.workload is not None, region.reason
    return region


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    regions = forward(name)
    assert len([r for r in regions if r.workload is None]) == 0, [r.reason for r in regions]
    assert regions
    assert len(regions) == 1 or name in SEPARATE
    for region in regions:
        check(region)
        check(region, special=name not in CLAMPED)


# torch's CPU kernels of these clamp a NaN variance to 0 and go on with it; ours (as the others) stays NaN.
CLAMPED = {"group_norm", "batch_norm_train", "batch_norm_running"}
SEPARATE = {"reductions", "any_all", "constant_tensor"}  # results that share no more than an input
ONE_REGION = set(FORWARD) - SEPARATE

BACKWARD: dict[str, Case] = {
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (24,), w, b),
        (t(4, 6, 24, grad=True), t(24, grad=True), t(24, grad=True)),
    ),
    "gelu": (lambda x: F.gelu(x * 2), (t(4, 5, grad=True),)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (t(4, 5, grad=True),)),
    "silu": (lambda x, y: F.silu(x) * y, (t(4, 5, grad=True), t(4, 5, grad=True))),
    "softmax": (lambda x: torch.softmax(x, -1) * 2, (t(4, 5, grad=True),)),
    "log_softmax": (lambda x: torch.log_softmax(x, -1) * 2, (t(4, 5, grad=True),)),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y), (t(6, 31, grad=True), ints(6, high=31))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (24,), w), (t(6, 24, grad=True), t(24, grad=True))),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 4, w, b),
        (t(2, 8, 3, 5, grad=True), t(8, grad=True), t(8, grad=True)),
    ),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (t(4, 8, 3, grad=True), t(8, grad=True), t(8, grad=True)),
    ),
    "relu_dropout": (lambda x: F.dropout(F.relu(x), 0.3) * 2, (t(4, 5, grad=True),)),
    "slices": (lambda x: x[:, 1:3] * x[:, 2:4], (t(4, 5, grad=True),)),
    "select": (lambda x: x[:, 1] * x[:, 2], (t(4, 5, grad=True),)),
    "patches": (lambda x: torch.cat([x[:, 0::2], x[:, 1::2]], 0).softmax(-1), (t(4, 6, 3, grad=True),)),
    "flip": (lambda x: torch.flip(x, (1,)) * x, (t(4, 5, grad=True),)),
    "chunk_cat": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1) * x, (t(4, 6, grad=True),)),
    "tanh_sigmoid": (lambda x: torch.tanh(x) * torch.sigmoid(x), (t(4, 5, grad=True),)),
    "broadcast": (lambda x, b: (x + b) * b, (t(4, 5, grad=True), t(5, grad=True))),
    "glu": (lambda x: F.glu(x, 1), (t(3, 8, 5, grad=True),)),
    "piecewise": (
        lambda x: F.hardtanh(x) + F.hardswish(x) + F.hardsigmoid(x * 2) + F.leaky_relu(x, 0.2) + F.relu6(x),
        (t(4, 5, grad=True),),
    ),
    "smooth": (lambda x: F.elu(x, 0.7) + F.softplus(x, 2.0, 3.0) + F.logsigmoid(x), (t(4, 5, grad=True),)),
    "prelu": (lambda x, w: F.prelu(x, w), (t(4, 3, 5, grad=True), t(3, grad=True))),
    "losses": (
        lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y, beta=0.5) + F.huber_loss(x, y, delta=0.7),
        (t(6, 7, grad=True), t(7, 6).t()),
    ),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y), reduction="sum"),
        (t(6, 7, grad=True), t(7, 6).t()),
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    fn, args = BACKWARD[name]
    regions = regions_of(fn, *args, grad=True)
    translated = [r for r in regions if r.workload is not None]
    assert len(translated) == len(regions), [r.reason for r in regions]
    assert len(regions) >= 2  # one forward, one backward at least
    for region in regions:
        check(region)


def test_softmax_is_few_values() -> None:
    graph = check(only_region(lambda x: torch.softmax(x, -1), t(4, 9)))
    assert sorted(v.op for v in graph.values) == ["div", "exp", "load", "max", "sub", "sum"]


def test_the_backward_of_a_softmax_is_one_region() -> None:
    """Which torch writes with a multiplication and an addition in one operator."""
    regions = regions_of(lambda x: torch.softmax(x * 0.5, -1), t(5, 7, grad=True), grad=True)
    assert len(regions) == 2
    check(regions[1])


def test_layer_norm_walks_one_axis_pair() -> None:
    graph = check(only_region(lambda x, w: F.layer_norm(x, (24,), w), t(4, 6, 24), t(24)))
    assert graph.extents == (24, 24)
    assert sum(v.op == "load" for v in graph.values) == 2


@pytest.mark.parametrize("width", [6, 7])
def test_a_rolled_image_is_read_once(width: int) -> None:
    """Both sides of a square image get their axes by one index; as one dimension of pixels they keep the order."""

    def rolled(tokens: Tensor, image: Tensor, down: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        y = tokens.view(image.shape) + image[:, :, right][:, down]
        return y, y.flatten(1, 2).half()

    down = ints(6, high=6)
    right = down if width == 6 else ints(7, high=7)
    graph = check(only_region(rolled, t(2, 6 * width, 8), t(2, 6, width, 8), down, right))
    assert sum(v.op in ("load", "gather") and v.dtype == "float32" for v in graph.values) == 2


def test_chain_of_a_thousand_operators() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(1200):
            x = torch.sin(x)
        return x

    gm = make_fx(long, tracing_mode="fake")(t(3, 4))
    graphs = []

    def backend(compiled: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        graphs.append(translate(GraphFacts(gm.graph)).graph)
        return compiled.forward

    torch.compile(lambda x: x + 1, backend=backend)(t(3))  # calls under Dynamo count as calls from C
    for graph in (translate(GraphFacts(gm.graph)).graph, *graphs):
        assert sum(v.op == "sin" for v in graph.values) == 1200
    assert graphs


def test_statistics_and_elements_of_alternating_reductions_stay_linear() -> None:
    def alternate(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x - x.mean(0)
            x = x - x.mean(1, keepdim=True)
        return x

    graph = check(only_region(alternate, t(6, 5)))
    assert len(graph.values) < 12 * 10
    assert sum(v.op == "load" for v in graph.values) == 1


def test_sum_over_a_broadcast_axis_is_a_product() -> None:
    graph = check(only_region(lambda a: a[:, None].expand(4, 3, 5).sum(1), t(4, 5)))
    assert [v.op for v in graph.values if v.op in ("sum", "mul")] == ["mul"]


def one_hot_sum(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """[3, 2, 5, 1]: rows that are x where the position is y, summed."""
    places = torch.arange(4 * 5).view(4, 5)[:, None] + 2  # [4, 1, 5]
    hot = (places == y[:, None, None, None]) & mask[:, None, None, None]
    return torch.where(hot, x[:, None, :, None], 0.0).sum((1, 3))


def test_sum_of_one_hot_rows_is_no_reduction() -> None:
    """Targets before, in and beyond the row, masked ones among them."""
    x, y = t(8, 3), torch.tensor([-1, 1, 2, 3, 20, 21, 22, 7])
    mask = torch.tensor([True] * 7 + [False])
    graph = check(only_region(one_hot_sum, x, y, mask))
    assert "sum" not in [v.op for v in graph.values]
    (got,) = interpret(
        graph, [{torch.float32: x, torch.int64: y, torch.bool: mask}[i].reshape(-1) for i in inputs(graph)]
    )
    torch.testing.assert_close(got.reshape(8, 3), one_hot_sum(x, y, mask).double())


def inputs(graph: Graph) -> list[torch.dtype]:
    return [getattr(torch, i) for i in graph.inputs]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: torch.where(torch.arange(5) == y[:, None], x, 0.0).sum(1),  # of values that vary along the row
        lambda x, y: torch.where(torch.arange(5) == y[:, None], x[:, :1], 1.0).sum(1),  # the others are ones
        lambda x, y: torch.where(torch.arange(5) * 2 == y[:, None], x[:, :1], 0.0).sum(1),  # every other place
        lambda x, y: torch.where(torch.arange(5) == y[:, None], x[:, :1], 0.0).amax(1),
        lambda x, y: torch.where(torch.arange(5) <= y[:, None], x[:, :1], 0.0).sum(1),
    ],
)
def test_other_sums_of_chosen_values_are_reductions(fn: Callable[..., Any]) -> None:
    graph = check(only_region(fn, t(8, 5), ints(8, low=-1, high=7)))
    assert {"sum", "max"} & {v.op for v in graph.values}


def test_one_hot_rows_of_positions_that_wrap_around() -> None:
    """Values between the first and the last of them imply nothing about a target."""
    first, y = 2**31 - 4, torch.tensor([2**31 - 4, 2**31 - 1, -(2**31), 1 - 2**31, 0, 5], dtype=torch.int32)

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(torch.arange(5, dtype=torch.int32) + first == y[:, None], x[:, None], 0.0).sum(1)

    x = t(6)
    graph = check(only_region(chosen, x, y))
    (got,) = interpret(graph, [x if i == torch.float32 else y for i in inputs(graph)])
    torch.testing.assert_close(got, chosen(x, y).double())


def test_padding_with_zero_is_a_guarded_load() -> None:
    graph = check(only_region(lambda x: F.pad(x, (1, 2)) * 2, t(3, 4)))
    assert "where" not in [v.op for v in graph.values]
    assert [v.guards for v in graph.values if v.op == "load"] == [((1, 1, 5),)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_reductions_in_narrow_integers_are_outside(op: str, dtype: torch.dtype) -> None:
    """torch wraps each of them to its type; a region would read a wider number again."""

    def scaled(x: Tensor) -> Tensor:
        return getattr(x, op)(1, dtype=dtype).float() * 2

    inside = {op_name(n) for r in regions_of(scaled, ints(4, 300, low=100, high=120, dtype=dtype)) for n in r.nodes}
    assert inside
    assert op not in inside


def test_numbers_times_alpha() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.add(x, 2, alpha=3), torch.sub(x, 0.5, alpha=-2), torch.add(x.int(), 3, alpha=2)

    check(only_region(fn, t(3, 4)))


def test_positions_that_wrap_around_in_a_narrow_type_are_outside() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.arange(300, dtype=torch.uint8).float() * x

    (region,) = regions_of(fn, t(300))
    assert region.workload is None or "iota" not in {op_name(n) for n in region.submodule.graph.nodes}
    check(only_region(lambda x: torch.arange(200, dtype=torch.uint8).float() * x, t(200)))


def test_nan_as_a_narrow_integer_is_selected_where_it_is_read_and_not_where_it_is_stored() -> None:
    """The low bits of NaN as int32 are 0 on every device, so a store needs no select."""

    def graph_of(fn: Callable[[Tensor], Any]) -> Graph:
        return check(only_region(fn, t(300)), special=True)

    def whole(x: Tensor) -> Tensor:
        return (x * 3).clamp(0, 255).to(torch.uint8)

    assert "isnan" not in [v.op for v in graph_of(whole).values]
    for fn in (lambda x: whole(x).float(), lambda x: (whole(x), whole(x) > 3), lambda x: whole(x).amax().long()):
        assert [v.op for v in graph_of(fn).values].count("isnan") == 1
    both = graph_of(lambda x: (whole(x), whole(x).float()))
    assert sorted(both.values[o.value].op for o in both.outputs) == ["cast", "cast"]


@pytest.mark.parametrize(
    ("wide", "inside"),
    [
        (lambda x: x.clamp(min=0).to(torch.int32).clamp(max=255), False),  # NaN and 3e9 are the smallest number
        (lambda x: x.to(torch.int32).clamp(0, 255), True),
        (lambda x: x.to(torch.int64).clamp(min=0).to(torch.int32).clamp(max=255), False),
        (lambda x: x.to(torch.int64).clamp(0, 1000).to(torch.int32).clamp(max=255), True),
        (lambda x: x.clamp(0, 100).to(torch.int8), True),
    ],
)
def test_a_bound_on_one_side_of_an_integer_that_may_wrap_is_none(
    wide: Callable[[Tensor], Tensor], inside: bool
) -> None:
    def fn(x: Tensor) -> Tensor:
        return wide(x).to(torch.uint8).float() + 0.5

    x = torch.tensor([math.nan, 3e9, -3e9, 5e9, math.inf, -math.inf, 7.5, -7.5, 300.0] * 3)
    regions = regions_of(fn, x)
    assert (len(regions) == 1 and regions[0].workload is not None and len(regions[0].inputs) == 1) == inside
    if inside:
        graph = Graph.from_json(regions[0].workload.spec)  # type: ignore[union-attr]
        assert torch.equal(interpret(graph, [x])[0].float(), fn(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_16_bits_are_rounded_where_torch_rounds_them(dtype: torch.dtype) -> None:
    """Comparisons, fills and remainders take 0.3 as the tensor's type holds it; sums and products take it in fp32."""
    x = torch.tensor([0.1, 0.3, 0.7, 1.1, 3.3, -0.1], dtype=dtype).repeat(8)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        filled = x.masked_fill(x > 1, 0.3) == 0.3, torch.full_like(x, 1.1) == x, F.pad(x, (1, 1), value=0.1) == 0.1
        return *filled, x == 0.3, x > 0.3, x.remainder(0.3) == 0, torch.where(x > 1, x, 0.1) == x

    region = only_region(fn, x)
    graph = Graph.from_json(region.workload.spec)  # type: ignore[union-attr]
    want = fn(x)
    for k, got in enumerate(interpret(graph, [x])):
        assert torch.equal(got, want[region.binding.outputs[k]]), f"result {region.binding.outputs[k]}"
    (scaled,) = interpret(Graph.from_json(only_region(lambda x: x * 0.3, x).workload.spec), [x])  # type: ignore[union-attr]
    torch.testing.assert_close(scaled, x.double() * 0.3, rtol=1e-12, atol=0)


def test_integer_pooling_is_outside() -> None:
    """Its mean is a quotient of integers."""
    fn = lambda x: F.avg_pool2d(x, 2) + 1  # noqa: E731
    assert all(op_name(n) != "avg_pool2d" for r in regions_of(fn, ints(1, 2, 8, 8, high=100)) for n in r.nodes)
