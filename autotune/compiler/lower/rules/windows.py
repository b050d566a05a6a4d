"""Rules of pooling and rolling: strided windows of a tensor, combined element by element."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import Lazy, Region, pointwise
from autotune.compiler.lower.rules.composite import mean
from autotune.compiler.lower.rules.table import padded, rule
from autotune.errors import Unsupported

_MOST_TAPS = 25
"""Elements of a window above which the operator stays with torch: every one is a load of its own."""

Pair = int | Sequence[int]


def _pair(value: Pair, default: Sequence[int] = ()) -> list[int]:
    given = views.numbers(value) or list(default)
    return given * 2 if len(given) == 1 else given


def _taps(
    x: Lazy, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], fill: float
) -> list[Lazy]:
    """For each place in the window the tensor of the elements there, of the result's shape (``region.out``)."""
    if math.prod(kernel) > _MOST_TAPS:
        raise Unsupported(f"a window of {math.prod(kernel)} elements")
    dims = [x.ndim - 2, x.ndim - 1]
    out = x.region.out[0][0][-2:]
    for d, k, s, p, step, n in zip(dims, kernel, stride, padding, dilation, out, strict=True):
        # With ceil_mode the last window may reach past the padding.
        beyond = max(0, (n - 1) * s + (k - 1) * step + 1 - x.shape[d] - 2 * p)
        x = padded(x, d, p, p + beyond, fill)
    taps = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            tap = x
            for d, at, s, n in zip(dims, (i * dilation[0], j * dilation[1]), stride, out, strict=True):
                tap = views.narrow(tap, d, at, at + (n - 1) * s + 1, s)
            taps.append(tap)
    return taps


@rule("max_pool2d_with_indices", "_low_memory_max_pool_with_offsets")
def _max_pool(
    region: Region,
    self: Lazy,
    kernel_size: Pair,
    stride: Pair = (),
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> tuple[Lazy | None, ...]:
    """The values; whoever wants the indices, or the places within windows, stays with torch."""
    if self.kind != "float32":
        raise Unsupported("a maximum pooling of integers")
    kernel = _pair(kernel_size)
    taps = _taps(self, kernel, _pair(stride, kernel), _pair(padding), _pair(dilation), -math.inf)
    return functools.reduce(lambda a, b: pointwise("maximum", a, b), taps), None


@rule("avg_pool2d")
def _average_pool(
    region: Region,
    self: Lazy,
    kernel_size: Pair,
    stride: Pair = (),
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Lazy:
    kernel, border = _pair(kernel_size), _pair(padding)
    if ceil_mode or (any(border) and not count_include_pad and divisor_override is None):
        raise Unsupported("an average pooling whose windows have different sizes")
    taps = _taps(self, kernel, _pair(stride, kernel), border, [1, 1], 0.0)
    total = functools.reduce(lambda a, b: a + b, taps)
    return total * (1 / (divisor_override or math.prod(kernel)))


@rule("_adaptive_avg_pool2d")
def _adaptive_average_pool(region: Region, self: Lazy, output_size: Pair) -> Lazy:
    if _pair(output_size) != [1, 1]:
        raise Unsupported("an adaptive pooling to more than one element")
    return mean(self, [-2, -1], True)
