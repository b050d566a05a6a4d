"""Strides of tensors between convolutions, and of those kept for the backward pass: a step has those of the search."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

import autotune
from autotune.domains.fusion.program_spec import workloads_of
from autotune.store import Store
from tests.support.deployment import Tune
from tests.support.runtime.models import assert_same_step, twin


class ColumnsBeforeChannels(nn.Module):
    """A block of ResNet, and one of ConvNeXt: its norm has the channels as the last size, its convolutions have them
    last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Conv2d(16, 24, 2, 2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.batch, self.norm, self.narrow = nn.BatchNorm2d(16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.first(x)))
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        made: Tensor = self.last(x + self.narrow(F.gelu(y)).permute(0, 3, 1, 2))
        return made.square().mean()


def test_a_step_of_convolutions_has_the_regions_that_a_search_finds(db: str) -> None:
    Store.open(db).close()
    model, x = ColumnsBeforeChannels(), torch.randn(2, 3, 24, 32)
    searched = {w.fingerprint for w, _ in workloads_of(model, (x.clone().requires_grad_(),), train=True)}
    before, reference = config.layout_optimization, twin(model)
    assert_same_step(torch.compile(model, backend="autotune"), model, reference, x)
    assert config.layout_optimization is before, "changed for one compilation alone"
    with Store.open(db) as store:
        missed = {miss.workload for miss in store.misses()}
    assert missed == searched
    assert autotune.counters().misses >= len(searched)


def test_strides_that_a_later_pass_changes(tune: Tune) -> None:
    """The pass sees a written half with the strides of the whole. Inductor then makes it dense."""

    def fn(x: Tensor) -> Tensor:
        half = (x.tanh() * 2).chunk(2, 1)[1]
        diagonal = torch.diagonal(half)
        diagonal.copy_(torch.log_softmax(diagonal, 0))
        return half

    x = torch.randn(16, 16)
    assert len(tune(fn, (x,))) == 2, "one before the write, and one that reads its result"
    torch.testing.assert_close(torch.compile(fn, backend="autotune")(x), fn(x))
    assert autotune.counters().hits == 2
    assert autotune.counters().fallbacks == 0
