"""Compiled optimizer steps: parameters and state are written in place, and a count of steps kept as a Python number
makes graphs with symbols for values that change from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autotune
from tests.endtoend.runtime.test_backend import compiled
from tests.support.deployment import Tune
from tests.support.runtime.models import twin

STEPS = 4


class Counting(torch.optim.Optimizer):
    """As timm writes Adan, Adafactor and others: steps are a Python number of the group, in the bias corrections."""

    def __init__(self, parameters: Any, foreach: bool, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0, "foreach": foreach})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            first, second = 1 - 0.9 ** group["step"], math.sqrt(1 - 0.99 ** group["step"])
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
            means = [self.state[p]["mean"] for p in parameters]
            squares = [self.state[p]["square"] for p in parameters]
            if group["foreach"]:
                torch._foreach_mul_(means, 0.9)
                torch._foreach_add_(means, gradients, alpha=0.1)
                torch._foreach_mul_(squares, 0.99)
                torch._foreach_addcmul_(squares, gradients, gradients, 0.01)
                roots = torch._foreach_sqrt(squares)
                torch._foreach_div_(roots, second)
                torch._foreach_add_(roots, 1e-8)
                torch._foreach_addcdiv_(parameters, means, roots, -group["lr"] / first)
            else:
                for p, g, mean, square in zip(parameters, gradients, means, squares, strict=True):
                    mean.mul_(0.9).add_(g, alpha=0.1)
                    square.mul_(0.99).addcmul_(g, g, value=0.01)
                    p.addcdiv_(mean, (square.sqrt() / second).add_(1e-8), value=-group["lr"] / first)


class Scaled(Counting):
    """Adafactor's relative step: the update is scaled by the norms of the parameter and of the update itself."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            decay = 1.0 - math.pow(group["step"], -0.8)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["row"], state["moment"] = torch.zeros_like(p[..., 0]), torch.zeros_like(p)
                update = p.grad.square().add_(1e-30)
                state["row"].lerp_(update.mean(-1), 1 - decay)
                update = p.grad * (state["row"] / state["row"].mean()).rsqrt().unsqueeze(-1)
                update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
                state["moment"].mul_(0.9).add_(update, alpha=0.1)
                p.add_(state["moment"], alpha=-group["lr"] * min(1e-2, 1 / math.sqrt(group["step"])) * 30)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: Counting(p, True),
    "single": lambda p: Counting(p, False),
    "relative": lambda p: Scaled(p, False),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02),
}


def model() -> nn.Module:
    """A matrix and a vector: what more parameters would be is compiled for each of them."""
    return nn.Linear(16, 8)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], seed: int
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    module(torch.randn(32, 16, generator=generator)).square().mean().backward()
    step()
    optimizer.zero_grad()
    held = [v for p in module.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*module.parameters(), *held)]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_step_leaves_the_state_of_eager_mode(tune: Tune, name: str) -> None:
    ours = model()
    theirs, other = twin(ours), twin(ours)
    probe, mine, eager = (OPTIMIZERS[name](m.parameters()) for m in (other, ours, theirs))

    train(other, probe, probe.step, 99)  # with state, as the second step has it
    other(torch.randn(32, 16)).square().mean().backward()
    stored = tune(lambda: probe.step(), ())
    assert bool(stored) is (name != "foreach"), "Inductor has kernels of its own for lists of tensors"
    step = compiled(mine.step)
    for k in range(STEPS):
        got, want = train(ours, mine, step, k), train(theirs, eager, eager.step, k)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4, msg=lambda m, k=k: f"step {k}: {m}")
    assert bool(autotune.counters().hits) is bool(stored)
    assert autotune.counters().fallbacks == 0
