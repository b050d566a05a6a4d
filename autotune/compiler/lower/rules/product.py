"""Matrix products that are memory-intensive: of a vector, of few vectors, or small.

Where every weight is read for few results, a product takes what its bytes take; where it is small, what its launch
takes. Written as a sum of products it shares a kernel with what follows: the cell of a recurrence has the product that
makes its gates, a decoder's activation the two that it multiplies. All other products are a library's.
"""

from __future__ import annotations

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import Guards, Index, Lazy, Number, Region, pointwise, reduce
from autotune.compiler.lower.rules.table import rule
from autotune.errors import Repeated, Unsupported

_FEW = 16
_SMALL, _SMALL_OF_FEW = 1 << 20, 1 << 23
"""Multiplications: what plain arithmetic does beside a kernel's start; and with so few vectors that all of the weights
lie in the L2 when the next vector comes."""


def is_memory_intensive(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the product of [*, m, k] and [*, k, n], or [k], is one of those that regions may hold.

    Neither operand running along k, as in the gradient of a weight, asks for tiles in shared memory: a library's.
    """
    if not all(read_again(a, b)):
        return True
    along = [x.shape[d] == 1 or x.stride(d) == 1 for x, d in ((a, -1), (b, -2))]
    few = min(a.shape[-2], b.shape[-1]) <= _FEW
    return any(along) and a.numel() * b.shape[-1] <= (_SMALL_OF_FEW if few else _SMALL)


def read_again(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool]:
    """Of [*, m, k] and [*, k, n], or [k], whether each is read for more than one column or row of the result."""
    return b.ndim > 1 and b.shape[-1] > 1, a.shape[-2] > 1


def _product(a: Lazy, b: Lazy) -> Lazy:
    """[*, m, k] and [*, k, n] to [*, m, n], the sum carried in fp32 as a library does."""
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
    """Raises Repeated where products are computed several times over.

    A rotation reads each element beside another one: its weights would be read again for each. What is small may be
    computed twice, as where a recurrence keeps its gates whole beside the parts that it uses.
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
        raise Unsupported("a product that is left out")  # whatever it holds, NaN too
    product = _mv(region, mat1, mat2) if mat2.ndim == 1 else _product(mat1, mat2)
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return scaled + (self if beta == 1 else self * beta)
