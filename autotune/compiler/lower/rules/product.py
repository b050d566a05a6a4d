"""Memory-intensive matrix products: with one vector, with few vectors, or small.

If every weight is read for few results, the time of a product is that of its bytes. The time of a small product is that
of its launch. As a sum of products, it fuses with the following operators: a recurrence's cell with the product for its
gates, a decoder's activation with its two products. All other products are left to a library.
"""

from __future__ import annotations

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import Guards, Index, Lazy, Number, Region, pointwise, reduce
from autotune.compiler.lower.rules.table import rule
from autotune.errors import Repeated, Unsupported

_FEW = 16
_SMALL, _SMALL_OF_FEW = 1 << 20, 1 << 23
"""Limits on multiplications: as many as plain arithmetic does in the time of a launch, and as many with few vectors, so
that all weights are still in the L2 for the next vector."""


def is_memory_intensive(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if a region may hold the product of [*, m, k] and [*, k, n], or [k].

    If no operand has unit stride along k, as in a weight's gradient, a product needs tiles in shared memory and is left
    to a library.
    """
    if not all(read_again(a, b)):
        return True
    along = [x.shape[d] == 1 or x.stride(d) == 1 for x, d in ((a, -1), (b, -2))]
    few = min(a.shape[-2], b.shape[-1]) <= _FEW
    return any(along) and a.numel() * b.shape[-1] <= (_SMALL_OF_FEW if few else _SMALL)


def read_again(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool]:
    """For [*, m, k] and [*, k, n], or [k]: True if the operand is read for several columns or rows of the result."""
    return b.ndim > 1 and b.shape[-1] > 1, a.shape[-2] > 1


def _product(a: Lazy, b: Lazy) -> Lazy:
    """The product of [*, m, k] and [*, k, n] as [*, m, n], accumulated in fp32 as in a library."""
    if a.kind != "float32" or b.kind != "float32":
        raise Unsupported("a product of whole numbers")
    n, k, region = a.ndim, a.shape[-1], a.region
    terms = pointwise("mul", views.unsqueeze(a, n), views.unsqueeze(b, n - 2))
    total = reduce("sum", terms, [n - 1])
    _, ways = region.work.setdefault(region.origin, (total.numel * k, {}))

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        ways[index, guards] = k * region.elements(index, guards)
        return total.at(index, guards)

    return Lazy(region, total.shape, total.dtype, total.names, at)


def check_work(region: Region) -> None:
    """Raises Repeated if products are computed several times.

    A rotation combines each element with another one, so its weights would be read again for each. A small product may
    be computed twice, for example if a recurrence stores its gates as a whole and uses parts of them.
    """
    repeated = []
    for node, (worth, ways) in region.work.items():
        done = sum(ways.values())
        if done > (2 if done <= 2 * _SMALL else 1) * worth:
            repeated.append(node)
    if repeated:
        raise Repeated(repeated)


rule("mm", "bmm")(lambda region, a, b: _product(a, b))


@rule("mv")
def _mv(region: Region, self: Lazy, vec: Lazy) -> Lazy:
    return views.reshape(_product(self, views.unsqueeze(vec, 1)), [self.shape[0]])


@rule("addmm", "baddbmm", "addmv")
def _addmm(region: Region, self: Lazy, mat1: Lazy, mat2: Lazy, *, beta: Number = 1, alpha: Number = 1) -> Lazy:
    if alpha == 0:
        raise Unsupported("a product that is left out")  # whatever its values, including NaN
    product = _mv(region, mat1, mat2) if mat2.ndim == 1 else _product(mat1, mat2)
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return scaled + (self if beta == 1 else self * beta)
