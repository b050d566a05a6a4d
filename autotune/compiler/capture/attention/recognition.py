"""Recognition of masks that come with the data: a key mask with a known structure, spans of keys, packed documents.

:func:`padding_of` decomposes a mask ``m[b, h, i, j]`` through its computation: ``and`` of tensors, repeats and views. A
part that depends on no input of the graph is evaluated once (:mod:`.constants`), so that all its elements are known. If
its size is a symbol, its formula is read instead (:mod:`.formulas`). A part of shape ``[B, 1, 1, keys]`` depends on the
key alone, however it is computed. So every element satisfies ``m[b, h, i, j] = valid[b, j] and structure[i, j]``.

:func:`has_row_spans` and :func:`is_of_documents` give a reason to compute attention by spans, whose results are right
for any mask. So nothing has to be proved there. In packed documents, a query sees only keys of its own document: such a
mask is an ``and`` with a part that compares a number of each query with a number of each key. The other parts may be
anything, for example a triangle, or a comparison of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autotune.compiler.capture.attention.calls import fake, hint, is_tensor, same_length, same_shape, torch_name
from autotune.compiler.capture.attention.constants import Constants
from autotune.compiler.capture.attention.formulas import AtMost, Formula, Formulas, distance

_AND = ("and_", "__and__", "bitwise_and", "logical_and")
_MOST_SEEN = 0.6
"""With half of the keys seen, attention by spans took 0.63 of the time with a dense mask on an H100."""
_SAME = ("expand", "expand_as", "to", "bool", "contiguous", "clone")
_EQUAL = ("eq", "__eq__")
_SUBSET = (*_SAME, "view", "reshape", "unsqueeze", "getitem", "tril")
"""Operators whose result sees no more than their argument, if it is bool and has the same last two axes."""


@dataclass(frozen=True)
class Padding:
    """A key mask and a structure.

    Attributes:
        valid: a node of bool ``[B or 1, 1, 1, keys]``, True where a key is seen.
        passed: the nodes from the mask to ``valid``, the mask first.
        causal: True if a query sees no later key.
        window: the most keys that a query sees, the last of them at its own index; 0 for no limit.
        formulas: what a rewrite relies on (:meth:`Formulas.rely_on`), if sizes are symbols.
    """

    valid: fx.Node
    passed: tuple[fx.Node, ...]
    causal: bool
    window: int
    formulas: tuple[Formula, ...] = ()


def padding_of(mask: fx.Node, queries: Any, keys: Any, constants: Constants, formulas: Formulas) -> Padding | None:
    """The padding of an attention mask; None for a mask of another form.

    Args:
        mask: a node of four axes, which broadcast to ``[B, heads, queries, keys]``.
        queries, keys: numbers or symbols.
    """
    parts = _Parts(constants, formulas)
    if not parts.take(mask) or parts.valid is None or not same_shape(fake(parts.valid).shape[1:], (1, 1, keys)):
        return None
    known = parts.band(queries, keys) if parts.structure is None else parts.pattern(queries, keys)
    return None if known is None else Padding(parts.valid, tuple(parts.passed), *known, tuple(parts.read))


def has_row_spans(mask: fx.Node, constants: Constants, formulas: Formulas) -> bool:
    """Return True for a constant whose rows see spans of keys, a share of :data:`_MOST_SEEN`, alone or with a key mask.

    Args:
        mask: a node of ``[..., queries, keys]``.
    """
    parts = _Parts(constants, formulas)
    if not is_tensor(mask) or fake(mask).ndim < 2 or not parts.take(mask):
        return False
    queries, keys = map(hint, fake(mask).shape[-2:])
    if queries is None or keys is None:
        return False
    if parts.structure is None:
        return len(parts.bounds) > 0 and parts.seen(queries, keys) <= _MOST_SEEN * queries * keys
    if parts.bounds or not all(type(n) is int for n in fake(mask).shape[-2:]):
        return False
    seen = parts.structure.expand(queries, keys)
    begins = (seen[:, 1:] & ~seen[:, :-1]).sum(1) + seen[:, 0]
    return bool((begins <= 1).all()) and int(seen.sum()) <= _MOST_SEEN * seen.numel()


def is_of_documents(mask: Any) -> bool:
    """Return True if a mask [..., queries, keys] is an ``and`` with a comparison of queries and keys."""
    if not is_tensor(mask) or fake(mask).dtype != torch.bool or fake(mask).ndim < 2:
        return False
    name = torch_name(mask)
    if not name or not mask.args:
        return False
    if name in _EQUAL and len(mask.args) == 2:
        return all(map(is_tensor, mask.args)) and _crosses(*(fake(a).shape for a in mask.args))
    if name in _AND:
        return any(map(is_of_documents, mask.args))
    source = mask.args[0]
    same = is_tensor(source) and same_shape(fake(source).shape[-2:], fake(mask).shape[-2:])
    return name in _SUBSET and same and is_of_documents(source)


def _crosses(left: torch.Size, right: torch.Size) -> bool:
    """Return True for the shapes [..., queries, 1] and [..., 1, keys], in either order."""
    if min(len(left), len(right)) < 1:
        return False
    a, b = ([type(size) is int and size == 1 for size in (1, *shape)[-2:]] for shape in (left, right))
    return (a, b) in (([False, True], [True, False]), ([True, False], [False, True]))


class _Parts:
    """The parts of a mask during its decomposition."""

    def __init__(self, constants: Constants, formulas: Formulas) -> None:
        self._constants, self._formulas = constants, formulas
        self.valid: fx.Node | None = None
        self.structure: Tensor | None = None
        """The ``and`` of the constant parts, unless it is True everywhere."""
        self.bounds: list[tuple[int, int]] = []
        """The other parts: a sign and the most that the query's index minus the key's, times the sign, may be."""
        self.passed: list[fx.Node] = []
        self.read: list[Formula] = []

    def take(self, node: Any) -> bool:
        """Decompose a node; return False if a part is neither constant nor a key mask."""
        if not is_tensor(node) or fake(node).dtype != torch.bool:
            return False
        self.passed.append(node)
        held = self._constants.of(node)
        if held is not None:
            return self._add(held)
        formula = self._formulas.of(node)
        if formula is not None:
            return self._add_formula(formula)
        if fake(node).ndim == 4 and same_shape(fake(node).shape[1:3], (1, 1)):
            if self.valid not in (None, node):
                return False
            self.valid = node
            return True
        name = torch_name(node)
        if name in _AND and len(node.args) == 2 and not node.kwargs:
            return all(map(self.take, node.args))
        # The result of ``to`` with another type is not bool, so it is no part.
        return name in _SAME and fake(node).ndim == 4 and self.take(node.args[0])

    def _add(self, held: Tensor) -> bool:
        outer = max(held.ndim - 2, 0)
        if any(held.shape[axis] != 1 and held.stride(axis) != 0 for axis in range(outer)):
            return False
        seen = held[(0,) * outer]
        if not bool(seen.all()):
            self.structure = seen if self.structure is None else self.structure & seen
        return True

    def _add_formula(self, formula: Formula) -> bool:
        self.read.append(formula)
        if formula.element is True:
            return True
        bound = distance(formula.element) if isinstance(formula.element, AtMost) else None
        if bound is not None:
            self.bounds.append(bound)
        return bound is not None

    def pattern(self, queries: Any, keys: Any) -> tuple[bool, int] | None:
        """``causal`` and ``window`` of the constant parts; None for another structure."""
        if self.structure is None or self.bounds or type(queries) is not int or not same_length(queries, keys):
            return None
        seen = self.structure.expand(queries, keys)
        window = int(seen[-1].sum())
        if not window:
            return None
        place = torch.arange(keys, device=seen.device)
        back = place[:, None] - place[None, :]
        if not bool((seen == ((back >= 0) & (back < window))).all()):
            return None
        return True, 0 if window == keys else window

    def band(self, queries: Any, keys: Any) -> tuple[bool, int] | None:
        """``causal`` and ``window`` of the parts that were read as formulas; None for another structure."""
        if not self.bounds:
            return False, 0
        ahead = [most for sign, most in self.bounds if sign < 0]
        behind = [most for sign, most in self.bounds if sign > 0]
        if not same_length(queries, keys) or not ahead or min(ahead) != 0 or min(behind, default=0) < 0:
            return None
        return True, min(behind) + 1 if behind else 0

    def seen(self, queries: int, keys: int) -> int:
        """The number of pairs of a query and a key that the parts read as formulas let see each other."""
        row = torch.arange(queries)
        low, high = torch.zeros_like(row), torch.full_like(row, keys)
        for sign, most in self.bounds:
            low, high = (
                (torch.maximum(low, row - most), high) if sign > 0 else (low, torch.minimum(high, row + most + 1))
            )
        return int((high - low).clamp(min=0).sum())
