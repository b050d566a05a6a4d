"""Rewrites of matrix products in Inductor's joint graphs, so that they use tensor-core kernels and copy less.

Kernels at full speed read rows in units of 16 bytes, eight numbers in half precision. Mixer's layers have no such rows:
the first product sums over 196 tokens, and the second one writes rows of 196. cuBLAS uses an older kind of kernel,
which takes more than twice as long (docs/decisions/020-products-of-odd-extents.md). Inductor pads operands if the gain
exceeds the cost of the copies. :func:`align_products` copies only the weight.

Inductor pads products of odd extents one by one. RoBERTa's gradient of the logits, [tokens, 50265], is the operand of
two products. Inductor pads the rows to 50272 for one, and the columns of the transposed tensor for the other. The
second copy transposes the tensor in memory, although products read a transposed operand equally fast.
:func:`share_pads` pads the gradient once, in memory order (docs/decisions/021-vocabularies-of-odd-length.md).

The graphs are of functional aten calls, with fake tensors in ``meta["val"]``, and change in place.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import fx

from autotune.compiler.capture.rewriting import Calls, Strides, contiguous, finish, is_static

aten = torch.ops.aten

DEVICES = {"cuda"}
"""Types of devices whose library has slow kernels for unaligned rows."""
_ALIGNED = 8
"""Half-precision elements in 16 bytes."""
_MOST_LEFT = 4
"""Most terms of a sum that the operators after the product may add: each reads one more row of both operands."""
_LEAST_SUM = 128
"""Least number of terms: shorter sums gain too little."""
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


class _Product(NamedTuple):
    """``x @ weight``, of shape [batch, rows, columns].

    Attributes:
        x: [batch, rows, sum], with unit stride along the rows or the sum.
        weight: [sum, columns], the same for the whole batch.
        bias: [columns], or None.
        result: the node that is [batch, rows, columns].
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    result: fx.Node


def align_products(gm: fx.GraphModule) -> None:
    """Rewrite products of a batch with one weight, before Inductor pads them.

    A sum over 196 terms becomes a product over 192 terms, and the following pointwise operators add the other four. A
    product that writes rows of 196 and is read transposed becomes one that writes the transposed result.
    """
    graph, strides = gm.graph, Strides(gm.graph)
    changed = False
    for node in list(graph.nodes):
        strides.follow(node)
        product = _product(node)
        if product is None:
            continue
        made = _aligned(Calls(node), product)
        if made is not None:
            strides.replace(node, made)
            changed = True
    if changed:
        finish(gm)


def _aligned(call: Calls, product: _Product) -> fx.Node | None:
    """The product with aligned rows only; None if it has them already or cannot have them."""
    x, weight, bias, result = product
    (batch, rows, terms), columns = x.meta["val"].shape, weight.meta["val"].shape[1]
    left = terms % _ALIGNED
    across = bool(columns % _ALIGNED)  # write the transposed result, if its readers transpose it
    if across and (rows % _ALIGNED or not result.users or not all(_swaps(user) for user in result.users)):
        return None
    if not (left or across) or (left and not _may_leave(product, left)):
        return None
    of_x, of_weight = (1, 1) if across else (2, 0)  # the dimensions that are summed over
    if across:
        x, weight = call(aten.permute.default, x, [0, 2, 1]), call(aten.permute.default, weight, [1, 0])
    elif left:
        weight = contiguous(call, weight)  # the copy has all elements that are read
    first, whole = (x, weight), terms - left
    if left:
        first = call(aten.slice.Tensor, x, of_x, 0, whole), call(aten.slice.Tensor, weight, of_weight, 0, whole)
    many = call(aten.unsqueeze.default, contiguous(call, first[1]), 0)
    many = call(aten.expand.default, many, [batch, *many.meta["val"].shape[1:]])
    made = call(aten.bmm.default, many, first[0]) if across else call(aten.bmm.default, first[0], many)
    if left:
        total = call.to(made, torch.float32)
        for k in range(whole, terms):
            line = call.to(call(aten.slice.Tensor, weight, of_weight, k, k + 1), torch.float32)
            theirs = call(aten.slice.Tensor, x, of_x, k, k + 1)
            total = call(aten.add.Tensor, total, call(aten.mul.Tensor, theirs, line))
        made = call.to(total, torch.bfloat16)
    if bias is not None:
        made = call(aten.add.Tensor, made, call(aten.unsqueeze.default, bias, 1) if across else bias)
    return call(aten.permute.default, made, [0, 2, 1]) if across else made


