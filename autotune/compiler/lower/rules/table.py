"""The table of translated aten operators, and the rules for views, generators and gathers.

A rule has the region as its first argument, then the operator's signature (its schema's argument names) with lazy
tensors for tensors. ``region.out`` holds the (shape, dtype) of each result. A rule returns a lazy tensor or a tuple of
them, and raises Unsupported for forms it cannot express. To add an operator, add a rule here or in another module of
this package. Operators that Inductor decomposes before its post-grad passes have no rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import (
    Guards,
    Index,
    Lazy,
    Number,
    Region,
    broadcast_index,
    broadcast_names,
    cast,
    held,
    iota,
    pointwise,
    scalar,
)
from autotune.errors import Unsupported

Rule = Callable[..., "Lazy | tuple[Lazy | None, ...]"]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[R], R]:
    """Register a function as the translation of the aten operators ``names`` (all their overloads)."""

    def add(fn: R) -> R:
        for name in names:
            RULES[name] = fn
        return fn

    return add


def rules(make: Callable[..., Any], ops: Mapping[str, str]) -> None:
    """Register aten operators that differ only in one operator of the graph, the first argument of ``make``."""
    for name, op in ops.items():

        def apply(region: Region, *args: Any, op: str = op, **kwargs: Any) -> Any:
            return make(op, *args, **kwargs)

        rule(name)(functools.update_wrapper(apply, make))


def alike(*names: str) -> dict[str, str]:
    """A mapping for :func:`rules` of operators with the same name in aten and in the graph."""
    return {name: name for name in names}


# Views ----------------------------------------------------------------------------------------------------------------


@rule("view", "reshape")
def _view(region: Region, self: Lazy, size: Sequence[int], *_: Any) -> Lazy:
    if isinstance(size, torch.dtype):
        raise Unsupported("a view as another type")
    return views.reshape(self, size)


@rule("as_strided")
def _as_strided(
    region: Region, self: Lazy, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Lazy:
    """``as_strided`` of all elements in memory order, by which group normalisation drops extents of 1."""
    node: Any = region.origin
    memory = node.args[0].meta["val"]
    shape, start = views.numbers(size), memory.storage_offset()
    dense = zip(shape, views.numbers(stride), torch.empty(shape, device="meta").stride(), strict=True)
    if not memory.is_contiguous() or storage_offset not in (None, start) or math.prod(shape) != self.numel:
        raise Unsupported("memory read by strides of its own")
    if any(e > 1 and given != plain for e, given, plain in dense):
        raise Unsupported("memory read by strides of its own")
    return views.reshape(self, shape)


rule("alias", "clone", "lift_fresh_copy")(lambda region, x, **_: x)
rule("copy")(lambda region, x, src, **_: cast(views.expand(src, x.shape), x.dtype))
rule("expand")(lambda region, x, size, **_: views.expand(x, size))
_VIEWS: dict[str, Callable[..., Any]] = {
    "permute": views.permute,
    "unsqueeze": views.unsqueeze,
    "squeeze": views.squeeze,
    "slice": views.narrow,
    "select": views.select,
    "split": views.split,
    "split_with_sizes": views.split,
    "unbind": views.unbind,
    "diagonal": views.diagonal,
    "rev": views.flip,
    "repeat": views.repeat,
    "cat": views.cat,
}
"""Functions with the operator's arguments in the same order."""
rules(lambda name, *args, **kwargs: _VIEWS[name](*args, **kwargs), alike(*_VIEWS))


# Copies with another layout -------------------------------------------------------------------------------------------


