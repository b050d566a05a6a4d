"""Operands that Inductor has padded for a product, each padded once, in the order in which it lies in memory.

Inductor pads products of odd extents one by one. RoBERTa's gradient of the logits, [tokens, 50265], is the operand of
two: of one it pads the rows to 50272, of the other the columns of the transposed tensor. Each is a copy of 3.3 GB here,
and the second one turns the whole in memory, although products read a transposed operand just as well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import fx

from autotune.compiler.capture.calls import Calls, is_static

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


class _Pad(NamedTuple):
    """``node``: zeros behind ``source``, so many for each dimension; permuted so."""

    node: fx.Node
    source: fx.Node
    behind: tuple[int, ...]
    order: list[int]

    @property
    def is_turned(self) -> bool:
        return self.order != sorted(self.order)


def share_pads(gm: fx.GraphModule) -> None:
    """Rewrite a graph behind Inductor's joint passes in place.

    Where a tensor is padded for a product and summed, too, as the gradient of a layer with a bias is, the padded one is
    summed: whoever computes the tensor then writes nothing else.

    Args:
        gm: functional aten calls, with fake tensors in ``meta["val"]``.
    """
    graph = gm.graph
    place = {node: n for n, node in enumerate(graph.nodes)}
    alike: dict[tuple[fx.Node, tuple[int, ...]], list[_Pad]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        if (pad := _pad_of_a_product(node)) is not None:
            alike[pad.source, pad.behind].append(pad)
    for (_, behind), found in alike.items():
        # Read again: what was padded may have been a sum that another group has rewritten.
        pads = [pad for one in found if (pad := _pad_of_a_product(one.node)) is not None]
        source = pads[0].source
        made = source.op != "placeholder"  # what is given is written by nobody
        sums = [user for user in source.users if made and _is_sum_beside(user, behind)]
        if len(pads) + len(sums) > 1 or pads[0].is_turned:
            first = min((*sums, *(pad.node for pad in pads)), key=place.__getitem__)
            _share(graph, first, pads, sums)
    graph.eliminate_dead_code()
    graph.lint()
    gm.recompile()


def _share(graph: fx.Graph, first: fx.Node, pads: list[_Pad], sums: list[fx.Node]) -> None:
    """One padded tensor before ``first``, for all of these."""
    _, source, behind, _ = pads[0]
    with graph.inserting_before(first):
        call = Calls(graph, pads[0].node)
        padded = call(aten.constant_pad_nd.default, source, [n for b in reversed(behind) for n in (0, b)], 0.0)
    for pad in pads:
        with graph.inserting_before(pad.node):
            call = Calls(graph, pad.node)
            turned = call(aten.permute.default, padded, pad.order) if pad.is_turned else padded
        pad.node.replace_all_uses_with(turned)
        graph.erase_node(pad.node)
    for node in sums:
        with graph.inserting_before(node):
            call = Calls(graph, node)
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
    """Zeros behind an operand of products that nobody else reads, as a pad of what lies in memory; None for others."""
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


def _is_sum_beside(node: fx.Node, behind: tuple[int, ...]) -> bool:
    """Whether a node sums over none of the dimensions that get zeros, to one row: several, cut, would lie apart."""
    args: tuple[Any, ...] = node.args
    if node.target is not aten.sum.dim_IntList or args[1] is None:
        return False
    dims = {d % len(behind) for d in args[1]}
    is_row = sum(extent > 1 for extent in node.meta["val"].shape) <= 1
    return bool(dims) and is_row and not any(behind[d] for d in dims)


__all__ = ["share_pads"]
