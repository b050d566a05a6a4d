"""What is taken apart before capture: dropout by a hash, biases of convolutions on CUDA, log-sigmoid."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from capture_helpers import check, graph_of, only_region, regions_of
from test_translate import t
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autotune.fusion import decompose
from autotune.fusion.capture import capture
from autotune.fusion.regions import find_regions
from autotune.fusion.translate import op_name


def compiled_dropout(x: Tensor, p: float) -> Tensor:
    """What runs after a capture: the decomposed graph, drawn anew each call."""
    (graph,) = capture(lambda x: F.dropout(x, p), (x,), grad=False).graphs
    return graph.module(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should_and_scales_them(p: float) -> None:
    torch.manual_seed(3)
    n = 1 << 20
    y = compiled_dropout(torch.ones(1 << 10, 1 << 10), p)
    kept = y != 0
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    rows = kept.float().mean(1)  # no row or column is favoured
    assert rows.std().item() < 1.2 * (p * (1 - p) / 1024) ** 0.5
    assert kept.float().mean(0).std().item() < 1.2 * (p * (1 - p) / 1024) ** 0.5


def test_masks_are_independent_of_their_neighbours_and_of_each_other() -> None:
    torch.manual_seed(5)
    x = torch.ones(1 << 20)
    masks = [(compiled_dropout(x, 0.5) != 0).double() * 2 - 1 for _ in range(6)]
    bound = 5 / x.numel() ** 0.5
    for k, one in enumerate(masks):
        for shift in (1, 2, 3, 32, 64, 768, 1024, 4096, 1 << 16):
            assert abs((one[shift:] * one[:-shift]).mean().item()) < bound, shift
        for other in masks[k + 1 :]:
            assert abs((one * other).mean().item()) < bound
            assert abs((one[1:] * other[:-1]).mean().item()) < bound


def test_dropout_follows_torchs_seed() -> None:
    x = torch.ones(4096)
    torch.manual_seed(1)
    one, two = compiled_dropout(x, 0.5), compiled_dropout(x, 0.5)
    torch.manual_seed(1)
    again = compiled_dropout(x, 0.5)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)


def test_dropout_is_part_of_the_region_beside_it() -> None:
    def f(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x, 0.1) + r, (24,), w)

    regions = regions_of(f, t(4, 6, 24), t(4, 6, 24), t(24), grad=False)
    assert len(regions) == 1
    graph = check(regions[0])
    assert graph.extents == (24, 24)  # the hashed place does not keep rows apart
    assert "dropout" in regions[0].workload.label  # type: ignore[union-attr]


def test_gradient_goes_where_the_value_went() -> None:
    torch.manual_seed(0)
    x = torch.ones(64, 64, requires_grad=True)
    run = torch.compile(lambda x: F.dropout(x * 3, 0.4), backend=_decomposed(), dynamic=False)
    y = run(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, y.detach(), rtol=1e-5, atol=0)
    assert 0.3 < (y == 0).float().mean().item() < 0.5


def _decomposed() -> object:
    from autotune.fusion.capture import aot_backend

    return aot_backend(lambda gm, inputs, kind: gm.forward)


def test_seeds_of_a_graph_are_drawn_at_once_and_layers_are_one_workload() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = F.dropout(torch.tanh(x @ w), 0.2)
        return x

    x, w = t(8, 8, grad=True), t(8, 8, grad=True)
    for train in (False, True):
        module = capture(f, (x, w), grad=train).graphs[0].module
        assert [op_name(n) for n in module.graph.nodes].count("randint") == 1
        prints = [r.workload.fingerprint for r in find_regions(module) if r.workload is not None]
        assert len(prints) == 4
        assert len(set(prints)) == 1 + train  # training stores another set of results for the last layer


def test_no_dropout_where_there_is_nothing_to_drop() -> None:
    for call in (lambda x: F.dropout(x, 0.5, False) * 2, lambda x: F.dropout(x, 0.0) * 2):
        region = only_region(call, t(4, 5))
        assert "shr" not in [v.op for v in graph_of(region).values]


def test_eager_random_numbers_where_the_user_wants_them() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        (graph,) = capture(lambda x: F.dropout(x, 0.5), (t(4, 5),), grad=False).graphs
    assert "native_dropout" in [op_name(n) for n in graph.module.graph.nodes]


def test_bias_of_a_convolution_stays_with_it_on_a_cpu() -> None:
    x, w, b = t(2, 3, 8, 8), t(4, 3, 3, 3), t(4)
    (graph,) = capture(lambda x, w, b: torch.relu(F.conv2d(x, w, b)), (x, w, b), grad=False).graphs
    (node,) = [n for n in graph.module.graph.nodes if op_name(n) == "convolution"]
    assert node.args[2] is not None


def test_bias_of_a_convolution_is_added_apart_on_cuda() -> None:
    """Shapes only: there may be no GPU here."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w, b = (torch.empty(s, device="cuda") for s in ((2, 3, 8, 8), (4, 3, 3, 3), (4,)))
        conv = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        out = decompose.convolution(x, w, b, *conv)
        assert out.shape == (2, 4, 8, 8)
        dx, dw, db = decompose.convolution_backward(out, x, w, [4], *conv, [True, True, True])
        assert (dx.shape, dw.shape, db.shape) == (x.shape, w.shape, b.shape)
        assert decompose.convolution(x, w, None, *conv) is NotImplemented
        assert decompose.convolution_backward(out, x, w, None, *conv, [True, True, False]) is NotImplemented


