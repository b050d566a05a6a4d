"""Batches of matrices multiplied by one weight, written so that tensor-core kernels take them.

The kernels that multiply at full speed read rows of whole 16 bytes, eight numbers in half precision. Mixer's layers
over 196 tokens have no such rows: 196 is what the first product sums over and what the second one writes. cuBLAS takes
a kernel of an older kind, which needs 217 us on one H200 where 83 are possible, and 183 where 65 are (256 images).
Inductor pads operands where that pays with the copies that it takes. Here nothing is copied but the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from autotune.compiler.capture.calls import Calls, is_static
from autotune.compiler.capture.strides import Strides

aten = torch.ops.aten

DEVICES = {"cuda"}
"""Types of devices whose library has slow kernels for rows of other lengths."""
_ALIGNED = 8
"""Numbers of half precision in 16 bytes."""
_MOST_LEFT = 4
"""How many terms of a sum the operators behind the product may add: each reads one row more of both operands."""
_LEAST_SUM = 128
"""Shorter sums leave too little to win."""


class _Product(NamedTuple):
    """``x @ weight``, of shape [batch, rows, columns].

    Attributes:
        x: [batch, rows, sum], in memory with the rows side by side or the terms.
        weight: [sum, columns], the same for all of the batch.
        bias: [columns], or None.
        result: the node that is [batch, rows, columns].
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    result: fx.Node


def align_products(gm: fx.GraphModule) -> None:
    """Rewrite a graph of Inductor's joint passes in place.

    A sum over 196 terms becomes a product over 192 and, in the pointwise operators that follow, four terms more. A
    product that writes rows of 196 and is read the other way round becomes one that writes that way.

    Args:
        gm: functional aten calls, with fake tensors in ``meta["val"]``.
    """
    graph, strides = gm.graph, Strides(gm.graph)
    changed = False
    for node in list(graph.nodes):
        strides.follow(node)
        product = _product(node)
        if product is None:
            continue
        with graph.inserting_before(node):
            call = Calls(graph, node)
            made = _summed_apart(call, product) or _turned(call, product)
        if made is not None:
            strides.replace(node, made)
            changed = True
    if changed:
        graph.eliminate_dead_code()
        graph.lint()
        gm.recompile()


def _summed_apart(call: Calls, product: _Product) -> fx.Node | None:
    """The product with the last terms of its sum added by pointwise operators; None where that does not fit.

    The library rounds what it has summed to bfloat16, as it does the whole sum. In float16 that could overflow where
    the whole sum does not.
    """
    x, weight, _, result = product
    terms, columns = weight.meta["val"].shape
    left = terms % _ALIGNED
    if not 0 < left <= _MOST_LEFT or terms < _LEAST_SUM or columns % _ALIGNED:
        return None
    rows_side_by_side = x.meta["val"].stride(1) == 1 and x.meta["val"].stride(2) % _ALIGNED == 0
    if result.meta["val"].dtype is not torch.bfloat16 or not rows_side_by_side or not _is_read_in_place(result):
        return None
    whole = terms - left
    lines = call(aten.clone.default, weight, memory_format=torch.contiguous_format)  # rows of ``columns``
    first = call(aten.slice.Tensor, x, 2, 0, whole), call(aten.slice.Tensor, lines, 0, 0, whole)
    total = call.to(_multiplied(call, *first), torch.float32)
    for k in range(whole, terms):
        line = call.to(call(aten.slice.Tensor, lines, 0, k, k + 1), torch.float32)
        total = call(aten.add.Tensor, total, call(aten.mul.Tensor, call(aten.slice.Tensor, x, 2, k, k + 1), line))
    total = call.to(total, torch.bfloat16)
    return total if product.bias is None else call(aten.add.Tensor, total, product.bias)


