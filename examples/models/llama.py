"""A block of Llama 3 8B in bf16: 2 sequences of 2048 tokens; a training step (mean square loss) and inference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.family import Family, normal


@dataclass(frozen=True)
class Config:
    batch: int = 2
    length: int = 2048
    layers: int = 1
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    dtype: torch.dtype = torch.bfloat16


class RMSNorm(nn.Module):
    """As Llama has it: statistics in float32, the weight in the model's type."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return h.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``x`` [B, S, heads, D]; ``cos`` and ``sin`` are [S, 1, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, self.size = c, c.hidden // c.heads
        self.attention_norm = RMSNorm(c.hidden)
        self.norm = RMSNorm(c.hidden)
        self.query = nn.Linear(c.hidden, c.hidden, bias=False)
        self.key_value = nn.Linear(c.hidden, 2 * c.kv_heads * self.size, bias=False)
        self.out = nn.Linear(c.hidden, c.hidden, bias=False)
        self.gate = nn.Linear(c.hidden, c.inner, bias=False)
        self.up = nn.Linear(c.hidden, c.inner, bias=False)
        self.down = nn.Linear(c.inner, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, hidden = x.shape
        h = self.attention_norm(x)
        q = rotate(self.query(h).view(b, s, self.c.heads, self.size), cos, sin)
        k, v = self.key_value(h).view(b, s, 2, self.c.kv_heads, self.size).unbind(2)
        k = rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, hidden))
        h = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden)
        size = c.hidden // c.heads
        rates = 500000.0 ** (-torch.arange(0, size, 2) / size)
        angles = (torch.arange(c.length)[:, None] * rates).repeat(1, 2)[:, None, :]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [B, S, hidden]."""
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        out: Tensor = self.norm(x)
        return out


class Training(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.llama = Llama(c)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.llama(x).float(), wanted.float())


def build(c: Config, train: bool) -> nn.Module:
    return Training(c) if train else Llama(c)


def batch(c: Config, train: bool, device: str) -> tuple[Tensor, ...]:
    shape = (c.batch, c.length, c.hidden)
    # In training the block's input needs a gradient: a model has other blocks below it.
    x = normal(device, shape, c.dtype).requires_grad_(train)
    return (x, normal(device, shape, c.dtype, seed=1)) if train else (x,)


FAMILY = Family(
    {
        "gpu": Config(),
        "cpu": Config(batch=2, length=8, hidden=32, heads=4, kv_heads=2, inner=64, dtype=torch.float32),
    },
    build,
    batch,
    ("train", "infer"),
)
__getattr__ = FAMILY.target
