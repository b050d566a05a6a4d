"""The tensors of a Dynamo graph, and how a result of attention is read: by its elements, or by its strides, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def same_length(a: Any, b: Any) -> bool:
    """Return True if two lengths are one number, or one symbol."""
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
    """Return True if sizes and strides are numbers."""
    return all(type(n) is int for n in (*fake(node).shape, *fake(node).stride()))


_KEEPS = ("transpose", "permute", "movedim", "swapaxes", "to", "float", "type_as", "clone")
"""Methods whose results have strides like what they read."""
_ANY = ("contiguous", "reshape", "flatten", "matmul", "size", "dim", "numel")
"""Methods that take any strides."""


def copies(node: fx.Node) -> list[fx.Node]:
    """The calls that copy a result, or view it where its strides allow that."""
    found = []
    for user in node.users:
        if _is_same(user, node) or (user.op == "call_method" and user.target in (*_KEEPS, "view")):
            found += copies(user)
        elif user.op == "call_method" and user.target in ("contiguous", "reshape", "flatten"):
            found.append(user)
    return found


def _is_same(user: fx.Node, node: fx.Node) -> bool:
    """Return True if ``user`` views ``node`` in its own shape: that is no copy, whatever the strides are."""
    if user.op != "call_method" or user.target not in ("view", "reshape", "flatten") or not is_tensor(user):
        return False
    shapes = fake(user).shape, fake(node).shape
    return len(shapes[0]) == len(shapes[1]) and all(map(same_length, *shapes))


def takes_any_strides(node: fx.Node) -> bool:
    """Return True if all readers of a result take it with any strides.

    Fused kernels give their results in other strides than the products do; a ``view`` that Dynamo found to be allowed
    may not be.
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
