"""Maxima and minima whose gradients compare them with their elements.

The gradient of ``amax(x)`` finds the largest elements by ``x == amax(x)``. AOTAutograd saves the maximum, which is
small, and computes ``x`` again in the backward pass. Kernels of autotune and of Inductor may round it in two ways. Then
no element is found, and the gradient is NaN. Such an ``x`` is saved too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autotune.compiler.lower.nodes import op_name
from autotune.compiler.lower.op_names import PRODUCTS, VIEWS

aten = torch.ops.aten
_EXTREMES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_EXACT = VIEWS | {
    "abs", "neg", "sign", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "amax", "amin",
    "getitem", "clone", "cat", "gather", "index", "index_select", "embedding",
    "constant_pad_nd", "convert_element_type", "_to_copy",
}  # fmt: skip
"""Operators whose results every kernel rounds alike."""
_SAVED = {*PRODUCTS, "convolution"}
"""Operators that no backward pass computes again."""


def save_compared(graph: fx.Graph) -> None:
    """Mark the elements that gradients of maxima and minima compare, so that the partition saves them.

    Elements in a part that the user's checkpointing computes again are left: there the maximum is computed again too.

    Args:
        graph: a joint graph of forward and backward.
    """
    for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        for extreme, elements in (node.args, node.args[::-1]):
            found, x = _source(extreme), _source(elements)
            if found is None or x is None or found.target not in _EXTREMES or _source(found.args[0]) is not x:
                continue
            if "recompute" not in x.meta and not _is_exact(x):
                x.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _source(value: Any) -> fx.Node | None:
    """The node that a view is of, or the node itself; None for a number."""
    while isinstance(value, fx.Node) and value.op == "call_function" and op_name(value) in VIEWS:
        value = value.args[0]
    return value if isinstance(value, fx.Node) else None


def _is_exact(x: fx.Node) -> bool:
    """Return True if every kernel makes the same ``x`` of inputs and of results that are saved."""
    waiting, seen = [x], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or op_name(node) in _SAVED:
            continue
        if op_name(node) not in _EXACT:
            return False
        seen.add(node)
        waiting += node.all_input_nodes
    return True
