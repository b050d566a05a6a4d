"""Decomposition of masks that depend on inputs: the valid keys of each batch row, and a known structure.

A mask ``m[b, h, i, j]`` is decomposed through its computation: ``and`` of tensors, repeats and views. A part that
depends on no input of the graph is evaluated once (:mod:`.constants`), so that all its elements are known. A part of
shape ``[B, 1, 1, keys]`` depends on the key alone, however it is computed. So every element satisfies
``m[b, h, i, j] = valid[b, j] and structure[i, j]``. Any other mask is not rewritten.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autotune.compiler.capture.attention.calls import fake, is_static, is_tensor
from autotune.compiler.capture.attention.constants import Constants

_AND = ("and_", "__and__", "bitwise_and", "logical_and")
_MOST_SEEN = 0.6
"""With half of the keys seen, attention by spans took 0.63 of the time with a dense mask on an H100."""
_SAME = ("expand", "expand_as", "to", "bool", "contiguous", "clone")


@dataclass(frozen=True)
class Padding:
    """A key mask and a structure.

    Attributes:
        valid: a node of bool ``[B or 1, 1, 1, keys]``, True where a key is seen.
        passed: the nodes from the mask to ``valid``, the mask first.
        causal: True if a query sees no later key.
        window: the most keys that a query sees, the last of them at its own index; 0 for no limit.
    """

    valid: fx.Node
    passed: tuple[fx.Node, ...]
    causal: bool
    window: int


def padding_of(mask: fx.Node, queries: int, keys: int, constants: Constants) -> Padding | None:
    """The padding of an attention mask; None for a mask of another form.

    Args:
        mask: a node of four axes, which broadcast to ``[B, heads, queries, keys]``.
    """
    parts = _Parts(constants)
    if not parts.take(mask) or parts.valid is None or tuple(fake(parts.valid).shape[1:]) != (1, 1, keys):
        return None
    known = False, 0
    if parts.structure is not None:
        found = _structure(parts.structure.expand(queries, keys))
        if found is None:
            return None
        known = found
    return Padding(parts.valid, tuple(parts.passed), *known)


def has_row_spans(mask: fx.Node, constants: Constants) -> bool:
    """Return True for a constant whose rows see spans of keys, a share of :data:`_MOST_SEEN`, alone or with a key mask.

    Args:
        mask: a node of ``[..., queries, keys]``.
    """
    parts = _Parts(constants)
    if not is_tensor(mask) or fake(mask).ndim < 2 or not parts.take(mask) or parts.structure is None:
        return False
    queries, keys = fake(mask).shape[-2:]
    seen = parts.structure.expand(queries, keys)
    begins = (seen[:, 1:] & ~seen[:, :-1]).sum(1) + seen[:, 0]
    return bool((begins <= 1).all()) and int(seen.sum()) <= _MOST_SEEN * seen.numel()


class _Parts:
    """The parts of a mask during its decomposition."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self.valid: fx.Node | None = None
        self.structure: Tensor | None = None
        self.passed: list[fx.Node] = []

    def take(self, node: Any) -> bool:
        """Decompose a node; return False if a part is neither constant nor a key mask."""
        if not is_tensor(node) or not is_static(node) or fake(node).dtype != torch.bool:
            return False
        self.passed.append(node)
        held = self._constants.of(node)
        if held is not None:
            return self._add(held)
        if fake(node).ndim == 4 and tuple(fake(node).shape[1:3]) == (1, 1):
            if self.valid not in (None, node):
                return False
            self.valid = node
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "call_function" and node.target not in (
            getattr(torch, name, None),
            getattr(operator, name, None),
        ):
            return False
        if name in _AND and len(node.args) == 2 and not node.kwargs:
            return all(map(self.take, node.args))
        # The result of ``to`` with another type is not bool, so it is no part.
        return name in _SAME and fake(node).ndim == 4 and self.take(node.args[0])

    def _add(self, held: Tensor) -> bool:
        outer = max(held.ndim - 2, 0)
        if any(held.shape[axis] != 1 and held.stride(axis) != 0 for axis in range(outer)):
            return False
        seen = held[(0,) * outer]
        self.structure = seen if self.structure is None else self.structure & seen
        return True


def _structure(seen: Tensor) -> tuple[bool, int] | None:
    """``causal`` and ``window`` of bool ``[queries, keys]``."""
    queries, keys = seen.shape
    if bool(seen.all()):
        return False, 0
    if queries != keys:
        return None
    window = int(seen[-1].sum())
    place = torch.arange(keys, device=seen.device)
    back = place[:, None] - place[None, :]
    if not bool((seen == ((back >= 0) & (back < window))).all()):
        return None
    return True, 0 if window == keys else window
