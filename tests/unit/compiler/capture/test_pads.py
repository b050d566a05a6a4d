"""Operands that Inductor pads for products: padded once, in their memory order, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm

from autotune.compiler.capture.recording import recording_backend

aten = torch.ops.aten
WORDS, WIDE = 101, 104


@pytest.fixture(autouse=True)
def padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor pads on GPUs alone, where it measured that this pays."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *operands: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    torch.manual_seed(0)
    torch._dynamo.reset()
    with config.patch(force_shape_pad=True):
        yield
    torch._dynamo.reset()


class Head(nn.Module):
    """A language model's last layer and loss, in bf16."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, WORDS, bias=bias)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x).view(-1, WORDS).float(), label.view(-1))


def backward_of(module: nn.Module, *args: Tensor) -> fx.Graph:
    """The backward graph of a training step, once its gradients are found to be as near to float64 as eager mode's."""

    def step(run: Callable[..., Tensor], x: Tensor, *more: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        return list(torch.autograd.grad(run(leaf, *more), [leaf, *module.parameters()]))

    seen: list[Any] = []
    got = step(torch.compile(module, backend=recording_backend(seen.append), dynamic=False), *args)
    eager = step(module, *args)
    exact = step(module.double(), args[0].double(), *args[1:])
    for a, b, c in zip(got, eager, exact, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert float((a - c).norm()) <= 2 * float((b - c).norm()) + 2**-8 * float(c.norm())
    return seen[-1].module.graph


def pads(graph: fx.Graph) -> list[tuple[int, ...]]:
    found = graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    return [tuple(n.meta["val"].shape) for n in found if n.meta["val"].dtype.is_floating_point]


@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_of_logits_is_padded_once(bias: bool) -> None:
    """For the input's gradient, for the weight's, and summed for the bias's."""
    graph = backward_of(Head(bias).bfloat16(), torch.randn(8, 16).bfloat16(), torch.randint(0, WORDS, (8,)))
    assert [shape for shape in pads(graph) if 8 in shape] == [(8, WIDE)]
    sums = [n for n in graph.nodes if n.target is aten.sum.dim_IntList and n.args[1] == [0]]
    assert [tuple(n.args[0].meta["val"].shape) for n in sums] == [(8, WIDE)] * bias


def test_a_transposed_operand_is_padded_in_its_own_layout() -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WORDS, 16))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.relu().t()).float().square().sum()

    seen: list[Any] = []
    module, x = Across().bfloat16(), torch.randn(8, 16).bfloat16()
    with torch.no_grad():
        got = torch.compile(module, backend=recording_backend(seen.append), dynamic=False)(x)
        torch.testing.assert_close(got, module(x), rtol=2**-7, atol=0.0)
    (pad,) = seen[0].module.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert tuple(pad.meta["val"].shape) == (WIDE, 16)
    assert [user.target for user in pad.users] == [aten.permute.default]


def test_pads_that_are_read_otherwise_stay() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        padded = F.pad(x.t(), (0, 3))
        return padded @ y, padded.cumsum(1)

    seen: list[Any] = []
    x, y = torch.randn(WORDS, 8).bfloat16(), torch.randn(WIDE, 8).bfloat16()
    got = torch.compile(both, backend=recording_backend(seen.append), dynamic=False)(x, y)
    torch.testing.assert_close(got, both(x, y), rtol=2**-7, atol=0.1)
    (pad,) = seen[0].module.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert pad.args[0].target is aten.permute.default


def test_a_pad_of_other_numbers_or_in_front_stays() -> None:
    def front(x: Tensor, y: Tensor) -> Tensor:
        return F.pad(x.t(), (3, 0)) @ y + F.pad(x.t(), (0, 3), value=1.0) @ y

    seen: list[Any] = []
    x, y = torch.randn(WORDS, 8).bfloat16(), torch.randn(WIDE, 8).bfloat16()
    torch.compile(front, backend=recording_backend(seen.append), dynamic=False)(x, y)
    found = seen[0].module.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert [p.args[0].target for p in found] == [aten.permute.default] * 2


