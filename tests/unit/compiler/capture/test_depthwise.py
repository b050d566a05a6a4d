"""The input's gradient of a depthwise convolution is a convolution, where it may be, and the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autotune.compiler.capture import depthwise
from autotune.compiler.capture.recording import recording_backend
from tests.support.capture_helpers import rewritten_on_cpus

aten = torch.ops.aten
C = 3


also_on_cpus = rewritten_on_cpus(depthwise)


def inputs(kernel: Sequence[int], dtype: torch.dtype = torch.bfloat16, out: int = C, each: int = 1) -> list[Tensor]:
    """[2, 3, 10, 11], weights and bias, of numbers that are the same in half precision."""
    shapes = ((2, C, 10, 11), (out, each, *kernel), (out,))
    seeded = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=seeded).bfloat16().half().to(dtype) for shape in shapes]


def gradients(run: Any, args: Sequence[Tensor], wanted: Sequence[int] = (0, 1, 2)) -> list[Tensor]:
    given = [a.detach().requires_grad_(i in wanted) for i, a in enumerate(args)]
    out = run(*given)
    ramp = torch.linspace(-1, 1, out.numel()).bfloat16().half().to(out).view(out.shape)
    return list(torch.autograd.grad(out, [given[i] for i in wanted], ramp))


def backward_of(
    args: Sequence[Tensor],
    options: dict[str, Any],
    wanted: Sequence[int] = (0, 1, 2),
    apart: float = 2**-7,
) -> fx.Graph:
    """The backward graph of a convolution, once its gradients are found to be those of eager mode in fp32.

    ``apart`` is the largest difference, relative to the largest gradient.
    """
    options = {"groups": C, **options}
    convolve = F.conv_transpose2d if options.pop("transposed", False) else F.conv2d

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolve(x, weight, bias, **options)

    seen: list[Any] = []
    got = gradients(torch.compile(fn, backend=recording_backend(seen.append), dynamic=False), args, wanted)
    want = gradients(fn, [a.float() for a in args], wanted)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == args[0].dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=apart, atol=apart * float(b.abs().max()))
    (graph,) = [g.module.graph for g in seen if g.kind == "backward"]
    return graph


def count(graph: fx.Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize(("kernel", "options", "dtype"), [
    ((3, 3), {"padding": 1}, torch.bfloat16), ((3, 3), {"padding": 0}, torch.float16),
    ((5, 5), {"padding": 4}, torch.bfloat16), ((7, 7), {"padding": 3}, torch.float16),
    ((3, 3), {"padding": 2, "dilation": 2}, torch.bfloat16), ((3, 3), {"padding": 4, "dilation": 2}, torch.float16),
    ((3, 5), {"padding": (0, 3)}, torch.bfloat16), ((1, 7), {"padding": (0, 1)}, torch.bfloat16),
    ((4, 2), {"padding": (1, 0), "dilation": (1, 3)}, torch.bfloat16), ((3, 3), {"padding": "same"}, torch.bfloat16),
])  # fmt: skip
def test_it_is_a_convolution(kernel: Sequence[int], options: dict[str, Any], dtype: torch.dtype) -> None:
    graph = backward_of(inputs(kernel, dtype), options)
    assert count(graph, aten.convolution.default) == 1
    (left,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert left.args[10][:2] == [False, True], "the weight's alone"


def test_where_one_gradient_is_wanted_the_other_is_not_computed() -> None:
    for wanted, left in ((0, (1, 0)), (1, (0, 1))):
        graph = backward_of(inputs((3, 3)), {"padding": 1}, (wanted,))
        assert (count(graph, aten.convolution.default), count(graph, aten.convolution_backward.default)) == left


@pytest.mark.parametrize(("args", "options"), [
    (inputs((3, 3)), {"stride": 2}), (inputs((3, 3)), {"stride": (1, 2)}), (inputs((3, 3), each=3), {"groups": 1}),
    (inputs((3, 3), out=6), {}), (inputs((3, 3), torch.float32), {}), (inputs((9, 9)), {"padding": 4}),
    (inputs((1, 9)), {}), (inputs((3, 3)), {"transposed": True}), (inputs((3, 3)), {"padding": 3}),
    (inputs((3, 3)), {"padding": (0, 3)}), (inputs((3, 3)), {"padding": 5, "dilation": 2}),
])  # fmt: skip
def test_others_stay(args: list[Tensor], options: dict[str, Any]) -> None:
    graph = backward_of(args, options, apart=2**-5)  # on some CPUs torch's own gradient is less exact
    (left,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert left.args[10][:2] == [True, True]


def test_with_two_groups_one_channel_and_on_other_devices_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs((3, 3), out=4, each=2)
    pairs = [torch.cat([x, x[:, :1]], 1), weight, bias]
    assert count(backward_of(pairs, {"groups": 2}), aten.convolution.default) == 0
    single = [x[:, :1].contiguous(), weight[:1, :1].contiguous(), bias[:1]]
    assert count(backward_of(single, {"groups": 1}), aten.convolution.default) == 0
    monkeypatch.setattr(depthwise, "DEVICES", {"cuda"})
    assert count(backward_of(inputs((3, 3)), {}), aten.convolution.default) == 0


def test_one_number_for_both_axes() -> None:
    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.convolution(x, weight, bias, [1], [1], [1], False, [0], C)

    args = inputs((3, 3))
    got = gradients(torch.compile(fn, backend=recording_backend(lambda graph: None), dynamic=False), args)
    for a, b in zip(got, gradients(fn, [a.float() for a in args]), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=2**-7 * float(b.abs().max()))
