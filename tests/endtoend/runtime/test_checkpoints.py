"""Checkpoints: keys are those of torch.compile, and a program without autotune resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotune
from tests.support.deployment import Tune
from tests.support.runtime.models import twin

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A block with a region. ``compile`` of one of torch's own modules, such as Sequential, compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.gelu(self.norm(self.up(x))))
        return result


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _train(run: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        run(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_program_without_autotune_resumes(tune: Tune, tmp_path: Path, *, in_place: bool) -> None:
    tune(twin(_model()), (X,))

    def start(backend: str) -> tuple[Any, torch.optim.Optimizer]:
        model = _model()
        if in_place:
            model.compile(backend=backend)
        run = model if in_place else torch.compile(model, backend=backend)
        return run, torch.optim.AdamW(model.parameters(), lr=1e-3)

    ours, our_optimizer = start("autotune")
    _train(ours, our_optimizer, 3)
    assert autotune.counters().hits
    torch.save([ours.state_dict(), our_optimizer.state_dict()], tmp_path / "checkpoint.pt")
    theirs, their_optimizer = start("inductor")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert next(iter(ours.state_dict())) == ("up.weight" if in_place else "_orig_mod.up.weight")

    values, states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    theirs.load_state_dict(values)
    their_optimizer.load_state_dict(states)
    _train(ours, our_optimizer, 3)
    _train(theirs, their_optimizer, 3)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-4, atol=1e-5)
