"""Diffusion: a transformer that is trained, a UNet that denoises in half precision with channels last."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.user_programs.program import Known, Program, Setup, batches, library, named

# A diffusion transformer in plain torch


def frequencies(t: Tensor, width: int) -> Tensor:
    """Sines and cosines [B, width] of times [B]."""
    scale = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * scale
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Modulated(nn.Module):
    """A layer whose norms are shifted, scaled and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """``x`` [B, T, C], ``c`` [B, C]."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(c)[:, None].chunk(6, dim=-1)
        h = self.norm_1(x) * (1 + scale_1) + shift_1
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(h).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate_1 * self.out(attended)
        h = self.norm_2(x) * (1 + scale_2) + shift_2
        return x + gate_2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """Latents in patches of 2, conditioned on times and classes."""

    def __init__(self, side: int, channels: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.side, self.channels, self.width = side, channels, width
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.02)
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes + 1, width)
        self.layers = nn.ModuleList(Modulated(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, 4 * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """``x`` [B, channels, side, side], ``t`` and ``y`` [B]."""
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        c = self.times(frequencies(t, 256)) + self.classes(y)
        for layer in self.layers:
            h = layer(h, c)
        shift, scale = self.condition(c)[:, None].chunk(2, dim=-1)
        h = self.head(self.norm(h) * (1 + scale) + shift)
        rows = self.side // 2
        h = h.view(-1, rows, rows, 2, 2, self.channels)
        return h.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.channels, self.side, self.side)


def dit(setup: Setup) -> Program:
    """Training of noise prediction in bf16 autocast, with an average of the weights over steps."""
    side, width, heads, layers, count = setup.size((32, 1024, 16, 24, 48), (8, 32, 2, 2, 2))
    with torch.device(setup.device):
        model = DiffusionTransformer(side, 4, width, heads, layers, classes=1000)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.0, fused=True, capturable=setup.capturable
    )
    compiled = setup.compile(model)
    kept = torch.linspace(0.9999, 0.98, 1000, device=setup.device).cumprod(0)
    latents = batches(lambda: torch.randn(count, 4, side, side, device=setup.device))

    def step() -> Tensor:
        x = latents()
        t = torch.randint(0, 1000, (count,), device=setup.device)
        y = torch.randint(0, 1001, (count,), device=setup.device)
        noise, share = torch.randn_like(x), kept[t].view(-1, 1, 1, 1)
        with setup.autocast():
            predicted = compiled(share.sqrt() * x + (1 - share).sqrt() * noise, t, y)
            loss = F.mse_loss(predicted.float(), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss

    return Program(True, step)


# A UNet in plain torch


class Residual(nn.Module):
    """Two convolutions with group norms, between them what the time adds."""

    def __init__(self, given: int, made: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (
            nn.GroupNorm(math.gcd(32, given // 2), given),
            nn.GroupNorm(math.gcd(32, made // 2), made),
        )
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.time = nn.Linear(width, made)
        self.across = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm_1(x))) + self.time(F.silu(c))[:, :, None, None]
        found: Tensor = self.across(x) + self.second(F.silu(self.norm_2(h)))
        return found


class Attended(nn.Module):
    """Attention over pixels and to a text, and a gated product, behind a group norm."""

    def __init__(self, width: int, text: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm, self.before, self.after = (
            nn.GroupNorm(math.gcd(32, width // 2), width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys = nn.ModuleList(nn.Linear(size, width, bias=False) for size in (width, text))
        self.values = nn.ModuleList(nn.Linear(size, width, bias=False) for size in (width, text))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def _attend(self, k: int, x: Tensor, source: Tensor) -> Tensor:
        q, key, value = self.queries[k](x), self.keys[k](source), self.values[k](source)
        q, key, value = (p.unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (q, key, value))
        found: Tensor = self.outs[k](F.scaled_dot_product_attention(q, key, value).transpose(1, 2).flatten(2))
        return found

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """``x`` [B, C, H, W], ``text`` [B, T, D]."""
        height, width = x.shape[2:]
        h = self.before(self.norm(x).permute(0, 2, 3, 1).flatten(1, 2))
        own = self.norms[0](h)
        h = h + self._attend(0, own, own)
        h = h + self._attend(1, self.norms[1](h), text)
        value, gate = self.up(self.norms[2](h)).chunk(2, dim=-1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.after(h).unflatten(1, (height, width)).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """Denoises latents by a text: levels of two residual blocks, attention in all but the last."""

    def __init__(self, width: int, factors: tuple[int, ...], text: int, head: int, channels: int = 4) -> None:
        super().__init__()
        self.width, inner = width, 4 * width
        self.times = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, inner))
        self.into, self.out = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        sizes, now = [width], width

        def level(given: list[int], made: int, change: nn.Module | None, attends: bool) -> nn.ModuleDict:
            parts: dict[str, nn.Module] = {
                "residual": nn.ModuleList(Residual(size, made, inner) for size in given),
                "attention": nn.ModuleList(Attended(made, text, head) for _ in given if attends),
            }
            return nn.ModuleDict({**parts, **({"change": change} if change is not None else {})})

        for k, factor in enumerate(factors):
            made, last = factor * width, k == len(factors) - 1
            change = None if last else nn.Conv2d(made, made, 3, stride=2, padding=1)
            self.down.append(level([now, made], made, change, not last))
            sizes += [made, made] + ([] if last else [made])
            now = made
        self.middle = nn.ModuleList([Residual(now, now, inner), Attended(now, text, head), Residual(now, now, inner)])
        for k, factor in reversed(list(enumerate(factors))):
            made = factor * width
            given = []
            for _ in range(3):
                given.append(now + sizes.pop())
                now = made
            self.up.append(level(given, made, nn.Conv2d(made, made, 3, padding=1) if k else None, k < len(factors) - 1))
        self.norm = nn.GroupNorm(math.gcd(32, width // 2), width)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """``x`` [B, channels, H, W], ``t`` [B], ``text`` [B, T, D]."""
        c = self.times(frequencies(t, self.width).to(x.dtype))
        x = self.into(x)
        kept = [x]
        part: Any
        for part in self.down:
            for k, residual in enumerate(part["residual"]):
                x = residual(x, c)
                if len(part["attention"]):
                    x = part["attention"][k](x, text)
                kept.append(x)
            if "change" in part:
                x = part["change"](x)
                kept.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, c), text), c)
        for part in self.up:
            for k, residual in enumerate(part["residual"]):
                x = residual(torch.cat([x, kept.pop()], dim=1), c)
                if len(part["attention"]):
                    x = part["attention"][k](x, text)
            if "change" in part:
                x = part["change"](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        found: Tensor = self.out(F.silu(self.norm(x)))
        return found


def _denoised(setup: Setup, model: nn.Module, count: int, side: int, text: tuple[int, int], call: Any) -> Program:
    """A step of a sampler: the model for both halves of a batch, guidance, a step along the noise.

    Args:
        count: images; the batch has twice as many.
        text: tokens and width of the condition.
        call: gets the compiled model, latents, times and condition.
    """
    dtype = setup.half(torch.float16)
    model = model.eval().requires_grad_(False).to(setup.device, dtype).to(memory_format=torch.channels_last)
    compiled = setup.compile(model, fullgraph=True)
    latents = torch.randn(count, 4, side, side, device=setup.device, dtype=dtype)
    latents = latents.to(memory_format=torch.channels_last)
    condition = torch.randn(2 * count, *text, device=setup.device, dtype=dtype)
    times = batches(lambda: torch.randint(0, 1000, (1,), device=setup.device))

    def step() -> Tensor:
        with torch.no_grad():
            both = torch.cat([latents, latents])
            without, towards = call(compiled, both, times().expand(2 * count), condition).chunk(2)
            return latents - 0.02 * (without + 7.5 * (towards - without))

    return Program(False, step)


def unet(setup: Setup) -> Program:
    """A step of denoising by a UNet in fp16 with channels last, with guidance."""
    width, factors, text, head = setup.size((320, (1, 2, 4, 4), 768, 40), (16, (1, 2), 16, 8))
    with torch.device(setup.device):
        model = UNet(width, factors, text, head)
    count, side = setup.size((8, 64), (1, 8))
    return _denoised(setup, model, count, side, (setup.size(77, 5), text), lambda f, x, t, c: f(x, t, c))


def unet_diffusers(setup: Setup) -> Program:
    """The same step by the UNet of diffusers."""
    small = {
        "block_out_channels": (16, 32), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "norm_num_groups": 8, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16, "attention_head_dim": 2,
    }  # fmt: skip
    fields = setup.size({"cross_attention_dim": 768, "attention_head_dim": 8}, small)
    models = library("diffusers")
    with torch.device(setup.device):
        model = models.UNet2DConditionModel(sample_size=64, **fields)
    count, side = setup.size((8, 64), (1, 8))
    text = (setup.size(77, 5), fields["cross_attention_dim"])
    return _denoised(setup, model, count, side, text, lambda f, x, t, c: f(x, t, c, return_dict=False)[0])


def flux_diffusers(setup: Setup) -> Program:
    """A step of a diffusion transformer of diffusers with streams of images and of text, in bf16."""
    layers, single, heads, width = setup.size((6, 12, 24, 128), (1, 1, 2, 16))
    fields = {"num_layers": layers, "num_single_layers": single, "num_attention_heads": heads}
    rotary = setup.size((16, 56, 56), (4, 6, 6))
    text, pooled = setup.size((4096, 768), (32, 16))
    models = library("diffusers")
    with torch.device(setup.device):
        model = models.FluxTransformer2DModel(
            **fields, attention_head_dim=width, joint_attention_dim=text, pooled_projection_dim=pooled,
            guidance_embeds=True, axes_dims_rope=rotary,
        )  # fmt: skip
    dtype = setup.half()
    model = model.eval().requires_grad_(False).to(dtype)
    compiled = setup.compile(model, fullgraph=True)
    count, side, tokens = setup.size((1, 64, 512), (1, 4, 8))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=setup.device, dtype=dtype)

    rows = torch.arange(side, device=setup.device)
    places = torch.stack([torch.zeros(side, side, device=setup.device), *torch.meshgrid(rows, rows, indexing="ij")], -1)
    latents, condition, vector = random(count, side * side, 64), random(count, tokens, text), random(count, pooled)
    given = {
        "encoder_hidden_states": condition, "pooled_projections": vector, "img_ids": places.flatten(0, 1).to(dtype),
        "txt_ids": torch.zeros(tokens, 3, device=setup.device, dtype=dtype), "return_dict": False,
        "guidance": torch.full((count,), 3.5, device=setup.device, dtype=dtype),
    }  # fmt: skip
    times = batches(lambda: torch.rand(count, device=setup.device, dtype=dtype))

    def step() -> Tensor:
        with torch.no_grad():
            found: Tensor = latents - 0.02 * compiled(hidden_states=latents, timestep=times(), **given)[0]
        return found

    return Program(False, step)


DIFFUSION = named(
    [
        Known("dit_train", "diffusion transformer of 460M in plain torch, bf16, 48 x 256 tokens", dit),
        Known("unet_infer", "UNet in plain torch, fp16, channels last, 2 x 8 latents of 64", unet),
        Known(
            "unet_diffusers_infer",
            "UNet2DConditionModel, fp16, channels last, 2 x 8 latents",
            unet_diffusers,
            "diffusers",
        ),
        Known(
            "flux_diffusers_infer",
            "FluxTransformer2DModel of 18 layers, bf16, 4096 + 512 tokens",
            flux_diffusers,
            "diffusers",
        ),
    ]
)
"""Programs by name."""
