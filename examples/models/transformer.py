"""The Transformer of "Attention Is All You Need" (base): one training step of 4096 target tokens.

64 pairs of sentences of 64 tokens; layer norm after each residual, as in the paper; label smoothing 0.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.family import Family, lengths, tokens

PAD = 0


@dataclass(frozen=True)
class Config:
    batch: int = 64
    length: int = 64
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    inner: int = 2048
    vocabulary: int = 32768
    dropout: float = 0.1
    smoothing: float = 0.1
    dtype: torch.dtype = torch.bfloat16


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.p = c.heads, c.dropout
        self.query = nn.Linear(c.hidden, c.hidden)
        self.key_value = nn.Linear(c.hidden, 2 * c.hidden)
        self.out = nn.Linear(c.hidden, c.hidden)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Of ``x`` [B, S, hidden] to ``memory`` [B, T, hidden]; ``mask`` [B, 1, S, T] is added to the scores."""
        b, s, hidden = x.shape
        q = self.query(x).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(memory).view(b, memory.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=causal)
        result: Tensor = self.out(out.transpose(1, 2).reshape(b, s, hidden))
        return result


class FeedForward(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(c.hidden, c.inner), nn.Linear(c.inner, c.hidden)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(torch.relu(self.up(x))))
        return out


class Layer(nn.Module):
    """An encoder's layer, or with ``cross`` a decoder's."""

    def __init__(self, c: Config, cross: bool) -> None:
        super().__init__()
        self.attention = Attention(c)
        self.cross = Attention(c) if cross else None
        self.feed = FeedForward(c)
        self.norms = nn.ModuleList(nn.LayerNorm(c.hidden) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, memory: Tensor | None, mask: Tensor) -> Tensor:
        if self.cross is None:
            x = self.norms[0](x + self.dropout(self.attention(x, x, mask, False)))
        else:
            assert memory is not None
            x = self.norms[0](x + self.dropout(self.attention(x, x, None, True)))
            x = self.norms[1](x + self.dropout(self.cross(x, memory, mask, False)))
        out: Tensor = self.norms[-1](x + self.dropout(self.feed(x)))
        return out


class Transformer(nn.Module):
    """Translation loss; source, target and output embeddings are one matrix."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embedding = nn.Embedding(c.vocabulary, c.hidden)
        nn.init.normal_(self.embedding.weight, std=c.hidden**-0.5)
        self.encoder = nn.ModuleList(Layer(c, False) for _ in range(c.layers))
        self.decoder = nn.ModuleList(Layer(c, True) for _ in range(c.layers))
        self.dropout = nn.Dropout(c.dropout)
        self.register_buffer("position", sinusoids(c.length, c.hidden))

    def embed(self, ids: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.embedding(ids) * math.sqrt(self.c.hidden) + self.position)
        return x

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """``source``, ``target`` (shifted right) and ``labels`` are [B, S]; padding is 0 and at the end."""
        memory = self.embed(source)
        mask = torch.zeros_like(source, dtype=memory.dtype).masked_fill(source == PAD, -1e4)
        mask = mask[:, None, None, :].expand(-1, 1, source.shape[1], -1)
        for layer in self.encoder:
            memory = layer(memory, None, mask)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten(), ignore_index=PAD, label_smoothing=self.c.smoothing)


def sinusoids(length: int, hidden: int) -> Tensor:
    """Sines in the first half of the columns and cosines in the second, [length, hidden]."""
    rates = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def build(c: Config, train: bool) -> nn.Module:
    return Transformer(c)


def batch(c: Config, train: bool, device: str) -> tuple[Tensor, ...]:
    source, target, labels = (tokens(device, (c.batch, c.length), c.vocabulary, seed=k) for k in range(3))
    inside = torch.arange(c.length, device=device) < lengths(device, c.batch, c.length)[:, None]
    return source * inside, target, labels


FAMILY = Family(
    {
        "gpu": Config(),
        "cpu": Config(batch=2, length=8, layers=1, hidden=32, heads=4, inner=64, vocabulary=97, dtype=torch.float32),
    },
    build,
    batch,
    ("train",),
)
__getattr__ = FAMILY.target
