"""Rewrites of Inductor's joint graphs other than complex numbers and layouts: random numbers are hashes of their
index. Results of Inductor's decompositions: log-sigmoid, concatenations with nothing, group norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from autotune.compiler.capture.hooks import place_scalars, takes_bias_apart
from autotune.compiler.capture.recording import capture, recording_backend
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.regions.find import find_regions
from autotune.runtime.backend import deploy_backend
from tests.support.capture_helpers import check, graph_of, only_region, regions_of, uncached
from tests.unit.compiler.lower.test_translate import t

aten = torch.ops.aten


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` by Inductor, with nothing stored: its own kernels draw the numbers."""
    return torch.compile(fn, backend=deploy_backend, dynamic=False)


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_keeps_as_many_as_it_should_and_scales_them(p: float) -> None:
    torch.manual_seed(3)
    n = 1 << 20
    y = compiled(lambda x: F.dropout(x, p))(torch.ones(1 << 10, 1 << 10))
    kept = y != 0
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    rows = kept.float().mean(1)  # no row or column is favoured
    assert rows.std().item() < 1.2 * (p * (1 - p) / 1024) ** 0.5
    assert kept.float().mean(0).std().item() < 1.2 * (p * (1 - p) / 1024) ** 0.5


def test_masks_are_independent_of_their_neighbours_and_of_each_other() -> None:
    """Those of three operators of one graph, in two calls."""
    torch.manual_seed(5)
    run = compiled(lambda x: [F.dropout(x, 0.5) for _ in range(3)])
    x = torch.ones(1 << 20)
    masks = [(y != 0).double() * 2 - 1 for _ in range(2) for y in run(x)]
    bound = 5 / x.numel() ** 0.5
    for k, one in enumerate(masks):
        for shift in (1, 2, 3, 32, 64, 768, 1024, 4096, 1 << 16):
            assert abs((one[shift:] * one[:-shift]).mean().item()) < bound, shift
        for other in masks[k + 1 :]:
            assert abs((one * other).mean().item()) < bound
            assert abs((one[1:] * other[:-1]).mean().item()) < bound


def test_a_value_that_is_rounded_to_half_precision_stays_so() -> None:
    """Inductor of torch 2.11 and 2.12 drops such a conversion: a region would hand on fp32 in its place."""
    (graph,) = capture(lambda x: (x * 3).half().float().sin(), (torch.randn(64, 64),), grad=False)
    converted = [n.args[1] for n in graph.module.graph.nodes if op_name(n) == "convert_element_type"]
    assert converted == [torch.float16, torch.float32]


def test_uniform_numbers_are_uniform() -> None:
    torch.manual_seed(2)
    y = compiled(lambda x: torch.rand_like(x) * 1.0)(torch.empty(1 << 20))
    assert y.min() >= 0
    assert y.max() < 1
    counts = torch.histc(y, 64, 0, 1)
    expected = y.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * (2 * 63) ** 0.5  # chi squared


def test_dropout_follows_torchs_seed() -> None:
    x, run = torch.ones(4096), compiled(lambda x: F.dropout(x, 0.5))
    torch.manual_seed(1)
    one, two = run(x), run(x)
    torch.manual_seed(1)
    again = run(x)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_agree_on_the_mask(dtype: torch.dtype) -> None:
    """The mask is computed twice: a gradient goes where the value went, in short types whose rounding could differ."""
    torch.manual_seed(0)
    x = torch.ones(256, 256, dtype=dtype, requires_grad=True)
    y = compiled(lambda x: F.dropout(torch.exp(x), 0.4))(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, y.detach(), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=0)
    assert 0.38 < (y == 0).float().mean().item() < 0.42
    assert torch.equal(dx == 0, y == 0)


def test_checkpoints_compute_their_masks_from_seeds_alone() -> None:
    """torch saves what one checkpoint computes and another one reads, such as the numbers of the elements."""
    weight = t(8, 8, grad=True)

    def layer(x: Tensor) -> Tensor:
        return F.dropout(torch.sigmoid(x @ weight), 0.1)

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()

    _, backward = capture(f, (t(6, 8, grad=True),), grad=True)
    saved = [n.meta["val"] for n in backward.module.graph.find_nodes(op="placeholder")]
    assert [value.shape for value in saved if not value.dtype.is_floating_point] == [(3,)], "the seeds"


def test_dropout_is_part_of_the_adjacent_region() -> None:
    def f(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x, 0.1) + r, (24,), w)

    (region,) = regions_of(f, t(4, 6, 24), t(4, 6, 24), t(24), grad=False)
    graph = check(region)
    assert graph.extents == (24, 24)  # the hashed place does not keep rows apart
    assert "dropout" in region.workload.label  # type: ignore[union-attr]


def test_seeds_of_a_graph_are_drawn_at_once_and_layers_are_one_workload() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = F.dropout(torch.tanh(x @ w), 0.2)
        return x

    x, w = t(8, 8, grad=True), t(8, 8, grad=True)
    for train in (False, True):
        module = capture(f, (x, w), grad=train)[0].module
        assert [op_name(n) for n in module.graph.nodes].count("inductor_seeds") == 1
        prints = [r.workload.fingerprint for r in find_regions(module) if r.workload is not None]
        assert len(prints) == 4
        assert len(set(prints)) <= 2  # training stores another set of results for the last layer


def test_no_dropout_where_there_is_nothing_to_drop() -> None:
    for call in (lambda x: F.dropout(x, 0.5, False) * 2, lambda x: F.dropout(x, 0.0) * 2):
        region = only_region(call, t(4, 5))
        assert "shr" not in [v.op for v in graph_of(region).values]