def test_log_sigmoid_and_its_backward() -> None:
    x = t(5, 7, grad=True)
    regions = regions_of(lambda x: F.logsigmoid(x) * 2, x, grad=True)
    assert len(regions) == 2
    for r in regions:
        check(r)
    run = torch.compile(F.logsigmoid, backend=_decomposed())
    (got,) = torch.autograd.grad(run(x).sum(), x)
    (want,) = torch.autograd.grad(F.logsigmoid(x).sum(), x)
    torch.testing.assert_close(got, want)


def test_a_concatenation_with_nothing_is_part_of_its_region() -> None:
    """As where a key-value cache begins; an empty tensor of another type decides the result's type, and stays."""

    def f(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([torch.tensor([], dtype=dtype), torch.cos(x) * 2], -2)

    (region,) = regions_of(f, t(3, 4, 6).transpose(0, 1), grad=False)
    assert "cat" in [op_name(n) for n in region.nodes]
    assert region.outputs[0].meta["val"].stride() == f(t(3, 4, 6).transpose(0, 1)).stride()
    check(region)
    (other,) = regions_of(lambda x: f(x, torch.float64), t(4, 6), grad=False)
    assert "cat" not in [op_name(n) for n in other.nodes]


@pytest.mark.parametrize("grad", [False, True])
def test_group_norm_of_one_image_in_a_layout_that_is_left_open(grad: bool) -> None:
    """Attention over pixels, as decoders of latent images have it: batch 1, channels last but for an unused stride."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        pixels = x.flatten(2).transpose(1, 2) @ w
        return F.group_norm(pixels.transpose(-1, -2).reshape(1, 8, 4, 4), 2)

    x, w = t(1, 8, 4, 4, grad=grad), t(8, 8, grad=grad)
    regions = regions_of(f, x, w, grad=grad)
    assert any("native_group_norm" in [op_name(n) for n in r.nodes] for r in regions)
    for r in regions:
        check(r)
    got, want = torch.compile(f, backend=_decomposed(), dynamic=False)(x, w), f(x, w)
    torch.testing.assert_close(got, want)
    if grad:
        d = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(got, (x, w), d), torch.autograd.grad(want, (x, w), d), strict=True):
            torch.testing.assert_close(a, b)
