"""Index-add: the gradients of an embedding and of indexing, and additions at an index.

A sum is one value of the graph (``sum_at``). It is stored once and without atomic additions. Operators that add to it
or read it, such as the gradient of a decoder tied to the embedding, fuse with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import Guards, Index, Lazy, Number, Region, pointwise, scalar
from autotune.compiler.lower.rules.table import counted, rule
from autotune.errors import Unsupported
from autotune.ir.build import Builder


def _sum_at(rows: Lazy, destinations: Lazy, extent: int) -> Lazy:
    """The fp32 sum [extent, *rest] of the rows [*destinations.shape, *rest] of each index in ``destinations``.

    Rows with an index outside [0, extent) are ignored.
    """
    if rows.kind != "float32" or destinations.kind not in ("int32", "int64"):
        raise Unsupported("sums at indices of other types than floats at integers")
    region, tokens, origin = rows.region, destinations.ndim, rows.region.origin
    for d in range(tokens):
        if destinations.shape[d] > 1:
            region.names.unify(destinations.names[d], rows.names[d])

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        build, where = region.build, index[0]
        used = {a for a, _, _ in guards}
        for i in index:
            used.update(a for a, _ in i.terms)
            used.update(build.values[i.pick[0]].axes if i.pick else ())
        runs = zip(destinations.names, destinations.shape, strict=True)
        token = tuple([region.run_over(n, used) if e > 1 else Index() for n, e in runs])
        over = [a for i in token for a, _ in i.terms]
        destination, term = destinations.at(token), rows.at((*token, *index[1:]), guards)
        if extent == 1 or not over:  # one index, or one term
            here = build.index(where.terms, where.offset, where.pick, build.values[destination].dtype)
            found = build.pointwise("eq", [destination, here])
            return build.reduce("sum", build.pointwise("where", [found, term, build.const(0.0, "float32")]), over)
        axis = where.terms[0][0] if where.terms else -1
        if where != Index(((axis, 1),)) or build.extents[axis] != extent:
            raise Unsupported("sums at indices of which a part is read")
        if axis in build.values[term].axes:
            raise Unsupported("a diagonal of sums at indices")
        if not set(over) & set(build.values[destination].axes) or not _walked(build, term, over):
            raise Unsupported("terms or indices that are the same everywhere")
        _, ways = region.work.setdefault(origin, (made.numel, {}))
        ways[index, guards] = region.elements(index, guards)
        return build.sum_at(term, destination, over, axis)

    names = [region.names.new(extent), *rows.names[tokens:]]
    made = Lazy(region, (extent, *rows.shape[tokens:]), rows.dtype, names, at)
    return made


def _walked(build: Builder, term: int, over: Sequence[int]) -> bool:
    """True if a term has columns or is read from memory; no kernel sums terms made from the token's index alone."""
    found, stack = set(build.values[term].axes) - set(over), [term]
    while stack and not found:
        v = build.values[stack.pop()]
        if v.op in ("load", "gather"):
            return True
        stack += v.args
    return bool(found)


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
