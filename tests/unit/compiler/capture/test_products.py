"""Products by one weight, of extents that are no whole number of 16 bytes: written otherwise, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm

from autotune.compiler.capture import products
from autotune.compiler.capture.recording import recording_backend
from tests.support.capture_helpers import rewritten_on_cpus

aten = torch.ops.aten


also_on_cpus = rewritten_on_cpus(products)


class Mixing(nn.Module):
    """Two layers over the tokens of [batch, tokens, channels], as in Mixer."""

    def __init__(self, tokens: int = 132, hidden: int = 24, channels: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.first, self.second = nn.Linear(tokens, hidden, bias=bias), nn.Linear(hidden, tokens, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x).transpose(1, 2)))).transpose(1, 2)


class Batched(Mixing):
    """The first layer by a product of batches, as torch 2.11 computes it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).transpose(1, 2)
        made = torch.bmm(rows, self.first.weight.t().expand(x.shape[0], -1, -1)) + self.first.bias
        return x + self.second(F.gelu(made)).transpose(1, 2)


def graph_of(fn: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> fx.Graph:
    """The graph of an inference, once its result is found to be eager mode's: its strides, and nearer to float64 than
    twice what eager mode is off."""
    seen: list[Any] = []
    with torch.no_grad():
        got = torch.compile(fn, backend=recording_backend(seen.append), dynamic=dynamic)(*args)
        eager = fn(*args)
        exact = (
            fn.double()(*(a.double() for a in args)) if isinstance(fn, nn.Module) else fn(*(a.double() for a in args))
        )
    assert (got.dtype, got.stride()) == (eager.dtype, eager.stride())
    assert float((got - exact).norm()) <= 2 * float((eager - exact).norm())
    return seen[0].module.graph


def shapes(graph: fx.Graph) -> list[tuple[tuple[int, ...], ...]]:
    """The products of a graph: the shapes of both operands of each."""
    targets = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return [
        tuple(tuple(a.meta["val"].shape) for a in n.args[-2:])
        for n in graph.nodes if n.target in targets
    ]  # fmt: skip


def x_of(batch: int = 3, tokens: int = 132, channels: int = 16) -> Tensor:
    return torch.randn(batch, tokens, channels).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("left", [1, 4])
def test_both_layers_of_a_mixer(bias: bool, left: int) -> None:
    tokens = 128 + left
    graph = graph_of(Mixing(tokens, bias=bias).bfloat16(), x_of(tokens=tokens))
    torch._dynamo.reset()
    assert shapes(graph_of(Batched(tokens).bfloat16(), x_of(tokens=tokens))) == shapes(graph)
    assert shapes(graph) == [((3, 16, 128), (3, 128, 24)), ((3, tokens, 24), (3, 24, 16))]


@pytest.mark.parametrize(("tokens", "expected"), [
    (132, [((3, 132, 128), (3, 128, 16))]),  # neither the sum nor the rows are whole, as in ResMLP
    (136, []), (134, []),  # both whole; six terms left
])  # fmt: skip
def test_a_layer_from_tokens_to_tokens(tokens: int, expected: list[Any]) -> None:
    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.mix = nn.Parameter(torch.randn(16)), nn.Linear(tokens, tokens)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.mix((x * self.scale).transpose(1, 2)).transpose(1, 2)

    module = Affine().bfloat16()
    assert [p for p in shapes(graph_of(module, x_of(tokens=tokens))) if p[0][-1] != tokens] == expected


def test_rows_are_written_across_before_inductor_would_pad_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor pads on GPUs alone, where it measured that this pays."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *operands: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with config.patch(force_shape_pad=True):
        written = [b[-1] for _, b in shapes(graph_of(Mixing().bfloat16(), x_of()))]
    assert written == [24, 16], "the second product writes padded rows"


def test_no_copy_but_of_the_weight() -> None:
    graph = graph_of(Mixing().bfloat16(), x_of())
    copies = graph.find_nodes(op="call_function", target=aten.clone.default)
    kept = [n for n in copies if n.meta["val"].stride() == n.args[0].meta["val"].stride()]
    large = [n for n in copies if n not in kept and n.meta["val"].numel() >= 3 * 132 * 16]
    assert large == []


@pytest.mark.parametrize(("module", "x"), [
    (Mixing(128), x_of(tokens=128)),  # whole
    (Mixing(134), x_of(tokens=134)),  # six terms left
    (Mixing(68), x_of(tokens=68)),  # a short sum
    (Mixing(132, hidden=12), x_of()),  # neither length of the first product fits
])  # fmt: skip
def test_other_first_layers_stay(module: Mixing, x: Tensor) -> None:
    tokens = x.shape[1]
    assert not any(terms[-1] == 128 != tokens for terms, _ in shapes(graph_of(module.bfloat16(), x)))


def test_other_types_and_devices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [a[-1] for a, _ in shapes(graph_of(Mixing(), x_of().float()))] == [132, 24]
    torch._dynamo.reset()
    monkeypatch.setattr(products, "DEVICES", {"cuda"})
    assert [a[-1] for a, _ in shapes(graph_of(Mixing().bfloat16(), x_of()))] == [132, 24]


def test_a_partial_sum_does_not_overflow_in_float16() -> None:
    """The first 128 terms are 70,000, the whole sum is 60,000: float16 holds the second alone."""
    layer = nn.Linear(132, 8, bias=False).half()
    x = torch.ones(2, 132, 16).half()
    with torch.no_grad():
        layer.weight[:, :128], layer.weight[:, 128:] = 70_000 / 128, -2_500
        got = torch.compile(lambda t: F.relu(layer(t.transpose(1, 2))), backend=recording_backend(lambda _: None))(x)
    assert torch.isfinite(got).all()


def test_a_sum_that_a_library_call_reads_stays() -> None:
    weight, other = torch.randn(132, 24).bfloat16(), torch.randn(24, 8).bfloat16()
    graph = graph_of(lambda x, w, v: (x.transpose(1, 2) @ w) @ v, x_of(), weight, other)
    assert all(a[-1] != 128 for a, _ in shapes(graph))


def test_rows_that_are_read_as_written_stay() -> None:
    """The softmax of a head over 132 classes reads rows, which would be strided in a transposed result."""
    head = nn.Sequential(nn.Linear(24, 132), nn.Softmax(-1)).bfloat16()
    assert ((48, 24), (24, 132)) in shapes(graph_of(head, torch.randn(3, 16, 24).bfloat16()))


def test_a_batch_of_weights_stays() -> None:
    many = torch.randn(3, 132, 24).bfloat16()
    graph = graph_of(lambda x, w: F.relu(torch.bmm(x.transpose(1, 2), w)), x_of(), many)
    assert shapes(graph) == [((3, 16, 132), (3, 132, 24))]


def test_numbers_that_are_not_finite_stay_in_their_image() -> None:
    module, x = Mixing().bfloat16(), x_of()
    x[1, 131, 3] = float("inf")
    with torch.no_grad():
        got = torch.compile(module, backend=recording_backend(lambda _: None))(x)
    assert not torch.isfinite(got[1]).all()
    assert torch.isfinite(got[0]).all()
    assert torch.isfinite(got[2]).all()


@pytest.mark.parametrize(("module", "changed"), [
    (Mixing(), ((3, 132, 24), (3, 24, 16))),  # the input's gradient by the first layer; the copy serves the weight's
    (Batched(), ((3, 16, 128), (3, 128, 24))),
])  # fmt: skip
def test_gradients(module: Mixing, changed: tuple[tuple[int, ...], ...]) -> None:
    module, x = module.bfloat16(), x_of()

    def step(run: Callable[[Tensor], Tensor], given: Tensor) -> list[Tensor]:
        leaf = given.detach().requires_grad_()
        out = run(leaf)
        return [
            out,
            *torch.autograd.grad((out * torch.linspace(-1, 1, 16).to(out)).sum(), [leaf, *module.parameters()]),
        ]

    seen: list[Any] = []
    got = step(torch.compile(module, backend=recording_backend(seen.append), dynamic=False), x)
    eager = step(module, x)
    exact = step(module.double(), x.double())
    assert changed in [found for g in seen for found in shapes(g.module.graph)]
    for a, b, c in zip(*([r.detach() for r in results] for results in (got, eager, exact)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert float((a - c).norm()) <= 2 * float((b - c).norm()) + 2**-8 * float(c.norm())


def test_a_batch_that_is_a_symbol_stays_as_it_is() -> None:
    module = Mixing().bfloat16()
    torch._dynamo.mark_dynamic(x := x_of(), 0)
    assert [a[-1] for a, _ in shapes(graph_of(module, x, dynamic=True))] == [132, 24]
