"""Programs of a user, as --compute and --inputs name them."""

from __future__ import annotations

import torch


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), (x > 0)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def counting(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not this one")


def inputs() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