def _may_leave(product: _Product, left: int) -> bool:
    """True if the operators after a product may add the last terms of its sum.

    The library rounds the partial sum to bfloat16, like a whole sum. In float16 the partial sum could overflow although
    the whole sum does not.
    """
    x, terms = product.x.meta["val"], product.weight.meta["val"].shape[0]
    rows_side_by_side = x.stride(1) == 1 and x.stride(2) % _ALIGNED == 0
    few = left <= _MOST_LEFT and terms >= _LEAST_SUM
    return few and x.dtype is torch.bfloat16 and rows_side_by_side and _is_read_in_place(product.result)


def _product(node: fx.Node) -> _Product | None:
    """The product with ``node`` as its result, if its device and type need alignment; else None."""
    found = _found(node) or _with_bias(node)
    if found is None or not all(is_static(n) for n in found if n is not None):
        return None
    like = found.x.meta["val"]
    fits = like.device.type in DEVICES and like.dtype in (torch.bfloat16, torch.float16)
    return found if fits and node.meta["val"].dtype == like.dtype else None


def _found(node: fx.Node) -> _Product | None:
    return _of_batch(node) if node.target is aten.bmm.default else _of_rows(node)


def _with_bias(node: fx.Node) -> _Product | None:
    """A product with a separate addition of the bias, as in a layer with a transposed input."""
    made, bias = node.args if node.target is aten.add.Tensor and not node.kwargs else (None, None)
    if not isinstance(made, fx.Node) or not isinstance(bias, fx.Node) or len(made.users) != 1:
        return None
    found = _found(made)
    if found is None or found.bias is not None or bias.meta["val"].shape != made.meta["val"].shape[2:]:
        return None
    return found._replace(bias=bias, result=node)


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
    return _Product(_uncopied(x) if len(flat.users) == 1 else x, weight, bias[0] if bias else None, node)  # type: ignore[arg-type]


def _uncopied(x: fx.Node) -> fx.Node:
    """The source of a copy with one reader; the product can read the source directly."""
    found, node, swapped = x, x, False
    while _swaps(node) or (node.target is aten.clone.default and len(node.users) == 1):
        swapped ^= _swaps(node)
        node = node.args[0]  # type: ignore[assignment]
        found = found if swapped else node
    return found


