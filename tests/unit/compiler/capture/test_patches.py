"""A convolution of patches is a matrix product, where it may be, and the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autotune.compiler.capture import convolutions
from autotune.compiler.capture.recording import recording_backend
from tests.support.capture_helpers import rewritten_on_cpus

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


also_on_cpus = rewritten_on_cpus(convolutions)


def inputs(x: Sequence[int], weight: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Image, weight and bias, of numbers that are the same in half precision."""
    return [torch.randn(shape).bfloat16().half().to(dtype) for shape in (x, weight, weight[:1])]


def lies(t: Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for stride, extent in zip(t.stride(), t.shape, strict=True) if extent > 1]


def graphs_of(fn: Any, args: Sequence[Tensor], wanted: Sequence[int]) -> dict[str, fx.Graph]:
    """The graphs of a step by kind, once its results and gradients are found to be those of eager mode in fp32."""

    def step(run: Any, given: Sequence[Tensor]) -> list[Tensor]:
        given = [a.detach().requires_grad_(i in wanted) for i, a in enumerate(given)]
        out = run(*given)
        if not wanted:
            return [out]
        ramp = torch.linspace(-1, 1, out.numel()).bfloat16().half().to(out).view(out.shape)
        return [out, *torch.autograd.grad(out, [given[i] for i in wanted], ramp)]

    seen: list[Any] = []
    got = step(torch.compile(fn, backend=recording_backend(seen.append), dynamic=False), args)
    want = step(fn, [a.float() for a in args])
    eager = step(fn, args)
    for a, b, like in zip(got, want, eager, strict=True):
        assert (a.dtype, lies(a)) == (like.dtype, lies(like))
        a, b = a.detach(), b.detach()
        torch.testing.assert_close(a.double(), b.double(), rtol=2**-7, atol=2**-7 * float(b.abs().max()))
    return {g.kind: g.module.graph for g in seen}


def count_convolutions(graphs: dict[str, fx.Graph]) -> int:
    return sum(len(g.find_nodes(op="call_function", target=t)) for g in graphs.values() for t in CONVOLUTIONS)


@pytest.mark.parametrize(("x", "weight", "dtype"), [
    ((2, 3, 12, 8), (5, 3, 4, 4), torch.bfloat16), ((2, 3, 13, 11), (5, 3, 4, 4), torch.float16),
    ((2, 1, 12, 9), (4, 1, 2, 3), torch.bfloat16), ((2, 3, 10), (6, 3, 5), torch.float16),
    ((2, 3, 4, 6, 9), (5, 3, 2, 3, 4), torch.bfloat16), ((1, 12, 4, 4), (1, 12, 4, 4), torch.bfloat16),
])  # fmt: skip
def test_it_is_a_product(x: Sequence[int], weight: Sequence[int], dtype: torch.dtype) -> None:
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(x)]
    kernel = tuple(weight[2:])

    def fn(image: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
        return convolve(image, filters, bias, stride=kernel)

    args = inputs(x, weight, dtype)
    assert count_convolutions(graphs_of(fn, args, ())) == 0
    assert count_convolutions(graphs_of(fn, args, (1, 2))) == 0
    assert count_convolutions(graphs_of(fn, args, (0, 1, 2))) == 0


def test_without_a_bias_and_with_other_strides() -> None:
    x, weight, _ = inputs((2, 3, 8, 8), (5, 3, 2, 2))
    turned = x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)
    for args in ((x, weight), turned):
        assert count_convolutions(graphs_of(lambda a, b: F.conv2d(a, b, stride=2), args, (0, 1))) == 0


def test_tokens_of_an_image_are_adjacent() -> None:
    """Later operators read the product's own rows: no copy restores the order of a convolution's result."""

    def fn(image: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
        tokens = F.conv2d(image, filters, bias, stride=4).flatten(2).transpose(1, 2)
        return F.layer_norm(tokens, (16,)) + tokens

    (graph,) = graphs_of(fn, inputs((2, 3, 12, 8), (16, 3, 4, 4)), ()).values()
    (product,) = graph.find_nodes(op="call_function", target=aten.addmm.default)
    clones = [n for n in graph.find_nodes(op="call_function", target=aten.clone.default) if n in after(product)]
    assert clones == []


def after(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for user in node.users:
        found |= {user, *after(user)}
    return found


@pytest.mark.parametrize(("args", "options"), [
    (inputs((2, 3, 12, 8), (5, 3, 4, 4)), {"stride": 2}), (inputs((2, 3, 12, 8), (5, 3, 4, 4)), {"stride": (4, 2)}),
    (inputs((2, 3, 12, 8), (5, 3, 4, 4)), {"stride": 4, "padding": 1}),
    (inputs((2, 3, 12, 8), (5, 3, 2, 2)), {"stride": 2, "dilation": 2}),
    (inputs((2, 6, 12, 8), (4, 3, 2, 2)), {"stride": 2, "groups": 2}),
    (inputs((2, 3, 12, 8), (5, 3, 1, 1)), {"stride": 1}), (inputs((2, 16, 12, 8), (5, 16, 2, 2)), {"stride": 2}),
    (inputs((2, 3, 12, 8), (5, 3, 4, 4), torch.float32), {"stride": 4}),
])  # fmt: skip
def test_others_stay(args: Sequence[Tensor], options: dict[str, Any]) -> None:
    assert count_convolutions(graphs_of(lambda *a: F.conv2d(*a, **options), args, (1, 2))) == 2


def test_an_upward_convolution_stays() -> None:
    x, weight, _ = inputs((2, 3, 4, 4), (3, 5, 2, 2))
    assert count_convolutions(graphs_of(lambda a, b: F.conv_transpose2d(a, b, stride=2), (x, weight), (1,))) == 2


def test_extents_that_are_symbols_stay() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []
    module = nn.Conv2d(3, 5, 4, 4).bfloat16()
    x = torch.randn(2, 3, 8, 8).bfloat16()
    with torch.no_grad():
        got = torch.compile(module, backend=recording_backend(seen.append), dynamic=True)(x)
        torch.testing.assert_close(got, module(x))
    assert count_convolutions({str(k): g.module.graph for k, g in enumerate(seen)}) == 1
