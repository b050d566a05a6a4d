"""Views, slices and concatenations of lazy tensors: no operators but the selects of a concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autotune.compiler.lower.lazy import (
    Dims,
    Guards,
    Index,
    Lazy,
    Number,
    Region,
    broadcast_index,
    broadcast_names,
    cast,
    fitting,
    held,
    kind,
)
from autotune.errors import Unsupported
from autotune.ir.build import position_type

Where = tuple[Index, ...]
_ZERO = Index()
MOST_PARTS = 16
"""Tensors in a concatenation above which it is left to torch: every element would read each of them."""


def numbers(value: Any) -> list[int]:
    """A list of plain integers (a shape, some dimensions). Raises Unsupported for symbolic ones."""
    out = [value] if isinstance(value, int) else list(value)
    if not all(type(n) is int for n in out):
        raise Unsupported("symbolic shapes")
    return out


def full(region: Region, shape: Sequence[int], number: Number, dtype: torch.dtype) -> Lazy:
    """A tensor filled with ``number``."""
    fitting(number, dtype)
    number = held(number, dtype)
    names = [region.names.new(e) for e in shape]
    return Lazy(region, shape, dtype, names, lambda _i, _g: region.build.const(number, kind(dtype)))


def _view(x: Lazy, shape: Sequence[int], names: Sequence[Dims], where: Callable[[Where], Iterable[Index]]) -> Lazy:
    """``x`` as a view; ``where`` returns the index into ``x`` of an index of the view."""
    return Lazy(x.region, shape, x.dtype, names, lambda index, guards: x.at(tuple(where(index)), guards))


def permute(x: Lazy, dims: Sequence[int]) -> Lazy:
    order = [x.dim(d) for d in numbers(dims)]
    back = sorted(range(len(order)), key=order.__getitem__)
    names = [x.names[d] for d in order]
    return _view(x, [x.shape[d] for d in order], names, lambda index: [index[k] for k in back])


def expand(x: Lazy, shape: Sequence[int]) -> Lazy:
    """Broadcast to ``shape``; -1 keeps an extent."""
    lead = len(numbers(shape)) - x.ndim
    target = [x.shape[d - lead] if e == -1 and d >= lead else e for d, e in enumerate(shape)]
    if lead < 0 or any(e not in (1, t) for e, t in zip(x.shape, target[lead:], strict=True)):
        raise Unsupported(f"an expansion from {x.shape} to {tuple(shape)}")
    names = broadcast_names(x.region, target, [x])
    return _view(x, target, names, lambda index: broadcast_index(index, x.shape))


def _groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[range, range]]:
    """The finest split of two shapes of equal size into runs of dimensions of equal size."""
    out: list[tuple[range, range]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        i0, j0 = i, j
        pa = pb = 1
        if i < len(a):
            pa, i = a[i], i + 1
        if j < len(b):
            pb, j = b[j], j + 1
        while pa != pb:
            if pa < pb:
                pa, i = pa * a[i], i + 1
            else:
                pb, j = pb * b[j], j + 1
        out.append((range(i0, i), range(j0, j)))
    return out


def reshape(x: Lazy, shape: Sequence[int]) -> Lazy:
    """The same elements in row-major order as ``shape``; one extent may be -1."""
    target = numbers(shape)
    if -1 in target:
        rest = math.prod(e for e in target if e != -1)
        target[target.index(-1)] = x.numel // rest
    if math.prod(target) != x.numel:
        raise Unsupported(f"a reshape from {x.shape} to {tuple(shape)}")
    region = x.region
    # Dimensions of extent 1 have no index: leave them out, so that the groups are as fine as possible.
    src = [d for d in range(x.ndim) if x.shape[d] != 1]
    dst = [d for d in range(len(target)) if target[d] != 1]
    groups = _groups([x.shape[d] for d in src], [target[d] for d in dst])
    names: list[tuple[int, ...]] = [()] * len(target)
    for left, right in groups:
        if len(left) == len(right) == 1:
            names[dst[right[0]]] = x.names[src[left[0]]]
            continue
        inside: list[int] = []
        outside: list[int] = []
        for k in left:
            inside.extend(x.names[src[k]])
        for k in right:
            names[dst[k]] = region.names.new(target[dst[k]])
            outside.extend(names[dst[k]])
        region.names.unify(inside, outside)

    def where(index: Where) -> list[Index]:
        back: list[Index] = [_ZERO] * x.ndim
        for left, right in groups:
            linear, step = _ZERO, 1
            for k in reversed(right):
                linear = region.join(linear, index[dst[k]].scaled(step))
                step *= target[dst[k]]
            for k in reversed(left[1:]):
                linear, back[src[k]] = region.split_index(linear, x.shape[src[k]])
            back[src[left[0]]] = linear
        return back

    return _view(x, target, names, where)


def squeeze(x: Lazy, dims: int | Sequence[int] | None = None) -> Lazy:
    given = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {x.dim(d) for d in given} if x.ndim else set()
    return reshape(x, [e for d, e in enumerate(x.shape) if d not in gone or e != 1])


def unsqueeze(x: Lazy, dim: int) -> Lazy:
    d = dim + x.ndim + 1 if dim < 0 else dim
    return reshape(x, [*x.shape[:d], 1, *x.shape[d:]])


def narrow(x: Lazy, dim: int, start: int | None = None, stop: int | None = None, step: int = 1) -> Lazy:
    """``x[..., start:stop:step, ...]`` with Python's rules for negative and too large bounds."""
    d = x.dim(dim)
    first, last, step = slice(start, stop, step).indices(x.shape[d])
    count = len(range(first, last, step))
    if count == x.shape[d]:
        return x
    if count == 0:
        raise Unsupported("an empty slice")
    names = [*x.names[:d], x.region.names.new(count), *x.names[d + 1 :]]
    shape = [*x.shape[:d], count, *x.shape[d + 1 :]]
    return _view(x, shape, names, lambda index: (*index[:d], index[d].scaled(step, first), *index[d + 1 :]))


