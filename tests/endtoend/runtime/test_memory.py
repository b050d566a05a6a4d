"""Peak memory of training steps: regions store no more than Inductor's own code does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autotune
from autotune.compiler.capture import hooks
from autotune.compiler.lower.nodes import op_name
from autotune.runtime.inductor import region_pass
from autotune.runtime.inductor.region_pass import replace_regions
from benchmarks.user_programs.plain import Mesh
from tests.support.deployment import Tune
from tests.support.memory import peak_bytes
from tests.support.runtime.models import twin

ROWS, WIDTH, LAYERS = 512, 32, 4
HALF = torch.bfloat16


class Residual(nn.Module):
    """Layers in half precision, the residual read as fp32 before a product and after it. The backward pass makes the
    sigmoids again: for the residuals all at once, for the gradients one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            x = (0.5 * wide + layer(normed.to(HALF)).float().sigmoid()).to(HALF)
        loss: Tensor = x.float().square().mean()
        return loss


@pytest.mark.slow
def test_a_training_step_takes_no_more_memory_than_inductor_s(tune: Tune) -> None:
    model = Residual().to(HALF)
    ids = torch.randint(0, 64, (ROWS,))
    tune(twin(model), (ids,))

    def peak(backend: str) -> int:
        torch._dynamo.reset()
        step = torch.compile(twin(model), backend=backend)
        step(ids).backward()
        return peak_bytes(lambda: step(ids).backward())

    assert peak("autotune") <= 1.02 * peak("inductor")
    assert autotune.counters().hits
    assert autotune.counters().fallbacks == 0


class Checkpointed(nn.Module):
    """Layers that the backward pass computes again, each before its own gradients."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._thrice, layer, x, use_reentrant=False)
        loss: Tensor = x.square().mean()
        return loss

    def _thrice(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = x + layer(torch.tanh(layer(torch.tanh(layer(x)))))
        return made


@pytest.mark.slow
def test_a_checkpointed_layer_takes_the_memory_of_its_input(tune: Tune) -> None:
    """All its work depends on saved tensors only, so that one kernel could compute it for all layers."""
    x = torch.randn(8192, 128, requires_grad=True)

    def peak(layers: int) -> int:
        model = Checkpointed(layers, x.shape[1])
        tune(twin(model), (x,))
        step = torch.compile(twin(model), backend="autotune")
        step(x).backward()
        return peak_bytes(lambda: step(x).backward())

    assert peak(6) - peak(3) <= 3.1 * x.nbytes
    assert autotune.counters().hits
    assert autotune.counters().fallbacks == 0


@pytest.mark.slow
def test_inductor_orders_kernels_for_memory_as_without_regions(tune: Tune) -> None:
    """Inductor joins sums of two layers, which delays their weights' gradients in its first order. Its other orders
    put them back. Separate nodes for the results' memory had made those orders worse than the first."""
    nodes, width = 500, 32
    model = Mesh(width, 4)
    ends = torch.randint(0, nodes, (2, 6 * nodes))
    inputs = torch.randn(nodes, 12), torch.randn(6 * nodes, 7), ends
    tune(twin(model), inputs, select=lambda w: w.label.startswith("threshold_backward"))

    def peak(backend: str) -> int:
        torch._dynamo.reset()
        step = torch.compile(twin(model), backend=backend)
        step(*inputs).sum().backward()
        return peak_bytes(lambda: step(*inputs).sum().backward())

    assert peak("autotune") <= 1.02 * peak("inductor")
    assert autotune.counters().hits
    assert autotune.counters().fallbacks == 0


class Normed(nn.Module):
    """A convolution with a bias and a batch norm, whose gradient needs the convolution's result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.conv(x)).relu()
        return result


def saved_by_user(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "convolution" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


contexts = partial(create_selective_checkpoint_contexts, saved_by_user)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_backward_pass_gets_a_convolution_without_its_bias(
    monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    """As on a GPU: the forward pass writes no second tensor with the bias. PointNet's peak was 1.16 times
    torch.compile's, since both were alive together."""
    monkeypatch.setattr(hooks, "DEVICES", {"cpu"})
    large: list[list[tuple[str, Any]]] = []

    def seen(graph: fx.Graph, **options: Any) -> None:
        (output,) = graph.find_nodes(op="output")
        made = [n for n in output.all_input_nodes if n.op == "call_function"]
        large.append([(op_name(n), n.args[2:3]) for n in made if n.meta["val"].numel() == 2 * 8 * 64])
        replace_regions(graph, **options)

    monkeypatch.setattr(region_pass, "replace_regions", seen)
    model, x = Normed(), torch.randn(2, 4, 64)
    mine = twin(model)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        if not checkpointed:
            return module(x)  # type: ignore[no-any-return]
        return checkpoint(module, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    for step in (lambda x: run(model, x), torch.compile(lambda x: run(mine, x), backend="autotune")):
        step(x).square().mean().backward()
    for p, q in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-5, rtol=1e-4)
    names = [name for name, _ in large[0]]
    assert large[0][names.index("convolution")] == ("convolution", (None,))
    assert "add" not in names


class TwoTowers(nn.Module):
    """The first tower ends with the norm of one token in many, which is read behind the second tower, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x)
        pooled = self.norm(x[:, 0])
        for layer in self.second:
            y = layer(y)
        result: Tensor = y[:, 0] * self.out(pooled)
        return result


def test_single_token_work_runs_before_all_tokens_allocate_memory(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoTowers()
    inputs = torch.randn(16, 64, WIDTH), torch.randn(16, 64, WIDTH)
    orders: list[list[str]] = []

    def replaced(graph: fx.Graph, **options: Any) -> None:
        replace_regions(graph, **options)
        orders.append([str(n.target) for n in graph.nodes])

    with torch.no_grad():
        tune(twin(model), inputs)
        monkeypatch.setattr(region_pass, "replace_regions", replaced)
        torch.testing.assert_close(torch.compile(model, backend="autotune")(*inputs), model(*inputs))
    (order,) = orders
    called = [k for k, target in enumerate(order) if target.startswith("autotune.")]
    products = [k for k, target in enumerate(order) if target.startswith("aten.addmm")]
    assert len(products) == 4
    assert any(products[1] < k < products[2] for k in called)
