"""Small programs for the command line, each with regions of one kind, in place of a model with many layers.

    autotune search fusion "benchmarks.small_programs:gated_and_wide()" --train --timeout 90 \
        --inputs benchmarks.small_programs:gated_and_wide_inputs --db small.db

``gated_and_wide`` has gated GELUs, wide norms, SegFormer's tokens of an image and NeRF's encoded positions.
``image_decoder`` is the end of a variational autoencoder's decoder, for one image. ``short_convolutions`` has what
surrounds the depthwise convolutions of Mamba, LFM2 and audio models, and ``update_step`` the norms of an optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HALF = torch.bfloat16


class GatedGelu(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).chunk(2, -1)
        return self.second(value * F.gelu(gate))  # type: ignore[no-any-return]


class WideNorm(nn.Module):
    def __init__(self, width: int, wide: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(width, wide), nn.Linear(wide, width), norm(wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))  # type: ignore[no-any-return]


class ReducedTokens(nn.Module):
    """Tokens as an image of 128 x 128 through a strided convolution, and back, as in SegFormer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.reduce, self.norm = nn.Conv2d(width, width, 4, 4), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        image = self.first(x).transpose(1, 2).reshape(len(x), -1, 128, 128)
        return self.last(self.norm(self.reduce(image).flatten(2).transpose(1, 2)))  # type: ignore[no-any-return]


class EncodedPoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(63, 256), nn.Linear(256 + 63, 256)

    def forward(self, p: Tensor) -> Tensor:
        encoded = torch.cat([p] + [f(2.0**k * p) for k in range(10) for f in (torch.sin, torch.cos)], -1)
        return self.second(torch.cat([encoded, F.relu(self.first(encoded))], -1))  # type: ignore[no-any-return]


class Several(nn.Module):
    """Independent modules, one input each."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [part(x) for part, x in zip(self.parts, inputs, strict=True)]


def gated_and_wide() -> nn.Module:
    torch.set_float32_matmul_precision("high")
    gated = [GatedGelu(320, 1280).to(HALF), GatedGelu(640, 2560).to(HALF)]
    wide = [WideNorm(256, 16384, nn.LayerNorm), WideNorm(256, 18432, nn.RMSNorm).to(HALF)]
    return Several(*gated, *wide, ReducedTokens(256).to(HALF), EncodedPoints()).cuda()


def gated_and_wide_inputs() -> tuple[Tensor, ...]:
    shapes = [(8, 4096, 320), (8, 1024, 640), (4096, 256), (4096, 256), (8, 128 * 128, 256), (4096 * 192, 3)]
    types = [HALF, HALF, torch.float32, HALF, HALF, torch.float32]
    return tuple(torch.randn(s, device="cuda", dtype=t) for s, t in zip(shapes, types, strict=True))


class Residual(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, n, 1e-6) for n in (given, width))
        self.convolutions = nn.ModuleList(nn.Conv2d(n, width, 3, padding=1) for n in (given, width))
        self.direct = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            h = convolution(F.silu(norm(h)))
        return self.direct(x) + h  # type: ignore[no-any-return]


def image_decoder() -> nn.Module:
    larger = [nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(n, n, 3, padding=1)) for n in (512, 256)]
    blocks = [Residual(512, 512), larger[0], Residual(512, 256), larger[1], Residual(256, 128)]
    end = [nn.GroupNorm(32, 128, 1e-6), nn.SiLU(), nn.Conv2d(128, 3, 3, padding=1)]
    return nn.Sequential(*blocks, *end).to("cuda", HALF).requires_grad_(False).eval()


def image_decoder_inputs() -> tuple[Tensor, ...]:
    return (torch.randn(1, 512, 256, 256, device="cuda", dtype=HALF),)


class MambaGates(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.first, self.last = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.states = nn.Linear(inner, 80, bias=False)
        self.convolution = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, gate = self.first(x).transpose(1, 2).chunk(2, 1)
        h = F.silu(self.convolution(h)[..., : x.shape[1]])
        return self.last((h * F.silu(gate)).transpose(1, 2)), self.states(h.transpose(1, 2))


class GatedConvolution(nn.Module):
    """A short convolution of LFM2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.convolution = nn.Conv1d(width, width, 3, groups=width, padding=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before, behind, h = self.first(x).transpose(-1, -2).chunk(3, -2)
        h = self.convolution(before * h)[..., : x.shape[1]]
        return self.last((behind * h).transpose(-1, -2).contiguous())  # type: ignore[no-any-return]


def short_convolutions() -> nn.Module:
    wave = nn.Conv1d(512, 512, 7, groups=512, padding=3)
    audio = nn.Sequential(nn.Conv1d(64, 512, 1), wave, nn.GELU(), nn.Conv1d(512, 64, 1))
    return Several(MambaGates(768), GatedConvolution(2048), audio).to("cuda", HALF)


def short_convolutions_inputs() -> tuple[Tensor, ...]:
    shapes = [(8, 2048, 768), (4, 4096, 2048), (16, 64, 8192)]
    return tuple(torch.randn(s, device="cuda", dtype=HALF) for s in shapes)


def update_step(mean: Tensor, gradient: Tensor, *gradients: Tensor) -> list[Tensor]:
    """An orthogonalised update, as of the optimizer Muon, and gradients that are clipped to a common norm."""
    mean = mean.lerp(gradient, 0.05)
    x = gradient.lerp(mean, 0.95).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (2.0315 * a @ a - 4.775 * a) @ x
    norm = torch.stack([g.norm() for g in gradients]).norm()
    scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    return [mean, x, *(g * scale for g in gradients)]


def update_step_inputs() -> tuple[Tensor, ...]:
    shapes = [(2048, 8192), (2048, 8192), (50304, 768), (3072, 768), (768,)]
    return tuple(torch.randn(s, device="cuda") for s in shapes)