def flip(x: Lazy, dims: Sequence[int]) -> Lazy:
    """``x`` reversed along ``dims``: a gather, since no load has a negative stride."""
    region, gone = x.region, sorted({x.dim(d) for d in numbers(dims)} - {d for d, e in enumerate(x.shape) if e == 1})

    def where(index: Where) -> list[Index]:
        back = list(index)
        for d in gone:
            extent = x.shape[d]
            place, whole = index[d].scaled(-1, extent - 1), position_type(extent)
            back[d] = Index(pick=(region.build.index(place.terms, place.offset, place.pick, whole), 1, extent))
        return back

    return _view(x, x.shape, x.names, where)


def select(x: Lazy, dim: int, position: int) -> Lazy:
    d = x.dim(dim)
    there = Index((), position % x.shape[d])
    names = [*x.names[:d], *x.names[d + 1 :]]
    return _view(x, [*x.shape[:d], *x.shape[d + 1 :]], names, lambda index: (*index[:d], there, *index[d:]))


def split(x: Lazy, sizes: int | Sequence[int], dim: int = 0) -> tuple[Lazy, ...]:
    extent = x.shape[x.dim(dim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - at) for at in range(0, extent, sizes)]
    out, start = [], 0
    for n in sizes:
        out.append(narrow(x, dim, start, start + n))
        start += n
    return tuple(out)


def diagonal(x: Lazy, offset: int = 0, a: int = 0, b: int = 1) -> Lazy:
    a, b = x.dim(a), x.dim(b)
    rows, cols = max(-offset, 0), max(offset, 0)
    count = min(x.shape[a] - rows, x.shape[b] - cols)
    if count <= 0 or a == b:
        raise Unsupported("an empty diagonal")
    kept = [d for d in range(x.ndim) if d not in (a, b)]

    def where(index: Where) -> list[Index]:
        back = dict(zip(kept, index[:-1], strict=True))
        back |= {a: index[-1].scaled(1, rows), b: index[-1].scaled(1, cols)}
        return [back[d] for d in range(x.ndim)]

    names = [*(x.names[d] for d in kept), x.region.names.new(count)]
    return _view(x, [*(x.shape[d] for d in kept), count], names, where)


def unbind(x: Lazy, dim: int = 0) -> tuple[Lazy, ...]:
    return tuple(select(x, dim, k) for k in range(x.shape[x.dim(dim)]))


def repeat(x: Lazy, times: Sequence[int]) -> Lazy:
    """``x`` tiled ``times`` along each dimension."""
    if min(numbers(times), default=1) < 1:
        raise Unsupported("a tensor repeated 0 times")
    shape = [1] * (len(times) - x.ndim) + list(x.shape)
    apart = reshape(x, [e for extent in shape for e in (1, extent)])
    tiled = expand(apart, [e for pair in zip(times, shape, strict=True) for e in pair])
    return reshape(tiled, [n * e for n, e in zip(times, shape, strict=True)])


def _threshold(region: Region, index: Index, bound: int) -> tuple[int, int]:
    """(axis, t) such that ``index < bound`` where and only where ``axis < t``."""
    if not index.terms or any(c < 0 for _, c in index.terms):
        raise Unsupported("a concatenation read backwards")
    axis, step = max(index.terms, key=lambda t: t[1])
    rest = sum(c * (region.build.extents[a] - 1) for a, c in index.terms if a != axis)
    quotient, remainder = divmod(bound - index.offset, step)
    if rest and (remainder or rest >= step):
        raise Unsupported("a concatenation that is not aligned with the dimensions made of it")
    return axis, quotient + (remainder > 0)


