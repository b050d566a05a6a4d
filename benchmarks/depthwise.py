"""Depthwise convolutions by the library, and as sums of shifted inputs that Inductor compiles.

    python -m benchmarks.depthwise --out depthwise.json

Each case times the convolution and the gradients of its input and its weight. Sums are forward functions, since
:mod:`autotune.compiler.capture.depthwise` writes gradients as sums too. Times are medians of single calls in us, with a
cold L2 (``triton.testing.do_bench``).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = torch.bfloat16
CASES: list[tuple[tuple[int, ...], int, bool, torch.dtype]] = [
    ((8, 1536, 2048), 4, True, HALF), ((8, 1536, 2048), 4, False, HALF), ((4, 2048, 4096), 3, True, HALF),
    ((16, 512, 8192), 7, False, HALF), ((8, 1536, 2048), 4, True, torch.float16), ((16, 512, 400), 31, False, HALF),
    ((8, 1536, 2048), 4, False, torch.float32), ((128, 128, 56, 56), 3, True, HALF), ((64, 384, 28, 28), 3, True, HALF),
    ((128, 256, 28, 28), 5, True, HALF), ((128, 256, 28, 28), 7, True, HALF),
]  # fmt: skip
"""The input's shape, taps along each axis, True for channels last in memory, and the type."""


def taps_of(x: Tensor, taps: int, back: bool) -> list[tuple[tuple[int, ...], Tensor]]:
    """For each tap, its place in the kernel, and the input shifted by it; ``x`` is [batch, *positions, channels]."""
    near, dims = taps // 2, x.ndim - 2
    found = []
    for number in range(taps**dims):
        place = [number // taps**k % taps for k in reversed(range(dims))]
        shifts = [near - p if not back else p - near for p in place]
        pad = [n for s in reversed(shifts) for n in (s, -s)]
        found.append((tuple(place), F.pad(x, [0, 0, *pad]).float()))
    return found


def summed(x: Tensor, weight: Tensor, taps: int, back: bool = False) -> Tensor:
    terms = (tap * weight[(slice(None), 0, *place)].float() for place, tap in taps_of(x, taps, back))
    return functools.reduce(torch.add, terms).to(x.dtype)


def weight_gradient(x: Tensor, grad: Tensor, taps: int) -> Tensor:
    rest = tuple(range(x.ndim - 1))
    return torch.stack([(tap * grad.float()).sum(rest) for _, tap in taps_of(x, taps, False)], 1)


def measured(shape: Sequence[int], taps: int, last: bool, dtype: torch.dtype) -> dict[str, Any]:
    from triton.testing import do_bench

    def us(run: Callable[[], Any]) -> float:
        return round(1e3 * do_bench(run, warmup=5, rep=25, return_mode="median"), 1)

    batch, channels, *places = shape
    dims, near = len(places), taps // 2
    if last:
        x = torch.randn(batch, *places, channels, device="cuda", dtype=dtype).movedim(-1, 1)
    else:
        x = torch.randn(*shape, device="cuda", dtype=dtype)
    weight = torch.randn(channels, 1, *[taps] * dims, device="cuda", dtype=dtype)
    convolve = F.conv1d if dims == 1 else F.conv2d
    y = convolve(x, weight, padding=near, groups=channels)[(..., *[slice(n) for n in places])]
    grad = torch.randn_like(y)
    options = ([1] * dims, [near] * dims, [1] * dims, False, [0] * dims, channels)
    result = convolve(x, weight, padding=near, groups=channels)
    given = torch.randn_like(result)

    def library(wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(given, x, weight, None, *options, wanted)

    out: dict[str, Any] = {"library": [us(lambda: convolve(x, weight, padding=near, groups=channels))]}
    out["library"] += [us(lambda: library([True, False, False])), us(lambda: library([False, True, False]))]
    torch._dynamo.reset()
    forward = torch.compile(functools.partial(summed, taps=taps), dynamic=False)
    backward = torch.compile(functools.partial(summed, taps=taps, back=True), dynamic=False)
    ordered, grads = x.movedim(1, -1), grad.movedim(1, -1)
    torch.testing.assert_close(forward(ordered, weight).movedim(-1, 1), y, rtol=2e-2, atol=5e-2)
    out["sums"] = [us(lambda: forward(ordered, weight)), us(lambda: backward(grads, weight)), None]
    if taps**dims <= 9:
        of_weight = torch.compile(functools.partial(weight_gradient, taps=taps), dynamic=False)
        out["sums"][2] = us(lambda: of_weight(ordered, grads))
    return {**out, "copy": us(x.clone)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.depthwise", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = {}
    for shape, taps, last, dtype in CASES:
        name = f"{'x'.join(map(str, shape))} k{taps} {'last' if last else 'first'} {str(dtype).removeprefix('torch.')}"
        found[name] = measured(shape, taps, last, dtype)
        print(name, found[name], flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
