"""Convolutions with their channels last, on a GPU: the strides that the graph foretells are those that cuDNN gives.

    python tests/gpu/layout_check.py [--device cuda:0]

Runs captured graphs of convolutional modules operator by operator, in inference and training, and compares strides with
the graph's and eager mode's, where an extent is more than 1, and results with eager mode's; gradients in float32 only,
since many of these are sums that batch norm makes nothing of, all rounding in short types. Exit code 1 if something is
wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tests.support.node_strides import checking_backend, strides_apart

CONVOLUTION = torch.ops.aten.convolution.default


def stack(channels: tuple[int, ...], kernel: int = 3, norm: bool = True, **options: Any) -> nn.Module:
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(channels):
        parts += [nn.Conv2d(a, b, kernel, padding=kernel // 2, **options)]
        parts += [nn.BatchNorm2d(b), nn.ReLU()] if norm else [nn.GELU()]
    return nn.Sequential(*parts)


def cases(device: str) -> dict[str, tuple[nn.Module, Tensor]]:
    def image(channels: int, size: int = 32, batch: int = 8) -> Tensor:
        return torch.randn(batch, channels, size, size, device=device)

    found = {
        "batch norm": (stack((3, 64, 128, 128)), image(3)),
        "one channel": (stack((1, 256, 256), norm=False, stride=2), image(1, 64)),
        "pooled": (nn.Sequential(stack((16, 96)), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96 * 256, 10)), image(16)),
        "depthwise": (nn.Sequential(stack((64, 128)), stack((128, 128), groups=128)), image(64)),
        "pixels": (nn.Sequential(stack((64, 128), 1), stack((128, 256), 1)), image(64)),
        "upwards": (nn.Sequential(stack((64, 128)), nn.ConvTranspose2d(128, 96, 2, 2), nn.SiLU()), image(64)),
    }
    found |= {
        "patches": (nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.Flatten(2), nn.Linear(64, 32)), image(3)),
        "patches and channels": (nn.Sequential(nn.Conv2d(3, 64, 4, 4), stack((64, 128), norm=False)), image(3, 33)),
    }

    class Tokens(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x.transpose(1, 2)).transpose(1, 2)

    tokens = Tokens(nn.Linear(196, 64), nn.GELU(), nn.Linear(64, 196))
    found["tokens"] = (nn.Sequential(nn.LayerNorm(32), tokens), torch.randn(8, 196, 32, device=device))
    found["patches of 14"] = (nn.Sequential(nn.Conv2d(3, 64, 14, 14), nn.Flatten(2), nn.Linear(9, 32)), image(3, 42))
    weight_norm = nn.utils.parametrizations.weight_norm
    found |= {
        "group norm": (nn.Sequential(stack((64, 128)), nn.GroupNorm(8, 128), stack((128, 128))), image(64)),
        "weight norm": (nn.Sequential(stack((64, 128)), weight_norm(nn.Conv2d(128, 128, 3)), nn.GELU()), image(64)),
        "one row": (nn.Sequential(stack((64, 128)), nn.Flatten(), nn.Linear(128 * 32, 10)), image(64)[:, :, :1]),
    }
    return {name: (module.to(device), x) for name, (module, x) in found.items()}


def check(module: Callable[..., Any], x: Tensor, dtype: torch.dtype, train: bool) -> tuple[list[str], bool]:
    """The errors, and True if the channels of any convolution are last."""
    wrong: list[str] = []
    seen: list[fx.GraphModule] = []

    def run(fn: Callable[..., Any]) -> list[Tensor]:
        results = pytree.tree_leaves(fn(x))
        if not train:
            return results
        parameters = list(module.parameters())  # type: ignore[attr-defined]
        return [*results, *torch.autograd.grad([r.float().square().mean() for r in results], parameters)]

    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        ours = run(torch.compile(module, backend=checking_backend(seen, wrong), dynamic=False))
        eager = run(module)
    tolerance = 2e-2 if dtype is torch.float32 else 8e-2  # cuDNN's algorithms differ, some of them by TF32
    results = len(ours) - train * len(list(module.parameters()))  # type: ignore[attr-defined]
    for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
        a, b = a.detach(), b.detach()
        off = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-3))
        if off > tolerance and (k < results or dtype is torch.float32):
            wrong.append(f"result {k} is off by {off:.2g}")
        if strides_apart(a, b):
            wrong.append(f"result {k} has strides {a.stride()}, eager mode {b.stride()}")
    convolutions = [n for gm in seen for n in gm.graph.find_nodes(op="call_function", target=CONVOLUTION)]
    return wrong, any(n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in convolutions)


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    bad = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for train in (False, True):
            for name, (module, x) in cases(device).items():
                if train and dtype is torch.float16 and name == "weight norm":
                    continue  # Inductor of torch 2.11 hands the backward's operator the wrong type: it fails alike
                wrong, last = check(module.to(dtype).train(train), x.to(dtype), dtype, train)
                bad += bool(wrong)
                kind = "training" if train else "inference"
                print(
                    f"{name}, {dtype}, {kind}: {'last' if last else 'as they were'} {'; '.join(wrong[:3]) or 'right'}"
                )
    print("bad", bad)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
