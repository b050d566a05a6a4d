"""Rules of reductions: sums and extremes, pooling, small matrix products, and additions at indices.

Statistics are two-pass (mean, then mean of centred squares). This suits kernels with a row in registers and loses no
digits. Means multiply by the reciprocal of the count.

Regions hold memory-intensive matrix products: with one vector, with few vectors, or small. If every weight is read for
few results, the time of a product is that of its bytes. The time of a small product is that of its launch. As a sum of
products, it fuses with the following operators: a recurrence's cell with the product for its gates, a decoder's
activation with its two products. All other products are left to a library.

Index-add has the gradients of an embedding, of indexing and of ``gather``, and additions at an index. A sum is one
value of the graph (``sum_at``). It is stored once and without atomic additions. Operators that add to it or read it,
such as the gradient of a decoder tied to the embedding, fuse with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import (
    NARROW,
    Guards,
    Index,
    Lazy,
    Number,
    Region,
    Repeats,
    cast,
    pointwise,
    reduce,
    scalar,
)
from autotune.compiler.lower.rules.pointwise import compare
from autotune.compiler.lower.rules.table import alike, counted, padded, rule, rules
from autotune.errors import Repeated, Unsupported
from autotune.ir.build import Builder

F32 = torch.float32
Dim = int | Sequence[int] | None
Pair = int | Sequence[int]

_MOST_SUMS = 1 << 14
"""Most sums of a row with separate indices, which a warp holds in shared memory."""
_MOST_TAPS = 25
"""Window elements above which the operator is left to torch: each one is a separate load."""


def _dims(x: Lazy, dim: Dim) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return views.numbers(dim)


def _count(x: Lazy, dims: Sequence[int]) -> int:
    return math.prod(x.shape[x.dim(d)] for d in dims) if x.ndim else 1


def mean(x: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    dims = _dims(x, dim)
    return reduce("sum", x, dims, keepdim) * (1 / _count(x, dims))


# Plain reductions -----------------------------------------------------------------------------------------------------


def _in_result_type(
    op: str, self: Lazy, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Lazy:
    kept = self.region.out[0][1]
    if kept in NARROW:
        raise Unsupported(f"{op} in {kept} (it may wrap)")
    x = cast(self, kept)
    return mean(x, dim, keepdim) if op == "mean" else reduce(op, x, _dims(self, dim), keepdim)


def _extreme(op: str, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    if self.dtype == torch.bool:
        raise Unsupported("the extreme of booleans")
    return reduce(op, self, _dims(self, dim), keepdim)


def _with_index(op: str, self: Lazy, dim: int | None = None, keepdim: bool = False) -> Any:
    """``max(x)`` and the values of ``max(x, dim)``; a graph that reads the indices is left to torch."""
    values = _extreme(op, self, dim, keepdim)
    return values if len(self.region.out) == 1 else (values, None)


def _any(op: str, self: Lazy, dim: Dim = None, keepdim: bool = False) -> Lazy:
    ones = cast(cast(self, torch.bool), torch.int32)
    return compare("ne", reduce(op, ones, _dims(self, dim), keepdim), 0)


rules(_in_result_type, alike("sum", "mean", "prod"))
rules(_extreme, {"amax": "max", "amin": "min"})
rules(_with_index, alike("max", "min"))
rules(_any, {"any": "max", "all": "min"})


@rule("var", "var_mean")
def _variance(
    region: Region, self: Lazy, dim: Dim = None, *, correction: Number | None = None, keepdim: bool = False
) -> Any:
    dims = _dims(self, dim)
    average = mean(self, dims, True)
    centred = self - average
    n = _count(self, dims) - (1.0 if correction is None else float(correction))
    variance = reduce("sum", centred * centred, dims, True) * (1 / n if n > 0 else math.inf)
    out = [x if keepdim else _drop(x, self, dims) for x in (variance, average)]
    return tuple(out) if len(region.out) == 2 else out[0]


def _drop(x: Lazy, like: Lazy, dims: Sequence[int]) -> Lazy:
    return views.squeeze(x, [like.dim(d) for d in dims]) if like.ndim else x


# Softmax --------------------------------------------------------------------------------------------------------------


@rule("prepare_softmax_online")
def _prepare_softmax(region: Region, a: Lazy, dim: int) -> tuple[Lazy, Lazy]:
    """A row's maximum, and the sum of exponentials of the row minus that maximum (an Inductor operator)."""
    top = reduce("max", a, [dim], True)
    return top, reduce("sum", pointwise("exp", a - top), [dim], True)


