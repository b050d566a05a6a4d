"""Between what a calibration measured: lines through points, and means over GEMMs like one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

from autotune.domains.c3.scenario import ITEMSIZE, Gemm

Curve = list[tuple[float, float]]
"""Points by rising first coordinate."""
Features = tuple[float, ...]


def traffic(g: Gemm) -> int:
    """Bytes that a GEMM reads and writes at least."""
    return ITEMSIZE[g.dtype] * (g.m * g.k + g.k * g.n + g.m * g.n)


def extents(g: Gemm) -> Features:
    return math.log2(g.m), math.log2(g.n), math.log2(g.k)


def weight(g: Gemm) -> Features:
    """How long it takes, and how much of that is arithmetic."""
    return math.log2(g.flops) / 2, math.log2(g.flops / traffic(g))


def mean_of_like(gemm: Gemm, values: Mapping[Gemm, float], features: Callable[[Gemm], Features]) -> float:
    """Mean of ``values``, those of GEMMs near to ``gemm`` counting most (inverse squared distance)."""
    here = features(gemm)
    total = weights = 0.0
    for other, value in values.items():
        near = 1 / (0.01 + math.dist(here, features(other)) ** 2)
        total, weights = total + near * value, weights + near
    return total / weights


def at(curve: Curve, x: float) -> float:
    """On the line through the points on both sides of ``x``; beyond the ends their value."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def over_sizes(curve: Curve, nbytes: float) -> float:
    """Time at a size: so much to begin with and so much a byte, from one measured size to the next. Below the smallest
    the same time; above the largest the line goes on."""
    if nbytes <= curve[-1][0]:
        return at(curve, nbytes)
    (x0, y0), (x1, y1) = curve[-2] if len(curve) > 1 else (0.0, 0.0), curve[-1]
    rate = (y1 - y0) / (x1 - x0)
    return y1 + (nbytes - x1) * (rate if rate > 0 else y1 / x1)
