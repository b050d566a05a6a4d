"""Speech recognition: a Conformer encoder (medium) with a CTC head, inference, 8 utterances of 16 seconds.

Attention has relative positions as in Transformer-XL, written out (the published form: scores of content and of
distance, shifted, added, scaled, softmax), since they do not fit a library's fused attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.family import Family, lengths, normal


@dataclass(frozen=True)
class Config:
    batch: int = 8
    frames: int = 1600
    mel: int = 80
    layers: int = 16
    hidden: int = 256
    heads: int = 4
    kernel: int = 31
    vocabulary: int = 1024
    dtype: torch.dtype = torch.bfloat16

    @property
    def length(self) -> int:
        """Steps after two convolutions of stride 2."""
        return (self.frames // 2) // 2


class FeedForward(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c.hidden)
        self.up, self.down = nn.Linear(c.hidden, 4 * c.hidden), nn.Linear(4 * c.hidden, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(self.norm(x))))
        return out


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.size = c.heads, c.hidden // c.heads
        self.norm = nn.LayerNorm(c.hidden)
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.distance = nn.Linear(c.hidden, c.hidden, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(c.heads, 1, self.size))
        self.distance_bias = nn.Parameter(torch.zeros(c.heads, 1, self.size))
        self.out = nn.Linear(c.hidden, c.hidden)

    def forward(self, x: Tensor, distances: Tensor, valid: Tensor) -> Tensor:
        """``distances`` [2 T - 1, hidden] are the embeddings of T - 1 down to 1 - T; ``valid`` [B, 1, 1, T]."""
        b, t, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        far = self.distance(distances).view(-1, self.heads, self.size).permute(1, 2, 0)
        scores = (q + self.content_bias) @ k.transpose(-1, -2)
        shifted = relative(((q + self.distance_bias) @ far).contiguous())
        scores = (scores + shifted) * (1 / math.sqrt(self.size))
        p = torch.softmax(scores.masked_fill(~valid, -1e4), -1)
        out: Tensor = self.out((p @ v).transpose(1, 2).reshape(b, t, hidden))
        return out


def relative(x: Tensor) -> Tensor:
    """[B, H, T, 2 T - 1], the last dimension a distance, as [B, H, T, T] with element (i, j) at distance i - j.

    A view: the next row starts one element earlier.
    """
    b, h, t, wide = x.shape
    return x.as_strided((b, h, t, t), (h * t * wide, t * wide, wide - 1, 1), t - 1)


class Convolution(nn.Module):
    """Gated pointwise, depthwise over time with batch norm and swish, pointwise."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c.hidden)
        self.gated = nn.Linear(c.hidden, 2 * c.hidden)
        self.depthwise = nn.Conv1d(c.hidden, c.hidden, c.kernel, padding=c.kernel // 2, groups=c.hidden)
        self.batch_norm = nn.BatchNorm1d(c.hidden)
        self.out = nn.Linear(c.hidden, c.hidden)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = F.glu(self.gated(self.norm(x)), -1) * valid
        x = F.silu(self.batch_norm(self.depthwise(x.transpose(1, 2))))
        out: Tensor = self.out(x.transpose(1, 2))
        return out


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.first, self.second = FeedForward(c), FeedForward(c)
        self.attention, self.convolution = Attention(c), Convolution(c)
        self.norm = nn.LayerNorm(c.hidden)

    def forward(self, x: Tensor, distances: Tensor, valid: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, distances, valid[:, None, None, :])
        x = x + self.convolution(x, valid[..., None])
        out: Tensor = self.norm(x + 0.5 * self.second(x))
        return out


class Conformer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.subsample = nn.ModuleList(
            [nn.Conv2d(1, c.hidden, 3, 2, padding=1), nn.Conv2d(c.hidden, c.hidden, 3, 2, padding=1)]
        )
        self.inputs = nn.Linear(c.hidden * (c.mel // 4), c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = nn.Linear(c.hidden, c.vocabulary)
        self.register_buffer("distances", sinusoids(c.length, c.hidden))

    def forward(self, features: Tensor, steps: Tensor) -> Tensor:
        """``features`` [B, frames, mel]; ``steps`` [B] are the lengths after subsampling; log-probabilities."""
        x = features[:, None]
        for convolution in self.subsample:
            x = torch.relu(convolution(x))
        x = self.inputs(x.transpose(1, 2).flatten(2))
        valid = torch.arange(x.shape[1], device=x.device) < steps[:, None]
        for block in self.blocks:
            x = block(x, self.distances, valid)
        return torch.log_softmax(self.head(x).float(), -1)


def sinusoids(length: int, hidden: int) -> Tensor:
    """Embeddings of the distances length - 1 down to 1 - length, [2 length - 1, hidden]."""
    rates = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
    angles = torch.arange(length - 1, -length, -1)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def build(c: Config, train: bool) -> nn.Module:
    return Conformer(c)


def batch(c: Config, train: bool, device: str) -> tuple[Tensor, ...]:
    return normal(device, (c.batch, c.frames, c.mel), c.dtype), lengths(device, c.batch, c.length)


FAMILY = Family(
    {
        "gpu": Config(),
        "cpu": Config(
            batch=2, frames=32, mel=8, layers=1, hidden=16, heads=2, kernel=3, vocabulary=29, dtype=torch.float32
        ),
    },
    build,
    batch,
    ("infer",),
)
__getattr__ = FAMILY.target