# Pooling: strided windows, combined element by element ----------------------------------------------------------------


def _pair(value: Pair, default: Sequence[int] = ()) -> list[int]:
    given = views.numbers(value) or list(default)
    return given * 2 if len(given) == 1 else given


def _taps(
    x: Lazy, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], fill: float
) -> list[Lazy]:
    """For each position in the window, the tensor of the elements there, in the result's shape (``region.out``)."""
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
    """The values; a graph that reads the indices, or the offsets within windows, is left to torch."""
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
    origin = region.origin

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        every = region.sums.setdefault(total, Repeats(total.numel * k))
        every.add(origin, index, guards, k * region.elements(index, guards))
        return total.at(index, guards)

    return Lazy(region, total.shape, total.dtype, total.names, at)


def check_work(region: Region) -> None:
    """Raises Repeated if sums are computed several times.

    A rotation combines each element with another one, so a product's weights would be read again for each. A norm of a
    graph's nodes would be computed for each edge that reads a node. A small product may be computed twice, for example
    if a recurrence stores its gates as a whole and uses parts of them. Other reductions may be repeated in the time of
    a launch.
    """
    repeated = dict[object, None]()
    for one in region.sums.values():
        if one.total > (2 if one.total <= 2 * _SMALL else 1) * one.once:
            repeated |= one.nodes
    for one in region.picked.values():
        if one.total > one.once + _SMALL:
            repeated |= one.nodes
    if repeated:
        raise Repeated(list(repeated))


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


# Index-add ------------------------------------------------------------------------------------------------------------


def _sum_at(rows: Lazy, destinations: Lazy, extent: int, tokens: int | None = None) -> Lazy:
    """The fp32 sum [extent, *rest] of the rows [*destinations.shape, *rest] of each index in ``destinations``.

    Rows with an index outside [0, extent) are ignored.

    Args:
        tokens: the number of dimensions that are summed over, by default all of ``destinations``. Its other dimensions
            are the first ones of ``rest``: each of their elements has separate indices.
    """
    if rows.kind != "float32" or destinations.kind not in ("int32", "int64"):
        raise Unsupported("sums at indices of other types than floats at integers")
    region, origin = rows.region, rows.region.origin
    tokens = destinations.ndim if tokens is None else tokens
    for d in range(destinations.ndim):
        if destinations.shape[d] > 1:
            region.names.unify(destinations.names[d], rows.names[d])

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        build, where = region.build, index[0]
        used = {a for a, _, _ in guards}
        for i in index:
            used.update(a for a, _ in i.terms)
            used.update(build.values[i.pick[0]].axes if i.pick else ())
        runs = zip(destinations.names[:tokens], destinations.shape[:tokens], strict=True)
        token = tuple([region.run_over(n, used) if e > 1 else Index() for n, e in runs])
        over = [a for i in token for a, _ in i.terms]
        shared = index[1 : 1 + destinations.ndim - tokens]
        destination = destinations.at((*token, *shared), guards if shared else ())
        term = rows.at((*token, *index[1:]), guards)
        if extent == 1 or not over:  # one index, or one term
            here = build.index(where.terms, where.offset, where.pick, build.values[destination].dtype)
            found = build.pointwise("eq", [destination, here])
            return build.reduce("sum", build.pointwise("where", [found, term, build.const(0.0, "float32")]), over)
        axis = where.terms[0][0] if where.terms else -1
        if where != Index(((axis, 1),)) or build.extents[axis] != extent:
            raise Unsupported("sums at indices of which a part is read")
        if axis in (*build.values[term].axes, *build.values[destination].axes):
            raise Unsupported("a diagonal of sums at indices")
        varied, separate = set(build.values[term].axes), set(build.values[destination].axes) - set(over)
        if extent > _MOST_SUMS and separate:
            raise Unsupported("a row with separate indices of more sums than shared memory holds")
        if separate and not (separate <= varied and varied & set(over)):
            raise Unsupported("a row with separate indices whose terms are equal, or are those of other rows")
        if not set(over) & set(build.values[destination].axes) or not _walked(build, term, destination, over):
            raise Unsupported("terms or indices that are the same everywhere")
        every = region.sums.setdefault(made, Repeats(made.numel))
        every.add(origin, index, guards, region.elements(index, guards))
        return build.sum_at(term, destination, over, axis)

    names = [region.names.new(extent), *rows.names[tokens:]]
    made = Lazy(region, (extent, *rows.shape[tokens:]), rows.dtype, names, at)
    return made


