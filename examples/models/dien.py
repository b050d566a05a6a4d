"""DIEN, the deep interest evolution network for click-through rates: a training step and inference, batch 256.

A GRU over the history, attention to the target item, a second GRU whose update gate the attention scales (AUGRU), and
a small network with Dice. Both recurrences are loops over 32 steps in Python, which compilers unroll: each step is a
small matrix product and a cell. Sizes (embeddings of 18, hidden size 36) are the authors'; they have 100 steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.family import Family, lengths, normal, tokens


@dataclass(frozen=True)
class Config:
    batch: int = 256
    steps: int = 32
    items: int = 100_000
    categories: int = 1_000
    users: int = 100_000
    embedding: int = 18
    dtype: torch.dtype = torch.float32

    @property
    def hidden(self) -> int:
        return 2 * self.embedding


class GRU(nn.Module):
    """A GRU cell by cell; with ``attention`` its update gate is scaled by a weight for each step (AUGRU)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(hidden, 3 * hidden)
        self.state = nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor, attention: Tensor | None = None) -> list[Tensor]:
        """``x`` is [T, B, hidden], ``attention`` [T, B, 1]; the states, T of [B, hidden]."""
        steps = self.inputs(x).unbind(0)
        weights = [None] * len(steps) if attention is None else attention.unbind(0)
        h = torch.zeros_like(x[0])
        states = []
        for step, weight in zip(steps, weights, strict=True):
            xr, xu, xn = step.chunk(3, 1)
            hr, hu, hn = self.state(h).chunk(3, 1)
            update = torch.sigmoid(xu + hu)
            if weight is not None:
                update = update * weight
            new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
            h = (1 - update) * h + update * new
            states.append(h)
        return states


class Dice(nn.Module):
    """The data-adaptive activation of DIN: a gate from the batch-normalised input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-9, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.alpha * x


def network(*widths: int) -> nn.Sequential:
    """Linear layers with Dice between them."""
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += ([Dice(a)] if k else []) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


class DIEN(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.user = nn.Embedding(c.users, c.embedding)
        self.item = nn.Embedding(c.items, c.embedding)
        self.category = nn.Embedding(c.categories, c.embedding)
        self.interest = GRU(c.hidden)
        self.query = nn.Linear(c.hidden, c.hidden, bias=False)
        self.evolution = GRU(c.hidden)
        self.head = network(c.embedding + 4 * c.hidden, 200, 80, 2)
        self.clicks = nn.Sequential(nn.Linear(2 * c.hidden, 100), nn.Sigmoid(), nn.Linear(100, 50), nn.Sigmoid(),
                                    nn.Linear(50, 1))  # fmt: skip

    def embed(self, items: Tensor, categories: Tensor) -> Tensor:
        return torch.cat([self.item(items), self.category(categories)], -1)

    def forward(
        self, user: Tensor, item: Tensor, category: Tensor, items: Tensor, categories: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``user``, ``item`` and ``category`` are [B]; the history is [T, B], ``valid`` 1 where there is one.

        Returns:
            Logits [B, 2]; the history's embeddings and the first GRU's states, each [T, B, hidden].
        """
        target, history = self.embed(item, category), self.embed(items, categories)
        states = torch.stack(self.interest(history))
        scores = (self.query(target) * states).sum(-1, keepdim=True)
        scores = scores.masked_fill(valid[..., None] == 0, -1e9)
        evolved = self.evolution(states, torch.softmax(scores, 0))[-1]
        total = (history * valid[..., None]).sum(0)
        features = torch.cat([self.user(user), target, total, target * total, evolved], 1)
        return self.head(features), history, states


class Training(nn.Module):
    """The loss of the click plus the auxiliary loss: each state should score the next item above a random one."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.dien = DIEN(c)

    def forward(
        self,
        user: Tensor,
        item: Tensor,
        category: Tensor,
        items: Tensor,
        categories: Tensor,
        valid: Tensor,
        other_items: Tensor,
        other_categories: Tensor,
        clicked: Tensor,
    ) -> Tensor:
        logits, history, states = self.dien(user, item, category, items, categories, valid)
        other = self.dien.embed(other_items, other_categories)
        real = self.dien.clicks(torch.cat([states[:-1], history[1:]], -1))
        fake = self.dien.clicks(torch.cat([states[:-1], other[1:]], -1))
        auxiliary = -(F.logsigmoid(real) + F.logsigmoid(-fake)) * valid[1:, :, None]
        return F.cross_entropy(logits, clicked) + auxiliary.mean()


class Inference(nn.Module):
    """The probability of a click, [B]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.dien = DIEN(c)

    def forward(self, *features: Tensor) -> Tensor:
        return torch.softmax(self.dien(*features)[0], -1)[:, 1]


def build(c: Config, train: bool) -> nn.Module:
    return Training(c) if train else Inference(c)


def batch(c: Config, train: bool, device: str) -> tuple[Tensor, ...]:
    one, many = (c.batch,), (c.steps, c.batch)
    inside = torch.arange(c.steps, device=device)[:, None] < lengths(device, c.batch, c.steps)
    features = (
        tokens(device, one, c.users),
        tokens(device, one, c.items, seed=1),
        tokens(device, one, c.categories, seed=2),
        tokens(device, many, c.items, seed=3),
        tokens(device, many, c.categories, seed=4),
        inside.to(c.dtype),
    )
    if not train:
        return features
    clicked = (normal(device, one, c.dtype, seed=7) > 0).long()
    return (*features, tokens(device, many, c.items, seed=5), tokens(device, many, c.categories, seed=6), clicked)


FAMILY = Family(
    {"gpu": Config(), "cpu": Config(batch=6, steps=4, items=50, categories=20, users=30, embedding=4)},
    build,
    batch,
    ("train", "infer"),
)
__getattr__ = FAMILY.target
