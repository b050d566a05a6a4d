"""Mixed cases: reductions along both axes of one tensor, and many unrelated small computations (an optimiser step)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.fusion.cases.case import Arguments, Case, Draw, Shape

LEARNING_RATE, BETA1, BETA2, EPS, DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 10
"""AdamW as it is set by default, at a fixed step: its bias corrections are numbers."""

ODD_SIZES = (
    1, 3, 5, 7, 11, 17, 23, 37, 53, 79, 113, 167, 251, 383, 571, 857, 1279, 1913, 2861, 4283, 6421, 9623, 14423, 21611,
    32399, 48589, 72889, 109321, 163981, 245941, 368911, 553361, 830017, 1000003, 1244993, 1633999, 1999993,
)  # fmt: skip
"""Elements of the 37 tensors: odd, most of them prime, from 1 to 2 million."""


def mixed_axes(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """relu, then mean and variance of every column, and maximum and softmax of every row, of [R, C]."""
    h = torch.relu(x)
    return h.mean(0), h.var(0, unbiased=False), h.amax(1), torch.softmax(h, 1)


def adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """One AdamW step of every tensor (Loshchilov and Hutter, arXiv 1711.05101): new parameters and moments."""
    new: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for p, g, m, v in zip(params, grads, firsts, seconds, strict=True):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        deviation = torch.sqrt(v) / (1 - BETA2**STEP) ** 0.5 + EPS
        p = p * (1 - LEARNING_RATE * DECAY) - LEARNING_RATE / (1 - BETA1**STEP) * (m / deviation)
        for made, kept in zip((p, m, v), new, strict=True):
            kept.append(made)
    return new


def _one(draw: Draw, shape: Shape) -> Arguments:
    return (draw.normal(*shape),)


def _state(draw: Draw, shapes: Sequence[Shape]) -> Arguments:
    normal = [[draw.normal(*shape, scale=scale) for shape in shapes] for scale in (1.0, 1.0, 0.1)]
    return *normal, [draw.positive(*shape) for shape in shapes]


def _same(draw: Draw, shape: Shape) -> Arguments:
    count, *each = shape
    return _state(draw, [tuple(each)] * count)


def _odd(draw: Draw, shape: Shape) -> Arguments:
    """``shape[0]`` sizes of up to ``shape[1]`` elements."""
    count, most = shape
    sizes = [n for n in ODD_SIZES if n <= most]
    return _state(draw, [(n,) for n in (sizes * count)[:count]])


def _show_same(shape: Shape) -> str:
    return f"{shape[0]} x {'x'.join(map(str, shape[1:]))}"


def _show_odd(shape: Shape) -> str:
    return f"{shape[0]} odd sizes to {shape[1]}"


_F32 = torch.float32

MIXED = (
    Case("mixed_axes", "mixed", "mixed axes", _F32, (16384, 512), (1024, 512), mixed_axes, _one, "mixed_axes"),
    Case("mixed_axes_small", "mixed", "mixed axes", _F32, (256, 128), (256, 128), mixed_axes, _one, "mixed_axes"),
    Case("adamw", "mixed", "adamw", _F32, (24, 768, 768), (24, 64, 64), adamw, _same, "adamw", _show_same),
    Case("adamw_odd", "mixed", "adamw", _F32, (37, 2_000_000), (37, 50_000), adamw, _odd, "adamw", _show_odd),
)
