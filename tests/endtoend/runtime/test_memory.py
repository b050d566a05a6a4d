"""Peak memory of training steps: regions store no more than Inductor's own code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autotune
from autotune.runtime.inductor import region_pass
from autotune.runtime.inductor.region_pass import replace_regions
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
