"""Models of images by timm: training by automatic mixed precision, and a transformer at high resolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.user_programs.program import Known, Program, Setup, batches, decayed, library, named


def timm_model(setup: Setup, name: str, tiny: str, **fields: Any) -> nn.Module:
    """A model of timm with random weights; ``tiny`` is the name of the small version's."""
    timm = library("timm")
    with torch.device(setup.device):
        model: nn.Module = timm.create_model(setup.size(name, tiny), pretrained=False, **fields)
    return model


def classified(setup: Setup, model: nn.Module, count: int, side: int, *, scaled: bool, last: bool) -> Program:
    """Training of a classifier as timm's script has it: AMP, label smoothing, clipping, AdamW.

    Args:
        scaled: fp16 by a gradient scaler, else bf16.
        last: images and weights have their channels last.
    """
    layout = torch.channels_last if last else torch.contiguous_format
    model = model.train().to(memory_format=layout)
    optimizer = torch.optim.AdamW(decayed(model, 0.05), lr=1e-4, fused=True, capturable=setup.capturable)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = setup.scaler() if scaled else None
    compiled = setup.compile(model)

    def batch() -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, side, side, device=setup.device)
        return images.to(memory_format=layout), torch.randint(0, 1000, (count,), device=setup.device)

    following = batches(batch)

    def step() -> Tensor:
        images, labels = following()
        with setup.autocast(torch.float16 if scaled else torch.bfloat16):
            loss = criterion(compiled(images), labels)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        found: Tensor = loss
        return found

    return Program(True, step)


def swin(setup: Setup) -> Program:
    """Swin-B, fp16 with a gradient scaler, stochastic depth."""
    small = {"depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 2, 4), "img_size": 64, "window_size": 2}
    name = "swin_base_patch4_window7_224"
    model = timm_model(setup, name, "swin_tiny_patch4_window7_224", **setup.size({"drop_path_rate": 0.2}, small))
    return classified(setup, model, *setup.size((64, 224), (2, 64)), scaled=True, last=False)


def convnext(setup: Setup) -> Program:
    """ConvNeXt-B, bf16, channels last, stochastic depth."""
    small = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
    model = timm_model(setup, "convnext_base", "convnext_tiny", **setup.size({"drop_path_rate": 0.2}, small))
    return classified(setup, model, *setup.size((64, 224), (2, 64)), scaled=False, last=True)


def vit_train(setup: Setup) -> Program:
    """ViT-B at 384 pixels, bf16, stochastic depth."""
    small = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64}
    model = timm_model(
        setup, "vit_base_patch16_384", "vit_tiny_patch16_384", **setup.size({"drop_path_rate": 0.1}, small)
    )
    return classified(setup, model, *setup.size((48, 384), (2, 64)), scaled=False, last=False)


def vit_features(setup: Setup) -> Program:
    """Features of images at 518 pixels by a ViT-B with patches of 14, bf16."""
    small = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 56}
    name = "vit_base_patch14_dinov2"
    model = timm_model(setup, name, "vit_small_patch14_dinov2", num_classes=0, **setup.size({"img_size": 518}, small))
    model = model.eval().to(dtype=setup.half())
    compiled = setup.compile(model)
    count, side = setup.size((32, 518), (2, 56))
    following = batches(lambda: torch.randn(count, 3, side, side, device=setup.device, dtype=setup.half()))

    def step() -> Tensor:
        with torch.inference_mode():
            found: Tensor = compiled(following())
        return found

    return Program(False, step)


IMAGES = named(
    [
        Known("swin_train", "Swin-B, fp16 by GradScaler, 64 images", swin, "timm"),
        Known("convnext_train", "ConvNeXt-B, bf16, channels last, 64 images", convnext, "timm"),
        Known("vit_384_train", "ViT-B at 384 pixels, bf16, 48 images", vit_train, "timm"),
        Known("vit_518_infer", "ViT-B at 518 pixels, bf16, 32 images", vit_features, "timm"),
    ]
)
"""Programs by name."""
