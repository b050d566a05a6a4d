"""A training step of bias, GELU, residual and layer norm, four times, and a mean squared error, in plain PyTorch.

A transformer has these operators between its matrix products. autotune leaves matrix products to libraries, and this
step has none.

autotune search fusion examples.residual_norms:Training --inputs examples.residual_norms:inputs --train --db norms.db
autotune compare fusion examples.residual_norms:Training --inputs examples.residual_norms:inputs --train --db norms.db
python examples/residual_norms.py --db norms.db
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

ROWS, WIDTH, DEPTH = 2048, 512, 4
STEPS, RATE = 10, 1e-2


class Layer(nn.Module):
    """``layer_norm(x + gelu(x + bias))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias, self.norm = nn.Parameter(torch.zeros(width)), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + F.gelu(x + self.bias))


class Training(nn.Module):
    """From features and targets ``[rows, width]`` to the loss."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))

    def forward(self, features: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.layers(features), wanted)


def inputs(device: str) -> tuple[Tensor, Tensor]:
    """Random features of one step, and their ranks among the features of their row."""
    features = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return features.to(device), (features.argsort(-1).argsort(-1) / WIDTH).to(device)


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
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Train with the kernels that a search has stored, beside eager."
    )
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
