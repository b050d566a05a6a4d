"""Names of aten operators by category (views, generators, products), and names of regions after their operators.

This module does not import torch, because processes without torch also name kernels after operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.ir.graph import Graph

VIEWS = frozenset(
    [
        "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "numpy_T", "unsqueeze",
        "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "unbind", "chunk", "alias", "detach",
        "diagonal", "view_as", "as_strided", "narrow",
    ]
)  # fmt: skip
"""Operators that move no data: free inside a region, and unchanged outside."""

GENERATORS = frozenset(
    [
        "full", "full_like", "zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full",
        "scalar_tensor", "arange", "iota",
    ]
)  # fmt: skip
"""Operators that read nothing: recomputed in each region that needs them."""

ALLOCATIONS = frozenset(["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"])
"""Operators that neither read nor write memory."""

CASTS = frozenset(["_to_copy", "convert_element_type"])
"""Operators that only change a type."""

PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "mv": 0, "addmv": 1}
"""Operators that multiply matrices, and the index of the first operand among their arguments."""

SCATTERS = {
    "embedding_dense_backward": 0,
    "index_add": 3,
    "scatter_add": 3,
    "index_put": 2,
    "_unsafe_index_put": 2,
    "_unsafe_masked_index_put_accumulate": 3,
}
"""Operators of index-add, and the index of the rows among their arguments."""

_PLAIN = frozenset(
    ["clone", "add", "sub", "mul", "div", "to_copy", "convert_element_type", "lift_fresh_copy", "copy", "where", "eq"]
)
_MOST_SHOWN = 4
_FORWARD = ("_forward", "_legit_functional", "_legit_no_training", "_legit")
_BACKWARD = ("_backward", "_backward_data")


def telling(ops: Iterable[str]) -> list[str]:
    """The operators that characterise a program, in order, each once, by their usual names.

    Plain arithmetic is left out unless there is nothing else. If a program has an operator and its backward operator,
    the first counts as part of the second: a common subexpression comes from one or the other by version of torch.
    """
    names = [
        name.strip("_").removeprefix("native_")
        for name in ops
        if name and name not in VIEWS and name not in GENERATORS and name != "getitem"
    ]
    there = set(names)
    stems = {n: next((n.removesuffix(end) for end in _FORWARD if n.endswith(end)), n) for n in there}
    whole = {n: next((stem + end for end in _BACKWARD if stem + end in there), n) for n, stem in stems.items()}
    named = list(dict.fromkeys(whole[name] for name in names))
    return [n for n in named if n not in _PLAIN] or named


def describe(ops: Iterable[str], graph: Graph) -> str:
    """A region's label, such as ``layer_norm f32 16384x1024``: its operators, :func:`form`, number of parts."""
    from autotune.ir.simplify import components

    names = telling(ops)
    shown = "+".join(names[:_MOST_SHOWN]) + ("+..." if len(names) > _MOST_SHOWN else "")
    parts = len(components(graph))
    among = f" of {parts} parts" if parts > 1 else ""
    return f"{shown} {form(graph)}{among}"


def form(graph: Graph) -> str:
    """The type of a graph's largest output and the extents of its largest value."""
    from autotune.ir.graph import SHORT

    largest = max(graph.outputs, key=lambda o: graph.size(o.axes))
    widest = max([v.axes for v in graph.values] + [o.axes for o in graph.outputs], key=graph.size)
    extents = "x".join(str(graph.extents[a]) for a in widest) or "1"
    return f"{SHORT[largest.dtype]} {extents}"
