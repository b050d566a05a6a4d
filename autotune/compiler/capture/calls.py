"""Calls written into a captured graph, each with its fake result, so that the graph stays one of fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims


class Calls:
    """Calls put before a node, with their fake results: of operators that Inductor lowers, none that it decomposes."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta = {**self.node.meta, "val": target(*given, **named)}
        made.meta.pop("tensor_meta", None)
        return made

    def to(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self(prims.convert_element_type.default, x, dtype)


def is_static(node: fx.Node) -> bool:
    """Whether the extents of a node's tensor are numbers, and none of them 0."""
    return all(type(extent) is int and extent for extent in node.meta["val"].shape)


def contiguous(call: Calls, x: fx.Node) -> fx.Node:
    """``x`` where its elements lie in their order, else a copy where they do."""
    if x.meta["val"].is_contiguous():
        return x
    return call(aten.clone.default, x, memory_format=torch.contiguous_format)


def laid_out(call: Calls, made: fx.Node, like: torch.Tensor) -> fx.Node:
    """``made`` in the strides of ``like``: arithmetic keeps those of its operands, and the views of the graph and who
    gets its results rely on those of the operator."""
    places = [[t.stride(d) for d in range(t.ndim) if t.shape[d] > 1] for t in (made.meta["val"], like)]
    if places[0] == places[1]:
        return made
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    back = sorted(range(like.ndim), key=order.__getitem__)
    turned = call(aten.permute.default, made, order) if order != sorted(order) else made
    copied = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return call(aten.permute.default, copied, back) if turned is not made else copied


__all__ = ["Calls", "contiguous", "is_static", "laid_out"]
