"""A training step that activations, normalisations and the loss take most of, in plain PyTorch: a mixture density
network. It predicts a distribution of a number, a weighted sum of Gaussians, in place of the number alone.

autotune search fusion examples.mixture_density:Training --inputs examples.mixture_density:inputs --train --db mdn.db
autotune compare fusion examples.mixture_density:Training --inputs examples.mixture_density:inputs --train --db mdn.db
python examples/mixture_density.py --db mdn.db
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, FEATURES, WIDTH, GAUSSIANS = 16384, 8, 32, 32
STEPS, RATE = 20, 1e-3


class Training(nn.Module):
    """From features ``[rows, 8]`` and numbers ``[rows, 1]`` to the negative logarithm of their likelihood.

    After C. M. Bishop, "Mixture density networks" (1994).
    """

    def __init__(self, width: int = WIDTH, gaussians: int = GAUSSIANS) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, 3 * gaussians)

    def forward(self, features: Tensor, wanted: Tensor) -> Tensor:
        weight, mean, log_deviation = self.head(self.body(features)).chunk(3, dim=-1)
        away = (wanted - mean) * torch.exp(-log_deviation)
        return -torch.logsumexp(F.log_softmax(weight, -1) - log_deviation - 0.5 * away.square(), -1).mean()


def inputs(device: str) -> tuple[Tensor, Tensor]:
    """Random features of one step, and numbers that are one of two functions of them."""
    made = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, FEATURES, generator=made)
    sign = torch.randint(0, 2, (ROWS, 1), generator=made) * 2.0 - 1.0
    wanted = sign * features[:, :1].sin() + 0.1 * torch.randn(ROWS, 1, generator=made)
    return features.to(device), wanted.to(device)


def train(model: nn.Module, step: Callable[..., Tensor], given: Sequence[Tensor]) -> list[float]:
    """The losses of a few steps; ``step`` is the model, compiled or not."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train with the kernels that a search has stored, beside eager.")
    parser.add_argument("--db", help="database URL or SQLite file (default: $AUTOTUNE_DB, else the user's own)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    args = parser.parse_args(argv)
    if args.db:
        os.environ["AUTOTUNE_DB"] = args.db  # where the backend looks

    import autotune
    from autotune.device import resolve_device

    device = resolve_device(args.device)
    torch.manual_seed(0)
    model, given = Training().to(device), inputs(device)
    twin = deepcopy(model)
    losses = train(model, torch.compile(model, backend="autotune"), given)
    eager = train(twin, twin, given)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(eager), rtol=1e-3, atol=0.0)
    print(f"{STEPS} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}, in eager {eager[0]:.4f} to {eager[-1]:.4f}")
    print(f"counters: {autotune.counters()}")
    counted = autotune.counters()
    if counted.misses and not counted.hits:
        print("nothing was found in the database: search it first, as this file's first lines say", file=sys.stderr)
        return 1
    if not counted.hits:
        print("Inductor runs all of it, as the search found that to be faster: `autotune compare` tells more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
