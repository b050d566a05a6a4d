"""Peak memory of training steps: regions store no more than Inductor's own code does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotune
from tests.support.deployment import Tune
from tests.support.memory import peak_bytes
from tests.support.runtime.models import twin

ROWS, WIDTH, LAYERS = 512, 32, 4
HALF = torch.bfloat16


class Residual(nn.Module):
    """Layers in half precision, the residual read as fp32 before a product and after it. The backward pass makes the
    sigmoids anew: for the residuals all at once, for the gradients one by one."""

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
