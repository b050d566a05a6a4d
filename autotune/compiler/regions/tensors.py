"""What regions ask of a graph's nodes: their tensors, which a region may hold, and which are windows of others."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.op_names import PRODUCTS
from autotune.compiler.lower.rules import RULES, pointwise
from autotune.compiler.lower.translate import meta, op_name
from autotune.ir.graph import EIGHT_BIT_FLOATS, STORAGE_BYTES


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's meta value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_of(v)]
    return []


def used_results(node: fx.Node) -> Any:
    """A node's meta value; of a tuple, those elements that are read (others may be empty placeholders)."""
    value = meta(node)
    if not isinstance(value, (tuple, list)) or any(u.target is not operator.getitem for u in node.users):
        return value
    return [value[u.args[1]] for u in node.users]  # type: ignore[index]


def storable(t: torch.Tensor, wide: bool = False) -> bool:
    """Whether a region may hold a tensor; ``wide``: float64 too."""
    known = str(t.dtype).removeprefix("torch.") in STORAGE_BYTES or (wide and t.dtype == torch.float64)
    if t.layout != torch.strided or not known:
        return False
    sizes = (*t.shape, *t.stride())
    return all(type(n) is int for n in sizes) and 0 not in t.shape and not t.is_conj() and not t.is_neg()


def is_pointwise(node: fx.Node) -> bool:
    """Whether a rule of pointwise operators translates a node; none translates a tuple's element."""
    return getattr(RULES.get(op_name(node)), "__module__", "") == pointwise.__name__


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator, whose state orders it against the others that do.

    Attention has the tag of those for its dropout, and draws nothing where that is 0.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for k, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[k] if k < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


_ALIGNMENT = 16
"""Bytes: the widest load of a kernel. A window that begins elsewhere would have to be copied before each launch."""


def is_window(node: fx.Node) -> bool:
    """Whether a view leaves elements out: its result begins where its argument may not."""
    if node.target is operator.getitem:
        return True
    return op_name(node) in ("select", "slice", "narrow", "diagonal")


def bytes_of(value: Any) -> int:
    """Size of a node's tensors; huge where it is not known."""
    total = 0
    for t in tensors_of(value):
        if not all(type(n) is int for n in t.shape):
            return 1 << 62
        total += t.numel() * t.element_size()
    return total


def is_aligned(window: Any, source: Any) -> bool:
    if not isinstance(window, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    offset = (window.storage_offset() - source.storage_offset()) * window.element_size()
    return type(offset) is int and offset % _ALIGNMENT == 0


def is_float8(node: fx.Node) -> bool:
    """Whether a node makes floats of eight bits."""
    return any(str(t.dtype).removeprefix("torch.") in EIGHT_BIT_FLOATS for t in tensors_of(meta(node)))


def factors(product: fx.Node) -> list[fx.Node]:
    """The two that a matrix product multiplies; fewer where they are given by name."""
    first = PRODUCTS[op_name(product)]
    return [a for a in product.args[first : first + 2] if isinstance(a, fx.Node)]
