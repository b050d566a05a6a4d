"""Tensors of a Dynamo graph, and the readers of an attention result, which may depend on its strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def same_length(a: Any, b: Any) -> bool:
    """Return True if two lengths are the same number or the same symbol."""
    symbolic = isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)
    return bool(a.node.expr == b.node.expr) if symbolic else type(a) is int and type(b) is int and a == b


def is_tensor(node: Any) -> bool:
    """Return True if a node's result is one dense tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def fake(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node's result."""
    found: torch.Tensor = node.meta["example_value"]
    return found


def is_static(node: fx.Node) -> bool:
    """Return True if sizes and strides are static."""
    return all(type(n) is int for n in (*fake(node).shape, *fake(node).stride()))


_KEEPS = ("transpose", "permute", "movedim", "swapaxes", "to", "float", "type_as", "clone")
"""Methods whose results have the strides of their argument."""
_ANY = ("contiguous", "reshape", "flatten", "matmul", "size", "dim", "numel")
"""Methods that accept any strides."""


def copies(node: fx.Node) -> list[fx.Node]:
    """The calls that copy a result, or view it if its strides allow that."""
    found = []
    for user in node.users:
        if _is_same(user, node) or (user.op == "call_method" and user.target in (*_KEEPS, "view")):
            found += copies(user)
        elif user.op == "call_method" and user.target in ("contiguous", "reshape", "flatten"):
            found.append(user)
    return found


def _is_same(user: fx.Node, node: fx.Node) -> bool:
    """Return True if ``user`` views ``node`` in the same shape, which is no copy for any strides."""
    if user.op != "call_method" or user.target not in ("view", "reshape", "flatten") or not is_tensor(user):
        return False
    shapes = fake(user).shape, fake(node).shape
    return len(shapes[0]) == len(shapes[1]) and all(map(same_length, *shapes))


def takes_any_strides(node: fx.Node) -> bool:
    """Return True if all readers of a result accept any strides.

    The results of fused kernels have other strides than those of the products, so a ``view`` that Dynamo found valid
    may become invalid.
    """
    for user in node.users:
        if user.op != "call_method":
            return False
        if _is_same(user, node) or user.target in _KEEPS:
            if not takes_any_strides(user):
                return False
        elif user.target not in _ANY:
            return False
    return True
