"""CRNN, text recognition from an image: seven convolutions, two bidirectional LSTMs, inference, batch 8.

The LSTMs are loops over time in Python, both directions of a layer side by side in one batched product: torch.nn.LSTM
would be one opaque call of cuDNN (and torch.compile breaks the graph at it), and leave nothing to stitch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.family import Family, normal


@dataclass(frozen=True)
class Config:
    batch: int = 8
    height: int = 32
    steps: int = 26
    channels: int = 64
    hidden: int = 256
    classes: int = 37
    dtype: torch.dtype = torch.float16

    @property
    def width(self) -> int:
        """Of the image: 100 at 26 steps."""
        return 4 * (self.steps - 1)


class Convolutions(nn.Module):
    """[B, 1, 32, W] to [B, 8 channels, 1, W / 4 + 1]."""

    def __init__(self, n: int) -> None:
        super().__init__()
        widths = [1, n, 2 * n, 4 * n, 4 * n, 8 * n, 8 * n, 8 * n]
        shapes = [(3, 1)] * 6 + [(2, 0)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, k, padding=p) for a, b, (k, p) in zip(widths[:-1], widths[1:], shapes, strict=True)
        )
        self.norms = nn.ModuleDict({str(k): nn.BatchNorm2d(widths[k + 1]) for k in (2, 4, 6)})

    def forward(self, x: Tensor) -> Tensor:
        for k, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if str(k) in self.norms:
                x = self.norms[str(k)](x)
            x = torch.relu(x)
            if k in (0, 1):
                x = F.max_pool2d(x, 2, 2)
            elif k in (3, 5):
                x = F.max_pool2d(x, (2, 2), (2, 1), (0, 1))
        return x


class BiLSTM(nn.Module):
    """Both directions of a layer, then a linear map of their states side by side."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inputs = nn.Linear(inputs, 8 * hidden)
        self.state = nn.Parameter(torch.randn(2, hidden, 4 * hidden) * hidden**-0.5)
        self.out = nn.Linear(2 * hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, inputs] to [T, B, outputs]."""
        _, batch, _ = x.shape
        forth, back = self.inputs(x).chunk(2, 2)
        projected = torch.stack([forth, back.flip(0)], 1)  # [T, 2, B, 4 hidden]
        h = c = x.new_zeros(2, batch, self.hidden)
        states = []
        for step in projected.unbind(0):
            i, f, g, o = (step + torch.bmm(h, self.state)).chunk(4, 2)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        ends = torch.stack([h[0] for h in states]), torch.stack([h[1] for h in reversed(states)])
        out: Tensor = self.out(torch.cat(ends, 2))
        return out


class CRNN(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.features = Convolutions(c.channels)
        self.first = BiLSTM(8 * c.channels, c.hidden, c.hidden)
        self.second = BiLSTM(c.hidden, c.hidden, c.classes)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 1, 32, W] to log-probabilities [T, B, classes]."""
        x = self.features(image).squeeze(2).permute(2, 0, 1)
        return torch.log_softmax(self.second(self.first(x)).float(), -1)


def build(c: Config, train: bool) -> nn.Module:
    return CRNN(c)


def batch(c: Config, train: bool, device: str) -> tuple[Tensor, ...]:
    return (normal(device, (c.batch, 1, c.height, c.width), c.dtype),)


FAMILY = Family(
    {"gpu": Config(), "cpu": Config(batch=2, steps=5, channels=4, hidden=8, dtype=torch.float32)},
    build,
    batch,
    ("infer",),
)
__getattr__ = FAMILY.target