def padded(x: Lazy, dim: int, before: int, after: int, number: Number) -> Lazy:
    """``x`` padded along ``dim`` by ``before`` and ``after`` elements ``number``; negative counts cut off elements."""
    if before < 0 or after < 0:
        x = views.narrow(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
        before, after = max(before, 0), max(after, 0)
    parts = [x]
    for n, first in ((before, True), (after, False)):
        if n:
            edge = views.full(x.region, [*x.shape[:dim], n, *x.shape[dim + 1 :]], number, x.dtype)
            parts = [edge, *parts] if first else [*parts, edge]
    return views.cat(parts, dim)


@rule("constant_pad_nd")
def _constant_pad(region: Region, self: Lazy, pad: Sequence[int], value: Number = 0) -> Lazy:
    for k in range(len(pad) // 2):
        self = padded(self, self.ndim - 1 - k, pad[2 * k], pad[2 * k + 1], value)
    return self


@rule("slice_scatter")
def _slice_scatter(
    region: Region, self: Lazy, src: Lazy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Lazy:
    d = self.dim(dim)
    first, last, _ = slice(start, end).indices(self.shape[d])
    if step != 1:
        return _every(self, cast(src, self.dtype), d, first, step)
    parts = [views.narrow(self, d, 0, first)] if first else []
    parts.append(cast(src, self.dtype))
    if last < self.shape[d]:
        parts.append(views.narrow(self, d, last, None))
    return views.cat(parts, d)


def _every(x: Lazy, src: Lazy, d: int, first: int, step: int) -> Lazy:
    """``x`` with every ``step``-th element along ``d`` from ``first`` on replaced: a select in groups of ``step``."""
    if x.shape[d] % step or first >= step or src.shape[d] != x.shape[d] // step:
        raise Unsupported("an assignment to a slice with a step of which a part is left")
    grouped = views.reshape(x, [*x.shape[:d], x.shape[d] // step, step, *x.shape[d + 1 :]])
    parts = [views.unsqueeze(src, d + 1)]
    if first:
        parts.insert(0, views.narrow(grouped, d + 1, 0, first))
    if first + 1 < step:
        parts.append(views.narrow(grouped, d + 1, first + 1, None))
    return views.reshape(views.cat(parts, d + 1), x.shape)


@rule("select_scatter")
def _select_scatter(region: Region, self: Lazy, src: Lazy, dim: int, index: int) -> Lazy:
    d = self.dim(dim)
    first = index % self.shape[d]
    return _slice_scatter(region, self, views.unsqueeze(src, d), d, first, first + 1)


# Generators -----------------------------------------------------------------------------------------------------------


@rule("full", "scalar_tensor")
def _full(region: Region, *args: Any, fill_value: Any = None, **_: Any) -> Lazy:
    number = args[-1] if fill_value is None else fill_value
    if not isinstance(number, (int, float)):
        raise Unsupported("a tensor filled with something that is not a number")
    return views.full(region, region.out[0][0], number, region.out[0][1])


rule("iota")(lambda region, length, *, start, step, dtype, **_: iota(region, length, dtype, step, start))


# Gathers --------------------------------------------------------------------------------------------------------------


@rule("gather")
def _gather(region: Region, self: Lazy, dim: int, index: Lazy, *, sparse_grad: bool = False) -> Lazy:
    if self.ndim == 0:
        return self
    d = self.dim(dim)
    for k in range(index.ndim):
        if k != d and index.shape[k] == self.shape[k]:
            region.names.unify(index.names[k], self.names[k])

    origin = region.origin

    def at(where: tuple[Index, ...], guards: Guards) -> int:
        along = picked(self.shape[d], index, where, guards)
        with region.reading(origin):
            return self.at((*where[:d], along, *where[d + 1 :]), guards)

    return Lazy(region, index.shape, self.dtype, index.names, at)


def picked(extent: int, index: Lazy, where: tuple[Index, ...], guards: Guards) -> Index:
    """The index along an axis of ``extent`` that is an element of ``index``; for an extent of 1 it is not read.

    The index must be in range, which torch's kernels check.
    """
    if index.kind not in ("int32", "int64"):
        raise Unsupported("an index that is not an integer")
    return Index(pick=(index.at(where, guards), 1, extent)) if extent > 1 else Index()


rule("embedding")(lambda region, weight, indices, *_, **__: _points(weight, [0], [indices]))


@rule("index", "_unsafe_index")
def _index(region: Region, self: Lazy, indices: Sequence[Lazy | None]) -> Lazy:
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not given or any(i.kind not in ("int32", "int64") for _, i in given):
        raise Unsupported("indexing by other than integer tensors")
    return _points(self, [d for d, _ in given], [counted(i, self.shape[d]) for d, i in given])


def _points(table: Lazy, dims: Sequence[int], indices: Sequence[Lazy]) -> Lazy:
    """``table`` with dimensions ``dims`` replaced by those of their broadcast indices, in torch's order.

    The new dimensions replace ``dims`` if these are adjacent, and are first if not.
    """
    region, origin = table.region, table.region.origin
    shape = torch.broadcast_shapes(*[i.shape for i in indices])  # type: ignore[no-untyped-call]
    names = broadcast_names(region, shape, indices)
    rest = [d for d in range(table.ndim) if d not in dims]
    first = dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0

    def at(where: tuple[Index, ...], guards: Guards) -> int:
        chosen, other = where[first : first + len(shape)], [*where[:first], *where[first + len(shape) :]]
        back = dict(zip(rest, other, strict=True))
        for d, i in zip(dims, indices, strict=True):
            back[d] = picked(table.shape[d], i, broadcast_index(chosen, i.shape), guards)
        with region.reading(origin):
            return table.at(tuple(back[d] for d in range(table.ndim)), guards)

    kept = [(table.shape[d], table.names[d]) for d in rest]
    whole = [*kept[:first], *zip(shape, names, strict=True), *kept[first:]]
    return Lazy(region, [e for e, _ in whole], table.dtype, [n for _, n in whole], at)


def counted(index: Lazy, extent: int) -> Lazy:
    """``index`` with negative numbers counted from the end."""
    negative = pointwise("lt", index, 0, dtype=torch.bool)
    return pointwise("where", negative, pointwise("add", index, extent), index, dtype=index.dtype)


@rule("scatter")
def _scatter(region: Region, self: Lazy, dim: int, index: Lazy, src: Lazy | Number, **kwargs: Any) -> Lazy:
    """One element written per line, as in a one-hot or a cross entropy's backward; other scatters may collide."""
    d = self.dim(dim)
    lines = [e for k, e in enumerate(self.shape) if k != d]
    if kwargs or self.ndim == 0 or index.shape[d] != 1 or [e for k, e in enumerate(index.shape) if k != d] != lines:
        raise Unsupported("a scatter of more than one element per line")
    written = src if isinstance(src, Lazy) else scalar(region, held(src, self.dtype), self.dtype)
    if isinstance(src, Lazy):
        written = views.narrow(cast(src, self.dtype), d, 0, 1)
        if [e for k, e in enumerate(written.shape) if k != d] != lines:
            raise Unsupported("a scatter from a larger tensor")
    shape = [1] * self.ndim
    shape[d] = self.shape[d]
    position = views.reshape(iota(region, self.shape[d], index.dtype), shape)
    return pointwise("where", pointwise("eq", position, index, dtype=torch.bool), written, self, dtype=self.dtype)