def _guarded(guards: Guards, axis: int, lo: int, hi: int) -> Guards:
    kept = []
    for a, low, high in guards:
        if a == axis:
            lo, hi = max(lo, low), min(hi, high)
        else:
            kept.append((a, low, high))
    return tuple(sorted([*kept, (axis, lo, hi)]))


def cat(parts: Sequence[Lazy], dim: int = 0) -> Lazy:
    """Concatenate by selects between the parts' elements; a part is loaded only where it is selected."""
    # torch allows tensors of shape [0] in any concatenation; these have no elements and are never passed here.
    region, d = parts[0].region, parts[0].dim(dim)
    if len(parts) == 1:
        return parts[0]
    if len(parts) > MOST_PARTS:
        raise Unsupported(f"a concatenation of {len(parts)} tensors")
    dtype = parts[0].dtype
    for p in parts[1:]:
        dtype = torch.promote_types(dtype, p.dtype)
    parts = [cast(p, dtype) for p in parts]
    starts = [0]
    for p in parts:
        starts.append(starts[-1] + p.shape[d])
    shape = list(parts[0].shape)
    shape[d] = 1
    names = broadcast_names(region, shape, [narrow(p, d, 0, 1) for p in parts])
    shape[d] = starts[-1]
    names[d] = region.names.new(starts[-1])

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        build, i = region.build, index[d]
        if i.pick is not None:
            return _picked(parts, starts, d, index, guards)
        low, high = i.offset, i.offset
        for a, c in i.terms:
            bounds = [g for g in guards if g[0] == a]
            lo = bounds[0][1] if bounds else 0
            hi = (bounds[0][2] if bounds else build.extents[a]) - 1
            low, high = low + c * max(lo, 0), high + c * min(hi, build.extents[a] - 1)
        inside = [k for k in range(len(parts)) if starts[k] <= high and low < starts[k + 1]]
        if not inside:  # only under a guard that is never true, so any element will do
            return build.const(0, kind(dtype))
        out = -1
        for k in reversed(inside):
            own, bound = guards, None
            if k != inside[0]:
                axis, t = _threshold(region, i, starts[k])
                own = _guarded(own, axis, t, build.extents[axis])
            if k != inside[-1]:
                bound = _threshold(region, i, starts[k + 1])
                own = _guarded(own, bound[0], 0, bound[1])
            value = parts[k].at((*index[:d], i.scaled(1, -starts[k]), *index[d + 1 :]), own)
            out = value if bound is None else _choose(region, bound, value, out)
        return out

    return Lazy(region, shape, dtype, names, at)


def _picked(parts: Sequence[Lazy], starts: Sequence[int], d: int, index: tuple[Index, ...], guards: Guards) -> int:
    """An element of a concatenation at an index that is a value: a select among each part's nearest element."""
    build, i = parts[0].region.build, index[d]
    whole = position_type(starts[-1])
    place = build.index(i.terms, i.offset, i.pick, whole)
    out = -1
    for k in reversed(range(len(parts))):
        extent = parts[k].shape[d]
        here = Index()
        if extent > 1:
            own = build.pointwise("sub", [place, build.const(starts[k], whole)])
            own = build.pointwise("maximum", [own, build.const(0, whole)]) if k else own
            last = build.const(extent - 1, whole)
            here = Index(pick=(build.pointwise("minimum", [own, last]) if k + 1 < len(parts) else own, 1, extent))
        value = parts[k].at((*index[:d], here, *index[d + 1 :]), guards)
        if k + 1 < len(parts):
            before = build.pointwise("lt", [place, build.const(starts[k + 1], whole)])
            value = build.pointwise("where", [before, value, out])
        out = value
    return out


def _choose(region: Region, bound: tuple[int, int], then: int, other: int) -> int:
    """``then`` where ``axis < t``, else ``other``; for a guarded load and a zero, no select is needed."""
    build, (axis, t) = region.build, bound
    a, b = build.values[then], build.values[other]
    if b.is_zero and any(g[0] == axis and g[2] <= t for g in a.guards):
        return then
    if a.is_zero and any(g[0] == axis and g[1] >= t for g in b.guards):
        return other
    whole = position_type(build.extents[axis])
    position = build.index(((axis, 1),), 0, None, whole)
    return build.pointwise("where", [build.pointwise("lt", [position, build.const(t, whole)]), then, other])
