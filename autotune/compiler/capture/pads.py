"""Operands that Inductor has padded for a product, each padded once, in the order in which it lies in memory.

Inductor pads products of odd extents one by one. GPT-2's gradient of the logits, [tokens, 50257], is the operand of two:
of one it pads the rows to 50264, of the other the columns of the transposed tensor. Each is a copy of 1.6 GB here, and
the second one turns the whole in memory, although products read a transposed operand just as well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from autotune.compiler.capture.calls import Calls, is_static

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def share_pads(gm: fx.GraphModule) -> None:
    """Rewrite a graph behind Inductor's joint passes in place.

    Where a tensor is padded for a product and summed, too, as the gradient of a layer with a bias is, the padded one is
    summed: whoever computes the tensor then writes nothing else.

    Args:
        gm: functional aten calls, with fake tensors in ``meta["val"]``.
    """
    graph = gm.graph
    alike: dict[tuple[fx.Node, tuple[int, ...]], list[tuple[fx.Node, list[int]]]] = defaultdict(list)
    for pad in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        if _is_of_a_product(pad):
            source, behind, order = _as_it_lies(pad)
            alike[source, tuple(behind)].append((pad, order))
    for (source, behind), pads in alike.items():
        sums = [user for user in source.users if _is_sum_beside(user, behind)]
        if len(pads) + len(sums) == 1 and pads[0][1] == sorted(pads[0][1]):
            continue
        # Behind the source: a sum of it may come before the first product.
        with graph.inserting_before(_first_of(graph, [*sums, *(pad for pad, _ in pads)])):
            call = Calls(graph, pads[0][0])
            made = call(aten.constant_pad_nd.default, source, [n for b in reversed(behind) for n in (0, b)], 0.0)
        for pad, order in pads:
            with graph.inserting_before(pad):
                turned = Calls(graph, pad)(aten.permute.default, made, order) if order != sorted(order) else made
            pad.replace_all_uses_with(turned)
            graph.erase_node(pad)
        for node in sums:
            _sum_padded(graph, node, made)
    graph.eliminate_dead_code()
    graph.lint()
    gm.recompile()


def _is_of_a_product(pad: fx.Node) -> bool:
    """Whether zeros are put behind an operand of products, and nobody else reads that."""
    source, widths, *value = pad.args
    if not isinstance(source, fx.Node) or not is_static(source) or any(value) or any(widths[::2]):  # type: ignore[arg-type, index]
        return False
    return bool(pad.users) and all(user.target in _PRODUCTS and pad in user.args[-2:] for user in pad.users)


def _as_it_lies(pad: fx.Node) -> tuple[fx.Node, list[int], list[int]]:
    """What is padded, before it was permuted; the zeros behind each of its dimensions; the permutation of the result."""
    source: Any = pad.args[0]
    ndim, widths = source.meta["val"].ndim, pad.args[1]
    last: list[int] = list(widths[1::2])  # type: ignore[index]
    behind, order = [0] * (ndim - len(last)) + last[::-1], list(range(ndim))
    while source.target is aten.permute.default:
        dims = [d % ndim for d in source.args[1]]
        order = [dims[d] for d in order]
        source = source.args[0]
    return source, [behind[order.index(d)] for d in range(ndim)], order


def _is_sum_beside(node: fx.Node, behind: tuple[int, ...]) -> bool:
    """Whether a node sums over none of the dimensions that get zeros."""
    if node.target is not aten.sum.dim_IntList or node.args[1] is None:
        return False
    dims = {d % len(behind) for d in node.args[1]}  # type: ignore[union-attr]
    return bool(dims) and not any(behind[d] for d in dims)


def _first_of(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    wanted = set(nodes)
    return next(node for node in graph.nodes if node in wanted)


def _sum_padded(graph: fx.Graph, node: fx.Node, padded: fx.Node) -> None:
    shape = node.meta["val"].shape
    with graph.inserting_before(node):
        call = Calls(graph, node)
        made = call(node.target, padded, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
        for dim, extent in enumerate(shape):
            if made.meta["val"].shape[dim] != extent:
                made = call(aten.slice.Tensor, made, dim, 0, extent)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


__all__ = ["share_pads"]
