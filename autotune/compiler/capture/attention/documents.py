"""Recognition of masks of packed documents: a query sees only keys of its own document.

Such a mask is an ``and`` with a part that compares a number of each query with a number of each key. The other parts
may be anything, for example a triangle, or a comparison of positions. This is a reason to compute attention by spans
(:mod:`.spanned`), whose results are right for any mask. So nothing has to be proved here.
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.compiler.capture.attention.calls import fake, is_tensor, torch_name
from autotune.compiler.capture.attention.sizes import same_shape

_AND = ("and_", "__and__", "bitwise_and", "logical_and")
_EQUAL = ("eq", "__eq__")
_SUBSET = (
    "expand",
    "expand_as",
    "to",
    "bool",
    "contiguous",
    "clone",
    "view",
    "reshape",
    "unsqueeze",
    "getitem",
    "tril",
)
"""Operators whose result sees no more than their argument, if it is bool and has the same last two axes."""


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
