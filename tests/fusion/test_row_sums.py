"""Log-softmax taken apart for training: the same numbers, and nothing of the vocabulary's size kept but the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.fusion.capture import aot_backend, capture
from autotune.fusion.graph import Graph
from autotune.fusion.regions import find_regions
from autotune.fusion.row_sums import split_log_softmax

ROWS, WORDS = 24, 50
aten = torch.ops.aten


def entropy(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.float(), target, **options)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, t: entropy(x, t),
    "sum": lambda x, t: entropy(x, t, reduction="sum"),
    "each": lambda x, t: entropy(x, t, reduction="none").square().mean(),
    "ignored": lambda x, t: entropy(x, t, ignore_index=3),
    "smooth": lambda x, t: entropy(x, t, label_smoothing=0.1, ignore_index=3),
    "own type": lambda x, t: F.cross_entropy(x, t),
    "weighted": lambda x, t: entropy(x, t, weight=torch.linspace(0.5, 2, WORDS)),
    "images": lambda x, t: F.cross_entropy(x.float().view(4, 6, WORDS).transpose(1, 2), t.view(4, 6)),
    "by itself": lambda x, t: (F.log_softmax(x.float(), -1) * torch.linspace(-1, 1, WORDS)).sum() / 7,
    "other dimension": lambda x, t: F.log_softmax(x.float(), 0).square().mean(),
    "likely": lambda x, t: F.kl_div(
        F.log_softmax(x.float(), -1), torch.full((ROWS, WORDS), 1 / WORDS), reduction="sum"
    ),
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    target = torch.randint(0, WORDS, (ROWS,))
    target[:4] = 3
    return (torch.randn(ROWS, WORDS) * 3).to(dtype).requires_grad_(), target


def run_graphs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` through the captured graphs, run as they are."""
    return torch.compile(fn, backend=aot_backend(lambda gm, example, kind: gm.forward), dynamic=False)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_loss_and_gradient_are_those_of_eager_mode(name: str, dtype: torch.dtype) -> None:
    def step(x: Tensor, target: Tensor) -> Tensor:
        return LOSSES[name](x * 1.5, target)

    x, target = inputs(dtype)
    got, want = run_graphs(step)(x, target), step(x, target)
    close = {"rtol": 2e-2, "atol": 2e-3} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x), **close)


def model(dtype: torch.dtype, loss: str) -> tuple[torch.nn.Module, tuple[Tensor, Tensor]]:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(16, WORDS * 20, dtype=dtype)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return LOSSES[loss](self.head(x), target)

    return Model(), (torch.randn(ROWS, 16, dtype=dtype), inputs()[1])


@pytest.mark.parametrize("loss", ["mean", "sum", "each", "ignored", "smooth", "own type"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_logits_are_all_that_is_kept(dtype: torch.dtype, loss: str) -> None:
    module, args = model(dtype, loss)
    forward, backward = (g.module for g in capture(module, args, grad=True).graphs)
    kept = next(iter(n for n in forward.graph.nodes if n.op == "output")).args[0]
    large = [n for n in kept if n is not None and n.op != "placeholder" and n.meta["val"].numel() >= ROWS * WORDS * 20]
    assert [n.target for n in large] == [aten.addmm.default]
    # The forward reads the logits, the backward reads them and writes their gradient; little else.
    size, short = torch.empty((), dtype=dtype).element_size() * ROWS * WORDS * 20, 8192
    moved = [
        Graph.from_json(r.workload.spec).bytes_moved for g in (forward, backward) for r in find_regions(g) if r.workload
    ]
    assert [round(m / size, 1) for m in moved if m > size / 2] == pytest.approx([1, 2], abs=0.2 + short / size)


def test_regions_are_called_by_the_loss() -> None:
    module, args = model(torch.bfloat16, "smooth")
    forward = capture(module, args, grad=True).graphs[0].module
    (label,) = [r.workload.label for r in find_regions(forward) if r.workload]
    assert label.startswith("to_copy+log_softmax+nll_loss_forward+")


def test_what_no_derivative_reads_stays_one_operator() -> None:
    x, _ = inputs()
    graphs = capture(lambda x: F.log_softmax(x, -1), (x.detach(),)).graphs
    assert [n.target for n in graphs[0].module.graph.nodes if n.op == "call_function"] == [aten._log_softmax.default]


def test_nothing_chosen_is_no_number_as_in_eager_mode() -> None:
    x, target = inputs()
    got = run_graphs(lambda x, t: F.cross_entropy(x, t, ignore_index=3))(x, torch.full_like(target, 3))
    assert got.isnan()
    assert (
        torch.autograd.grad(got, x)[0].isnan().any()
        == torch.autograd.grad(F.cross_entropy(x, torch.full_like(target, 3), ignore_index=3), x)[0].isnan().any()
    )


def test_results_that_the_caller_wants_too() -> None:
    def step(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        chances = F.log_softmax(x, -1)
        return F.nll_loss(chances, target), chances

    x, target = inputs()
    for got, want in zip(run_graphs(step)(x, target), step(x, target), strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x, retain_graph=True), torch.autograd.grad(want.sum(), x, retain_graph=True)
        )


def test_large_numbers_lose_nothing() -> None:
    x = (torch.randn(4, 32) + 3e4).requires_grad_()
    step = lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64))  # noqa: E731
    torch.testing.assert_close(run_graphs(step)(x), step(x.double()).float(), rtol=1e-5, atol=0)


