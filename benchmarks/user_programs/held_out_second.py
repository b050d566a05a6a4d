"""A second set of programs that autotune was not developed with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.user_programs.held_out_second_language import dpo, moe, titan
from benchmarks.user_programs.images import classified, timm_model
from benchmarks.user_programs.language import from_config, trained
from benchmarks.user_programs.program import Known, Program, Setup, batches, fitted, lengths, library, named

# Images and rays


class Field(nn.Module):
    """Colour and density of points: encoded positions, a perceptron with a skip, encoded directions."""

    def __init__(self, width: int, depth: int, skip: int) -> None:
        super().__init__()
        self.skip = skip
        given = [63] + [width + 63 * (k == skip) for k in range(1, depth)]
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in given)
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    @staticmethod
    def encoded(x: Tensor, count: int) -> Tensor:
        """``x`` and its sines and cosines by ``count`` frequencies."""
        return torch.cat([x] + [f(2.0**k * x) for k in range(count) for f in (torch.sin, torch.cos)], dim=-1)

    def forward(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """``points``, ``directions`` [rays, samples, 3]; returns colours [..., 3] and densities [...]."""
        h = given = self.encoded(points, 10)
        for k, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([given, h], dim=-1) if k == self.skip else h))
        seen = F.relu(self.view(torch.cat([self.feature(h), self.encoded(directions, 4)], dim=-1)))
        return torch.sigmoid(self.colour(seen)), self.density(h).squeeze(-1)


def nerf(setup: Setup) -> Program:
    """NeRF in fp32 with TF32: samples drawn by strata, volume rendering, Adam."""
    torch.set_float32_matmul_precision("high")
    rays, samples = setup.size((4096, 192), (8, 12))
    near, far = 2.0, 6.0
    with torch.device(setup.device):
        model = Field(*setup.size((256, 8, 5), (32, 4, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999), capturable=setup.capturable)

    def render(origins: Tensor, directions: Tensor) -> Tensor:
        depths = torch.linspace(near, far, samples, device=origins.device).expand(origins.shape[0], samples)
        middle = 0.5 * (depths[:, 1:] + depths[:, :-1])
        upper, lower = torch.cat([middle, depths[:, -1:]], -1), torch.cat([depths[:, :1], middle], -1)
        depths = lower + (upper - lower) * torch.rand_like(depths)
        points = origins[:, None] + directions[:, None] * depths[..., None]
        unit = directions / directions.norm(dim=-1, keepdim=True)
        colours, densities = model(points, unit[:, None].expand(points.shape))

        gaps = torch.cat([depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1e10)], dim=-1)
        gaps = gaps * directions.norm(dim=-1, keepdim=True)
        alpha = 1.0 - torch.exp(-F.relu(densities) * gaps)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], dim=-1), dim=-1)
        weights = alpha * passed[:, :-1]
        found: Tensor = (weights[..., None] * colours).sum(dim=1) + (1.0 - weights.sum(dim=1, keepdim=True))
        return found

    compiled = setup.compile(render)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        directions = torch.randn(rays, 3, device=setup.device)
        origins = -4.0 * F.normalize(directions, dim=-1) + 0.1 * torch.randn_like(directions)
        return origins, directions, torch.rand(rays, 3, device=setup.device)

    def loss_of(origins: Tensor, directions: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(compiled(origins, directions), wanted)

    return fitted(loss_of, batches(batch), optimizer)


class DoubleConv(nn.Sequential):
    """Two convolutions, each with a batch norm and a ReLU."""

    def __init__(self, given: int, made: int) -> None:
        parts: list[nn.Module] = []
        for size in (given, made):
            parts += [nn.Conv2d(size, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
        super().__init__(*parts)


class UNet(nn.Module):
    """The classic U-Net."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.into, self.pool = DoubleConv(3, widths[0]), nn.MaxPool2d(2)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(DoubleConv(given, made) for given, made in pairs)
        self.across = nn.ModuleList(nn.ConvTranspose2d(deep, made, 2, 2) for made, deep in reversed(pairs))
        self.up = nn.ModuleList(DoubleConv(deep, made) for made, deep in reversed(pairs))
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, 3, H, W]."""
        kept = [self.into(x)]
        for part in self.down:
            kept.append(part(self.pool(kept[-1])))
        x = kept.pop()
        for across, part in zip(self.across, self.up, strict=True):
            x = part(torch.cat([kept.pop(), across(x)], dim=1))
        found: Tensor = self.out(x)
        return found


def segmentation(setup: Setup) -> Program:
    """Segmentation of images, bf16: model, cross-entropy and Dice loss in one compiled function, RMSprop."""
    count, side, classes = setup.size((16, 256, 21), (2, 32, 5))
    with torch.device(setup.device):
        model = UNet(classes, setup.size((64, 128, 256, 512, 1024), (8, 16, 32)))
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.9, capturable=setup.capturable
    )

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        with setup.autocast():
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        shares = logits.float().softmax(dim=1)
        wanted = F.one_hot(labels, classes).permute(0, 3, 1, 2).float()
        both, all_ = (shares * wanted).sum(dim=(2, 3)), (shares + wanted).sum(dim=(2, 3))
        found: Tensor = loss + 1 - ((2 * both + 1e-6) / (all_ + 1e-6)).mean()
        return found

    compiled = setup.compile(loss_of)

    def batch() -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, classes, (count, side, side), device=setup.device)
        return torch.rand(count, 3, side, side, device=setup.device), labels

    return fitted(compiled, batches(batch), optimizer, clip=1.0)


def efficientnet(setup: Setup) -> Program:
    """EfficientNet-B3, fp16 with a gradient scaler, channels last, dropout, stochastic depth."""
    model = timm_model(setup, "efficientnet_b3", "test_efficientnet", drop_rate=0.3, drop_path_rate=0.2)
    return classified(setup, model, *setup.size((96, 288), (2, 64)), scaled=True, last=True)


def mae(setup: Setup) -> Program:
    """Masked autoencoder of images by ViT-B: three of four patches are hidden at random."""
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "decoder_hidden_size": 16}
    small |= {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}
    config = library("transformers").ViTMAEConfig(norm_pix_loss=True, **setup.size({}, small))
    model = from_config(setup, "AutoModelForPreTraining", config, torch.float32)
    count, side = setup.size(64, 2), config.image_size

    def batch() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(count, 3, side, side, device=setup.device)}

    return trained(setup, model, batch, 1.5e-4, autocast=True)


# Speech


class Convolved(nn.Module):
    """The convolution of a Conformer's layer: gated, depthwise, with a batch norm."""

    def __init__(self, width: int, size: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.deep = nn.Conv1d(width, width, size, padding=size // 2, groups=width)
        self.batch_norm, self.out = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` [B, T, C], ``mask`` [B, T]: true for frames of sound."""
        x = F.glu(self.into(self.norm(x).transpose(1, 2)), dim=1).masked_fill(~mask[:, None], 0.0)
        found: Tensor = self.dropout(self.out(F.silu(self.batch_norm(self.deep(x)))).transpose(1, 2))
        return found


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a convolution, half a perceptron, a norm."""

    def __init__(self, width: int, heads: int, size: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.first, self.second = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(dropout),
                nn.Linear(4 * width, width), nn.Dropout(dropout),
            )
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.last = nn.Dropout(dropout), nn.LayerNorm(width)
        self.convolution = Convolved(width, size, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` [B, T, C], ``mask`` [B, T]."""
        x = x + 0.5 * self.first(x)
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], dropout_p=rate)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        x = x + self.convolution(x, mask)
        found: Tensor = self.last(x + 0.5 * self.second(x))
        return found


class Conformer(nn.Module):
    """An encoder of sound: two strided convolutions, sinusoidal positions, layers, scores of symbols."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, size: int) -> None:
        super().__init__()
        self.sampled = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, padding=1), nn.ReLU()
        )
        self.into, self.dropout = nn.Linear(20 * width, width), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads, size, 0.1) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, sound: Tensor, frames: Tensor) -> Tensor:
        """``sound`` [B, T, 80], ``frames`` [B] of a quarter each; returns logarithms of probabilities [T / 4, B, V]."""
        x = self.into(self.sampled(sound.unsqueeze(1)).transpose(1, 2).flatten(2))
        at = torch.arange(x.shape[1], device=x.device)
        rates = torch.exp(torch.arange(0, x.shape[2], 2, device=x.device) * (-math.log(10_000.0) / x.shape[2]))
        angles = at[:, None] * rates
        x = self.dropout(x + torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))
        mask = at < frames[:, None]
        for block in self.blocks:
            x = block(x, mask)
        found: Tensor = self.head(x).float().log_softmax(dim=-1).transpose(0, 1)
        return found


