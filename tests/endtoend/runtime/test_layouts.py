"""Tensors between convolutions, and those kept for the backward pass, lie in a step as search saw them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

import autotune
from autotune.domains.fusion.program_spec import workloads_of
from autotune.store import Store
from tests.support.runtime.models import assert_same_step, twin


class ColumnsBeforeChannels(nn.Module):
    """A block of ConvNeXt: its norm has the channels as the last size, the convolutions beside it last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 2, 2), nn.Conv2d(16, 24, 2, 2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)
        made: Tensor = self.last(x)
        return made.square().mean()


class Residual(nn.Module):
    """A block of ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, 16, 3, padding=1, bias=False) for a in (3, 16, 16))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.convs[0](x)))
        y = F.relu(self.norms[1](self.convs[1](x)))
        made: Tensor = F.relu(x + self.norms[2](self.convs[2](y)))
        return made.square().mean()


@pytest.mark.parametrize("kind", [ColumnsBeforeChannels, Residual])
def test_a_step_of_convolutions_has_the_regions_that_a_search_finds(kind: type[nn.Module], db: str) -> None:
    Store.open(db).close()
    model, x = kind(), torch.randn(2, 3, 24, 32)
    searched = {w.fingerprint for w, _ in workloads_of(model, (x.clone().requires_grad_(),), train=True)}
    before, reference = config.layout_optimization, twin(model)
    assert_same_step(torch.compile(model, backend="autotune"), model, reference, x)
    assert config.layout_optimization is before, "changed for one compilation alone"
    with Store.open(db) as store:
        missed = {miss.workload for miss in store.misses()}
    assert missed == searched
    assert autotune.counters().misses >= len(searched)
