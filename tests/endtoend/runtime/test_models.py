"""Training steps of several kinds of model with half of their regions stored: kernels, Inductor and library calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autotune
from tests.support.deployment import Tune
from tests.support.runtime.models import twin


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.batch, self.group, self.last = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.batch(self.one(x)))
        x = x + F.silu(self.group(self.two(x)))
        return F.log_softmax(self.last(F.adaptive_avg_pool2d(x, 1).flatten(1)), -1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.last = nn.Embedding(50, 24), nn.LSTMCell(24, 24), nn.Linear(24, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(tokens.shape[0], 24)
        for t in range(2):
            h, c = self.cell(self.table(tokens[:, t]), (h, c))
        return F.cross_entropy(self.last(h), tokens[:, 0], reduction="none")


class Mixed(nn.Module):
    """Lower precision within, as torch.autocast has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.softmax(self.two(F.gelu(self.norm(self.one(x)))), -1).float()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], float]] = {
    "convolutions": (Convolutions, lambda: torch.randn(4, 3, 10, 10), 1e-5),
    "recurrent": (Recurrent, lambda: torch.randint(0, 50, (6, 2)), 1e-5),
    "mixed precision": (Mixed, lambda: torch.randn(8, 16), 3e-2),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_half_of_the_regions_stored(tune: Tune, name: str) -> None:
    make, inputs, tolerance = MODELS[name]
    model, x = make(), inputs()
    seen: list[str] = []

    def every_other(workload: object) -> bool:
        seen.append(str(workload))
        return len(seen) % 2 == 1

    assert tune(twin(model), (x,), select=every_other)
    reference = twin(model)
    got, want = torch.compile(model, backend="autotune")(x), reference(x)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    grad = torch.randn_like(want)
    got.backward(grad)
    want.backward(grad)
    for (_, mine), (where, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, other.grad, atol=tolerance, rtol=tolerance, msg=lambda m, where=where: f"{where}: {m}"
        )
    for mine, other in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)
    counters = autotune.counters()
    assert counters.hits
    assert counters.misses
    assert counters.fallbacks == 0
