"""A decoder's feed-forward block for one token, its weights kept as bytes.

    autotune plan fusion examples.decode:block --inputs examples.decode:inputs
    autotune search fusion examples.decode:block --inputs examples.decode:inputs --device cuda:0

A product of one vector moves each weight once and does nothing else for long, so it counts among the memory-intensive
operators. It may share a kernel with its neighbours: the bytes become numbers where they are multiplied, and the gate
and its two products are one kernel. Library products need the weights as numbers, in memory. ``$DECODE_BITS``
is 8, or 16 for weights that are plain bf16.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER = 4096, 14336  # Llama 3, 8 billion parameters


class Bytes(nn.Module):
    """A linear map whose weight is int8 with a scale a row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("scale", torch.full((outputs, 1), inputs**-0.5 / 73, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def linear(inputs: int, outputs: int) -> nn.Module:
    if os.environ.get("DECODE_BITS", "8") == "8":
        return Bytes(inputs, outputs)
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)


class Block(nn.Module):
    """RMS norm, SwiGLU, residual: [1, hidden] to [1, hidden], bf16."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, dtype=torch.bfloat16)
        self.gate, self.up, self.down = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


@functools.cache
def _block() -> Block:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        return Block(HIDDEN, INNER).requires_grad_(False)


def __getattr__(name: str) -> Block:
    """``block``, made when it is asked for, on the GPU where there is one."""
    if name != "block":
        raise AttributeError(f"no attribute {name!r}")
    return _block()


def inputs(device: str) -> tuple[Tensor]:
    return (torch.randn(1, HIDDEN, device=device, dtype=torch.bfloat16),)