def test_eager_random_numbers_on_request() -> None:
    x = torch.ones(64, 64)
    with torch._inductor.config.patch(fallback_random=True):
        (graph,) = capture(lambda x: F.dropout(x, 0.5), (x,), grad=False)
        assert "shr" not in {op_name(n) for n in graph.module.graph.nodes}
        run = compiled(lambda x: F.dropout(x, 0.5))
        torch.manual_seed(4)
        got = run(x)
    torch.manual_seed(4)
    assert torch.equal(got, F.dropout(x, 0.5))


def test_non_uniform_random_numbers_stay_inductors() -> None:
    for draw in (torch.randn_like, lambda x: torch.randint(0, 9, x.shape)):
        (graph,) = capture(lambda x, draw=draw: x + draw(x), (t(4, 5),), grad=False)
        names = {op_name(n) for n in graph.module.graph.nodes}
        assert names & {"inductor_random", "inductor_randint"}
        assert "bitwise_right_shift" not in names


def test_the_hash_is_in_inductors_code_too() -> None:
    """Whoever computes a mask draws the same numbers, so that a search may store a kernel for one graph of two."""
    x = torch.ones(64, 64)
    with uncached():
        _, (code,) = run_and_get_code(compiled(lambda x: F.dropout(x, 0.5)), x)
    assert "normalized_rand_cpu" not in code
    assert "randint64_cpu" not in code


def test_bias_of_a_convolution_stays_with_it_on_a_cpu_and_is_added_apart_on_cuda() -> None:
    """Shapes only: there may be no GPU here."""
    options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for device in ("cpu", "cuda"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, w, b = (torch.empty(s, device=device) for s in ((2, 3, 8, 8), (4, 3, 3, 3), (4,)))
            gm = make_fx(lambda x, w, b: aten.convolution(x, w, b, *options).relu())(x, w, b)
        takes_bias_apart(gm.graph)
        gm.graph.lint()
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
        assert (node.args[2] is None) == (device == "cuda")
        (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
        assert op_name(relu.args[0]) == ("add" if device == "cuda" else "convolution")
        assert relu.args[0].meta["val"].shape == (2, 4, 6, 6)


def test_log_sigmoid_and_its_backward() -> None:
    x = t(5, 7, grad=True)
    regions = regions_of(lambda x: F.logsigmoid(x) * 2, x, grad=True)
    assert len(regions) == 2
    for r in regions:
        check(r)


def test_a_concatenation_with_nothing_is_part_of_its_region() -> None:
    """As where a key-value cache begins; an empty tensor of another type decides the result's type, and stays."""

    def f(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([torch.tensor([], dtype=dtype), torch.cos(x) * 2], -2)

    turned = t(3, 4, 6).transpose(0, 1)
    check(only_region(f, turned))
    got, want = compiled(f)(turned), f(turned)
    torch.testing.assert_close(got, want)
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
    assert any("var_mean" in [op_name(n) for n in r.nodes] for r in regions)
    for r in regions:
        check(r)


class WrittenOut(nn.Module):
    """Attention by products and a softmax, for which Inductor calls a library."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 8, 4, 8).permute(0, 2, 1, 3) for layer in self.layers)
        weights = torch.softmax((q @ k.transpose(-1, -2)).div(8**0.5), -1)
        return (weights @ v).permute(0, 2, 1, 3).reshape(2, 8, 32)


def test_the_training_of_attention_that_inductor_matches() -> None:
    """Inductor sorts the nodes of its patterns behind these passes."""
    module = WrittenOut()
    x = torch.randn(2, 8, 32, requires_grad=True)
    torch._dynamo.reset()
    seen: list[Any] = []
    for backend in (deploy_backend, recording_backend(seen.append)):
        run = torch.compile(module, backend=backend, dynamic=False)
        ours, theirs = (torch.autograd.grad(f(x).square().sum(), [x, *module.parameters()]) for f in (run, module))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert any("attention" in str(n.target) for graph in seen for n in graph.module.graph.nodes)


def test_a_graph_with_streams_stays_as_it_is() -> None:
    def on_a_stream(x: Tensor) -> Tensor:
        with torch.Stream("cpu"):
            return F.dropout(x, 0.5) + 1

    for fn, kept in ((on_a_stream, True), (lambda x: F.dropout(x, 0.5) + 1, False)):
        (graph,) = capture(fn, (t(8, 64),), grad=False)
        drawn = graph.module.graph.find_nodes(op="call_function", target=torch.ops.prims.inductor_random.default)
        assert bool(drawn) == kept


def test_constants_of_the_cpu_are_computed_on_the_gpu_of_their_readers() -> None:
    """Of ``x / torch.tensor(8.0)``, also behind operators on the constant; a result of the CPU stays there."""

    def fn(x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        scale = torch.full((), 6.9375, dtype=x.dtype)
        sign = torch.where(scale >= 0, 1.0, -1.0)
        return x / scale * sign, x + given, scale * 2, torch.full((2,), 3.0).to(x.device) + scale

    with FakeTensorMode():
        x, given = torch.empty(2, dtype=torch.bfloat16, device="cuda"), torch.empty(())
        gm = make_fx(fn)(x, given)
        before = [made.device.type for made in gm(x, given)]
        place_scalars(gm.graph)
        gm.recompile()
        assert [made.device.type for made in gm(x, given)] == before == ["cuda", "cuda", "cpu", "cuda"]
        assert [made.dtype for made in gm(x, given)] == [torch.bfloat16] * 2 + [torch.bfloat16, torch.float32]
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.meta["val"].device.type == "cuda" and "_to_copy" not in str(node.target):
            read = [one for one in node.all_input_nodes if one.meta["val"].device.type == "cpu"]
            assert [one.op for one in read] in ([], ["placeholder"]), node.format_node()