def _walked(build: Builder, term: int, destination: int, over: Sequence[int]) -> bool:
    """True if a term has columns or reads memory; no kernel sums terms made from the token's number or index alone."""
    if set(build.values[term].axes) - set(over):
        return True
    index = _made_of(build, destination)
    return any(build.values[i].op in ("load", "gather") for i in _made_of(build, term) - index)


def _made_of(build: Builder, i: int) -> set[int]:
    found, stack = set[int](), [i]
    while stack:
        if (i := stack.pop()) not in found:
            found.add(i)
            stack += build.values[i].args
    return found


@rule("embedding_dense_backward")
def _embedding_dense_backward(
    region: Region, grad_output: Lazy, indices: Lazy, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Lazy:
    if scale_grad_by_freq:
        raise Unsupported("a gradient scaled by how often a row was read")
    if type(num_weights) is not int or grad_output.shape[: indices.ndim] != indices.shape:
        raise Unsupported("a gradient of other rows than were read")
    destinations = indices
    if 0 <= padding_idx < num_weights:
        padding = pointwise("eq", indices, padding_idx, dtype=torch.bool)
        destinations = pointwise("where", padding, scalar(region, -1, indices.dtype), indices, dtype=indices.dtype)
    return _sum_at(grad_output, destinations, num_weights)


@rule("index_add")
def _index_add(region: Region, self: Lazy, dim: int, index: Lazy, source: Lazy, *, alpha: Number = 1) -> Lazy:
    if self.dim(dim) != 0 or index.ndim != 1 or self.ndim != source.ndim:
        raise Unsupported("an addition at an index of another than the first dimension")
    added = _sum_at(source, index, self.shape[0])
    return self + (added if alpha == 1 else added * alpha)


@rule("scatter_add")
def _scatter_add(region: Region, self: Lazy, dim: int, index: Lazy, src: Lazy) -> Lazy:
    """The gradient of ``gather``: each line of ``src`` along ``dim`` is added at the indices of that line."""
    along = self.dim(dim)
    rest = [d for d in range(self.ndim) if d != along]
    if index.shape != src.shape or any(index.shape[d] != self.shape[d] for d in rest) or not self.ndim:
        raise Unsupported("an addition of a part of a tensor at an index")
    lines, destinations = (views.permute(x, [along, *rest]) for x in (src, index))
    added = _sum_at(lines, destinations, self.shape[along], tokens=1)
    return self + views.permute(added, [1 + rest.index(d) if d != along else 0 for d in range(self.ndim)])


@rule("index_put", "_unsafe_index_put")
def _index_put(
    region: Region, self: Lazy, indices: Sequence[Lazy | None], values: Lazy, accumulate: bool = False
) -> Lazy:
    index = _only(indices)
    if not accumulate or self.dtype != values.dtype:
        raise Unsupported("other than an addition at one index")
    destinations = counted(index, self.shape[0])
    return self + _sum_at(views.expand(values, [*index.shape, *self.shape[1:]]), destinations, self.shape[0])


@rule("_unsafe_masked_index_put_accumulate")
def _masked_index_put(region: Region, self: Lazy, mask: Lazy, indices: Sequence[Lazy | None], values: Lazy) -> Lazy:
    """The form of an embedding's gradient in torch 2.13: rows that the mask excludes are ignored."""
    index = _only(indices)
    if self.dtype != values.dtype or mask.shape[index.ndim :] != (1,) * (mask.ndim - index.ndim):
        raise Unsupported("an addition with a mask of its own for each element")
    for _ in range(mask.ndim - index.ndim):
        mask = views.squeeze(mask, [mask.ndim - 1])
    nowhere = scalar(region, -1, index.dtype)
    kept = views.expand(mask, index.shape)
    destinations = pointwise("where", kept, counted(index, self.shape[0]), nowhere, dtype=index.dtype)
    return self + _sum_at(views.expand(values, [*index.shape, *self.shape[1:]]), destinations, self.shape[0])


def _only(indices: Sequence[Lazy | None]) -> Lazy:
    """The one index of the first dimension. Raises Unsupported for any other form."""
    index = indices[0] if len(indices) == 1 else None
    if index is None:
        raise Unsupported("other than an addition at one index")
    if index.dtype not in (torch.int32, torch.int64):  # a mask, which may have bytes
        raise Unsupported("an addition at other than integers")
    return index