def test_negative_padding_is_not_shared_as_padding() -> None:
    def cut(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.relu()
        return F.pad(z, (0, -5)) @ y, z.sum(0)

    x, y = torch.randn(8, WORDS).bfloat16(), torch.randn(WORDS - 5, 8).bfloat16()
    got = torch.compile(cut, backend=recording_backend(lambda _: None), dynamic=False)(x, y)
    torch.testing.assert_close(got, cut(x, y), rtol=2**-7, atol=0.1)


def test_a_width_that_is_a_symbol_is_left_alone() -> None:
    def to_the_length(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([F.pad(x, (0, 0, 0, y.shape[0] - x.shape[0])), y], 1)

    x, y = torch.randn(5, 4), torch.randn(9, 4)
    torch._dynamo.mark_dynamic(y, 0)
    run = torch.compile(to_the_length, backend=recording_backend(lambda _: None))
    torch.testing.assert_close(run(x, y), to_the_length(x, y), rtol=0.0, atol=0.0)


def pooled(x: Tensor, w: Tensor, v: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.bmm(x, w).relu()
    return torch.bmm(h, v), h.sum(1) @ head


def pooled_alone(x: Tensor, w: Tensor, v: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    h = (x[0] @ w[0]).relu()
    p = h.sum(0, keepdim=True)
    return h @ v[0], p @ head


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("fn", [pooled, pooled_alone])
def test_a_sum_that_is_padded_itself(fn: Callable[..., tuple[Tensor, Tensor]], train: bool) -> None:
    """Its pad is of another group, which the first one's rewriting must not leave behind."""
    shapes = ((4, 8, 16), (4, 16, WORDS), (4, WORDS, 16), (WORDS, 24))
    args = [torch.randn(shape).bfloat16().requires_grad_(train and len(shape) > 0) for shape in shapes]
    got = torch.compile(fn, backend=recording_backend(lambda _: None), dynamic=False)(*args)
    for a, b in zip(got, fn(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=0.5)
    if train:
        ours, theirs = (torch.autograd.grad([o.float().sum() for o in outs], args) for outs in (got, fn(*args)))
        for a, b in zip(ours, theirs, strict=True):
            assert float((a - b).norm()) <= 2**-6 * float(b.norm())


def test_a_sum_of_several_rows_keeps_its_strides() -> None:
    """Cut from padded rows it would have gaps, where the program may view it as one row."""

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x.relu()
        return torch.bmm(h, y), h.sum(0)

    x, y = torch.randn(4, 8, WORDS).bfloat16(), torch.randn(4, WORDS, 8).bfloat16()
    got = torch.compile(both, backend=recording_backend(lambda _: None), dynamic=False)(x, y)
    for a, b in zip(got, both(x, y), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=2**-6, atol=0.1)
    got[1].view(-1)


def test_results_cut_from_padded_products_can_be_viewed() -> None:
    """A gradient that the captured program sees in other dimensions: eager mode cannot view what has gaps."""

    def reshaped(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.reshape(3, 12, 129), w) * 1.0

    x, w = torch.randn(3, 129, 12).bfloat16(), torch.randn(8, 129).bfloat16()
    given = [x.requires_grad_(), w.requires_grad_()]
    run = torch.compile(reshaped, backend=recording_backend(lambda _: None), dynamic=False)
    ours, theirs = (torch.autograd.grad(f(*given).float().square().sum(), given) for f in (run, reshaped))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= 2**-6 * float(b.norm())


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_is_not_padded_reads_the_padded_operand(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Of BERT's gradient of the logits Inductor pads one operand: the sum for the input's gradient, not its rows."""
    padded = pad_mm.should_pad

    def only_sums(match: Any, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> bool:
        return a.shape[-1] == WORDS and padded(match, a, b, *rest, **named)

    monkeypatch.setattr(pad_mm, "should_pad", only_sums)
    graph = backward_of(Head(bias).bfloat16(), torch.randn(8, 16).bfloat16(), torch.randint(0, WORDS, (8,)))
    assert [shape for shape in pads(graph) if 8 in shape] == [(8, WIDE)]
    found = graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    (pad,) = (n for n in found if 8 in n.meta["val"].shape)
    assert list(pad.args[0].users) == [pad]
    operands = [n.args[0].meta["val"] for n in graph.nodes if n.target is aten.mm.default]
    assert sorted((tuple(x.shape), x.stride()) for x in operands) == [((8, WIDE), (WIDE, 1)), ((WORDS, 8), (1, WIDE))]


def test_an_operand_that_others_read_too_is_not_cut_out_of_a_padded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the graph has its own memory."""
    padded = pad_mm.should_pad

    def first(match: Any, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> bool:
        return a.shape[0] == 8 and padded(match, a, b, *rest, **named)

    monkeypatch.setattr(pad_mm, "should_pad", first)

    def fn(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gated = (x * 2).sigmoid()
        return gated @ y, gated.t() @ z, gated.t()

    given = [torch.randn(*shape).bfloat16() for shape in ((8, WORDS), (WORDS, 16), (8, 24))]
    seen: list[Any] = []
    got = torch.compile(fn, backend=recording_backend(seen.append), dynamic=False)(*given)
    for a, b in zip(got, fn(*given), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    graph = seen[0].module.graph
    assert pads(graph)
    assert {n.args[0].meta["val"].shape for n in graph.nodes if n.target is aten.mm.default} == {(8, WIDE), (WORDS, 8)}