def conformer(setup: Setup) -> Program:
    """Recognition of speech, bf16: padded sound of 80 bands, CTC loss outside the compiled model, AdamW."""
    count, length, vocabulary, symbols = setup.size((16, 1600, 1024, 60), (2, 64, 16, 4))
    with torch.device(setup.device):
        model = Conformer(vocabulary, *setup.size((512, 8, 12, 31), (32, 2, 2, 7)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), capturable=setup.capturable)
    compiled = setup.compile(model)

    def batch() -> tuple[Tensor, ...]:
        sound = torch.randn(count, length, 80, device=setup.device)
        frames = torch.tensor(lengths(count, length // 8, length // 4), device=setup.device)
        spoken = torch.tensor(lengths(count, symbols // 2, symbols), device=setup.device)
        return sound, frames, torch.randint(1, vocabulary, (count, symbols), device=setup.device), spoken

    def loss_of(sound: Tensor, frames: Tensor, texts: Tensor, spoken: Tensor) -> Tensor:
        with setup.autocast():
            scores = compiled(sound, frames)
        return F.ctc_loss(scores, texts, frames, spoken, zero_infinity=True)

    return fitted(loss_of, batches(batch), optimizer, clip=5.0)


HELD_OUT_SECOND = named(
    [
        Known("moe_train", "GPT of 0.5B, 8 experts, 2 a token, bf16 autocast, 8 x 1024", moe),
        Known("dpo_train", "Llama of 0.5B, DPO, bf16, right-padded, 4 pairs x 1024", dpo, "transformers"),
        Known("nerf_train", "NeRF, TF32, 4096 rays x 192 samples", nerf),
        Known("segmentation_train", "2D U-Net, bf16, 16 x 256 x 256 pixels, 21 classes", segmentation),
        Known("efficientnet_train", "EfficientNet-B3, fp16, channels last, 96 x 288 pixels", efficientnet, "timm"),
        Known("mae_train", "ViT-B masked autoencoder, bf16 autocast, 64 images", mae, "transformers"),
        Known("conformer_train", "Conformer of 12 layers with CTC, bf16 autocast, 16 x 1600 frames", conformer),
        Known("titan_train", "Llama in plain torch, layers compiled one by one, 4 x 2048", titan),
    ]
)
"""Programs by name."""
