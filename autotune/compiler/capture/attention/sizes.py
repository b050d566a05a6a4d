"""Sizes of a Dynamo graph's tensors, each a number or a symbol that has another value in each call.

A comparison of symbols by ``==`` or ``<`` adds a guard to Dynamo, so that other sizes cause a recompilation. The
functions here compare expressions instead. :func:`fits` alone adds a guard, and only one that batches rarely fail.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def same_length(a: Any, b: Any) -> bool:
    """Return True if two lengths are the same number or the same symbol."""
    symbolic = isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)
    return bool(a.node.expr == b.node.expr) if symbolic else type(a) is int and type(b) is int and a == b


def same_shape(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return True for two shapes of the same lengths."""
    return len(left) == len(right) and all(map(same_length, left, right))


def expression(size: Any) -> Any:
    """A size as a key of a dictionary."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def exceeds(size: Any, least: int) -> bool:
    """Return True if a size is above ``least`` in each call of the graph."""
    return bool(statically_known_true(size > least))


def fits(size: Any, most: int) -> bool:
    """Return True if a size is at most ``most`` in each call of the graph; a guard ensures it where that is unknown."""
    if type(size) is int or statically_known_true(size <= most):
        return bool(size <= most)
    return not is_bounded(size) and bool(size <= most)


def is_bounded(size: Any) -> bool:
    """Return True for a symbolic size with an upper bound: PyTorch refuses to narrow a range from the user."""
    if not isinstance(size, torch.SymInt):
        return False
    known = (size.node.shape_env.var_to_range.get(name) for name in size.node.expr.free_symbols)
    upper = [found.upper for found in known if found is not None]
    return any(isinstance(most, sympy.Integer) and int(most) < sys.maxsize - 1 for most in upper)


def hint(size: Any) -> int | None:
    """A size at compile time; None for a symbol without one."""
    value = size.node.hint if isinstance(size, torch.SymInt) else size
    return value if type(value) is int else None


def at_hints(value: Tensor) -> Tensor | None:
    """A fake tensor as it is at compile time, without symbols; None if a size has no hint."""
    if not isinstance(value, FakeTensor) or all(type(n) is int for n in (*value.shape, *value.stride())):
        return value
    shape, strides = ([hint(n) for n in sizes] for sizes in (value.shape, value.stride()))
    if None in (*shape, *strides):
        return None
    with value.fake_mode:
        made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)  # type: ignore[arg-type]
    return made.requires_grad_(value.requires_grad)
