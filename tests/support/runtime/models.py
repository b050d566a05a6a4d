"""Models that the package has never seen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two linear layers with a normalisation and a softmax: two regions forward, several backward."""

    def __init__(self, width: int = 48, hidden: int = 96) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.two(F.gelu(self.norm(self.one(x)))), -1)


class Statistics(nn.Module):
    """Batch normalisation in training: it writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.two(torch.relu(self.norm(self.one(x)))), -1)


def assert_same_step(
    compiled: Callable[..., Any], model: nn.Module, reference: nn.Module, x: torch.Tensor, tolerance: float = 1e-5
) -> None:
    """Forward, backward, gradients of parameters and input, and buffers agree with the eager reference."""
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = compiled(ours), reference(theirs)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    grad = torch.randn_like(want)
    got.backward(grad)
    want.backward(grad)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, atol=tolerance, rtol=tolerance)
    for mine, other in zip(_tensors(model), _tensors(reference), strict=True):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, other.grad, atol=tolerance, rtol=tolerance)


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