def test_short_logits_and_long_chances_of_one_operator() -> None:
    """CUDA has a log-softmax that takes fp16 and gives fp32, CPUs have none: only types are looked at."""

    def joint(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        chances = aten._log_softmax(x, 1, True)
        return chances, aten._log_softmax_backward_data(grad, chances, 1, torch.float16)

    with FakeTensorMode():
        given = torch.empty(4, 8, dtype=torch.float16, device="cuda"), torch.empty(4, 8, device="cuda")
        gm = make_fx(joint)(*given)
    split_log_softmax(gm)
    gm.graph.lint()
    assert aten._log_softmax.default not in {n.target for n in gm.graph.nodes}
    (output,) = gm.graph.find_nodes(op="output")
    assert [n.meta["val"].dtype for n in output.args[0]] == [torch.float32, torch.float16]
    assert [n.meta["val"].dtype for n in gm.graph.nodes if n.target is aten.amax.default] == [torch.float32]


def test_results_lie_in_memory_as_the_operator_leaves_them() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        chances = F.log_softmax(x.transpose(0, 1), -1)
        return chances, chances.view(-1).square()

    x, _ = inputs()
    got, want = run_graphs(step)(x), step(x)
    assert got[0].stride() == want[0].stride() == (ROWS, 1)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(
        torch.autograd.grad(got[1].sum(), x), torch.autograd.grad(want[1].sum(), x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("expanded", [True, False])
def test_gradients_lie_in_memory_as_the_operator_leaves_them(expanded: bool) -> None:
    def joint(grad: Tensor, x: Tensor) -> Tensor:
        return aten._log_softmax_backward_data(grad, aten._log_softmax(x, 2, False), 2, torch.float32)

    grad = torch.randn(()).expand(2, 3, 4) if expanded else torch.randn(2, 3, 4)
    x = torch.randn(3, 2, 4).transpose(0, 1)
    with FakeTensorMode() as mode:
        gm = make_fx(joint)(mode.from_tensor(grad), mode.from_tensor(x))
    split_log_softmax(gm)
    (output,) = gm.graph.find_nodes(op="output")
    got, want = gm(grad, x), joint(grad, x)
    assert got.stride() == want.stride() == output.args[0].meta["val"].stride()
    torch.testing.assert_close(got, want)
    copies = [n for n in gm.graph.nodes if n.target is aten.clone.default]
    assert len(copies) == expanded, "strides that nobody looks at cost no copy"


def test_a_sum_of_losses_beyond_fp16_has_a_mean() -> None:
    x = (torch.eye(32).repeat(64, 1) * -300 + 300).half().requires_grad_()
    target = torch.arange(32).repeat(64)
    step = lambda x: F.cross_entropy(x, target)  # noqa: E731
    want = step(x.float())
    assert want * len(x) > torch.finfo(torch.float16).max
    got = run_graphs(step)(x)
    torch.testing.assert_close(got, want.half())
    torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x), rtol=1e-2, atol=1e-5)