def _turned(call: Calls, product: _Product) -> fx.Node | None:
    """The product with its rows across, where they are read so and one of these lengths alone is aligned."""
    x, weight, bias, result = product
    (_, rows, terms), columns = x.meta["val"].shape, weight.meta["val"].shape[1]
    if rows % _ALIGNED or terms % _ALIGNED or columns % _ALIGNED == 0:
        return None
    if not result.users or not all(_swaps(user) for user in result.users):
        return None
    left = call(aten.permute.default, weight, [1, 0])
    if not left.meta["val"].is_contiguous():
        left = call(aten.clone.default, left, memory_format=torch.contiguous_format)
    right = call(aten.permute.default, x, [0, 2, 1])
    batch = right.meta["val"].shape[0]
    left = call(aten.expand.default, call(aten.unsqueeze.default, left, 0), [batch, columns, terms])
    made = call(aten.bmm.default, left, right)
    if bias is not None:
        made = call(aten.add.Tensor, made, call(aten.unsqueeze.default, bias, 1))
    return call(aten.permute.default, made, [0, 2, 1])


def _multiplied(call: Calls, x: fx.Node, weight: fx.Node) -> fx.Node:
    batch = x.meta["val"].shape[0]
    many = call(aten.expand.default, call(aten.unsqueeze.default, weight, 0), [batch, *weight.meta["val"].shape])
    return call(aten.bmm.default, x, many)


def _product(node: fx.Node) -> _Product | None:
    """The product that ``node`` is the result of, on a device and of a type that need it; None if it is no such."""
    found = _of_batch(node) if node.target is aten.bmm.default else _of_rows(node)
    if found is None or not all(is_static(n) for n in found if n is not None):
        return None
    like = found.x.meta["val"]
    fits = like.device.type in DEVICES and like.dtype in (torch.bfloat16, torch.float16)
    return found if fits and node.meta["val"].dtype == like.dtype else None


def _of_batch(node: fx.Node) -> _Product | None:
    """``bmm(x, weight.expand(...))``."""
    x, many = node.args
    weight: Any = many
    while weight.target in (aten.expand.default, aten.view.default, aten.unsqueeze.default):
        weight = weight.args[0]
    wanted, has = many.meta["val"], weight.meta["val"]  # type: ignore[union-attr]
    if wanted.stride(0) or wanted.shape[1:] != has.shape or wanted.stride()[1:] != has.stride():
        return None
    return _Product(x, weight, None, node)  # type: ignore[arg-type]


def _of_rows(node: fx.Node) -> _Product | None:
    """``mm(x.view(-1, sum), weight).view(batch, rows, columns)``, or ``addmm``."""
    if node.target is not aten.view.default or node.meta["val"].ndim != 3:
        return None
    made = node.args[0]
    if not isinstance(made, fx.Node) or made.target not in (aten.mm.default, aten.addmm.default) or made.kwargs:
        return None
    *bias, flat, weight = made.args
    if len(made.users) != 1 or not isinstance(flat, fx.Node) or flat.target is not aten.view.default:
        return None
    x: Any = flat.args[0]
    (batch, rows, columns), (terms, wide) = node.meta["val"].shape, weight.meta["val"].shape  # type: ignore[union-attr]
    if columns != wide or list(x.meta["val"].shape) != [batch, rows, terms]:
        return None
    if bias and list(bias[0].meta["val"].shape) != [columns]:  # type: ignore[union-attr]
        return None
    # A copy for this product alone is not needed: what it copies can be read as it lies.
    if x.target is aten.clone.default and len(x.users) == 1 and len(flat.users) == 1 and _swaps(x.args[0]):
        x = x.args[0]
    return _Product(x, weight, bias[0] if bias else None, node)  # type: ignore[arg-type]


def _swaps(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.permute.default and node.args[1] == [0, 2, 1]


def _is_read_in_place(node: fx.Node) -> bool:
    """Whether pointwise operators alone read a node, so that one more before them costs no memory's time."""
    views = (aten.view.default, aten.permute.default, aten.unsqueeze.default)
    return bool(node.users) and all(
        (user.target in views and _is_read_in_place(user)) or torch.Tag.pointwise in getattr(user.target, "tags", ())
        for user in node.users
    )


__all__ = ["align_products"]