def _swaps(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.permute.default and node.args[1] == [0, 2, 1]


def _is_read_in_place(node: fx.Node) -> bool:
    """True if only pointwise operators read a node, so that one more before them moves no more bytes."""
    views = (aten.view.default, aten.permute.default, aten.unsqueeze.default)
    return bool(node.users) and all(
        (user.target in views and _is_read_in_place(user)) or torch.Tag.pointwise in getattr(user.target, "tags", ())
        for user in node.users
    )


class _Pad(NamedTuple):
    """A node that pads ``source`` with zeros at the end of each dimension, and then permutes it."""

    node: fx.Node
    source: fx.Node
    behind: tuple[int, ...]
    order: list[int]

    @property
    def is_turned(self) -> bool:
        return self.order != sorted(self.order)


def share_pads(gm: fx.GraphModule) -> None:
    """Share the padded operands of Inductor's padded products.

    If a tensor is padded for a product and also summed, like the gradient of a layer with a bias, the sum reads the
    padded tensor. Products that read the tensor without padding read a slice of the padded one, whose rows are aligned.
    The kernel that computes the tensor then writes nothing else.
    """
    graph = gm.graph
    place = {node: n for n, node in enumerate(graph.nodes)}
    alike: dict[tuple[fx.Node, tuple[int, ...]], list[_Pad]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        if (pad := _pad_of_a_product(node)) is not None:
            alike[pad.source, pad.behind].append(pad)
    for (_, behind), found in alike.items():
        # Repeat the analysis: the rewrite of another group may have replaced a padded sum.
        pads = [pad for one in found if (pad := _pad_of_a_product(one.node)) is not None]
        source = pads[0].source
        made = source.op != "placeholder"  # no kernel writes an input
        sums = [user for user in source.users if made and _is_sum_beside(user, behind)]
        others = [user for user in source.users if made and _feeds_products(user, source)]
        if len(pads) + len(sums) + len(others) > 1 or pads[0].is_turned:
            first = min((*sums, *others, *(pad.node for pad in pads)), key=place.__getitem__)
            _share(graph, first, pads, sums, others)
    finish(gm)


def _share(graph: fx.Graph, first: fx.Node, pads: list[_Pad], sums: list[fx.Node], others: list[fx.Node]) -> None:
    """Replace all ``pads`` by one padded tensor before ``first``, of which ``others`` read a slice."""
    _, source, behind, _ = pads[0]
    widths = [n for b in reversed(behind) for n in (0, b)]
    padded = Calls(pads[0].node, before=first)(aten.constant_pad_nd.default, source, widths, 0.0)
    for pad in pads:
        turned = Calls(pad.node)(aten.permute.default, padded, pad.order) if pad.is_turned else padded
        pad.node.replace_all_uses_with(turned)
        graph.erase_node(pad.node)
    for node in others:
        call = Calls(node)
        inner = _cut(call, padded, source.meta["val"].shape)
        if node.target is aten.permute.default:
            node.replace_all_uses_with(call(aten.permute.default, inner, node.args[1]))
            graph.erase_node(node)
        else:
            node.replace_input_with(source, inner)
    for node in sums:
        call = Calls(node)
        total = call(aten.sum.dim_IntList, padded, *node.args[1:], **node.kwargs)
        node.replace_all_uses_with(_cut(call, total, node.meta["val"].shape))
        graph.erase_node(node)


def _cut(call: Calls, x: fx.Node, extents: torch.Size) -> fx.Node:
    """The first elements of each dimension."""
    for dim, extent in enumerate(extents):
        if x.meta["val"].shape[dim] != extent:
            x = call(aten.slice.Tensor, x, dim, 0, extent)
    return x


def _pad_of_a_product(node: fx.Node) -> _Pad | None:
    """The pad of a node that pads an operand and that only products read, in the source's memory order; else None."""
    args: tuple[Any, ...] = node.args
    source, widths = args[:2]
    if not is_static(source) or node.kwargs or any(args[2:]) or any(widths[::2]) or not node.users:
        return None
    if not all(type(width) is int and width >= 0 for width in widths):  # a symbol, or cut, not padded
        return None
    if not all(user.target in _PRODUCTS and node in user.args[-2:] for user in node.users):
        return None
    ndim = source.meta["val"].ndim
    behind = [0] * (ndim - len(widths) // 2) + list(widths[1::2])[::-1]
    order = list(range(ndim))
    while source.target is aten.permute.default:
        dims = [d % ndim for d in source.args[1]]
        order, source = [dims[d] for d in order], source.args[0]
    return _Pad(node, source, tuple(behind[order.index(d)] for d in range(ndim)), order)


def _feeds_products(node: fx.Node, source: fx.Node) -> bool:
    """True if a node reads ``source`` as an operand of a product, or permutes it for products alone."""
    if node.target is aten.permute.default:
        return bool(node.users) and all(_feeds_products(user, node) for user in node.users)
    return node.target in _PRODUCTS and source not in node.args[:-2]


def _is_sum_beside(node: fx.Node, behind: tuple[int, ...]) -> bool:
    """True if a node sums to one row, over dimensions without padding; several rows, cut, would have gaps."""
    args: tuple[Any, ...] = node.args
    if node.target is not aten.sum.dim_IntList or args[1] is None:
        return False
    dims = {d % len(behind) for d in args[1]}
    is_row = sum(extent > 1 for extent in node.meta["val"].shape) <= 1
    return bool(dims) and is_row and not any(behind[d] for d in dims)
