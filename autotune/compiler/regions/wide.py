"""Which float64 values a region may hold in registers as float32: those of a scale, between float32 and float32.

torchao computes a scale so: the largest magnitude to float64, a clamp, a quotient, back to float32. None of these adds,
so each loses one rounding of float32, as the other operators of a region do. All else in float64 stays with torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autotune.compiler.lower.op_names import CASTS, VIEWS
from autotune.compiler.lower.translate import meta, op_name
from autotune.ir.graph import FLOATS

_LARGEST = frozenset(["amax", "max"])
_SCALING = frozenset(["clamp", "clamp_min", "clamp_max", "maximum", "minimum", "mul", "div", "reciprocal", "abs"])


def is_wide(node: fx.Node) -> bool:
    """Whether a node makes a tensor of float64."""
    value = meta(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def passing(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The float64 nodes that begin in a cast of a largest element, scale it, and end in casts to narrower floats."""
    found = {n for n in nodes if is_wide(n) and op_name(n) in CASTS | _SCALING | VIEWS and n.users}
    while True:
        kept = {n for n in found if all(i in found or _begins(n, i) for i in n.all_input_nodes) and _ends(n, found)}
        if kept == found:
            return found
        found = kept


def _narrow(node: fx.Node) -> bool:
    value = meta(node)
    return isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in FLOATS


def _begins(node: fx.Node, source: fx.Node) -> bool:
    if op_name(node) not in CASTS or not _narrow(source):
        return False
    while op_name(source) in CASTS | VIEWS | {"getitem"}:
        source = source.all_input_nodes[0]
    return op_name(source) in _LARGEST


def _ends(node: fx.Node, found: set[fx.Node]) -> bool:
    return all(u in found or (op_name(u) in CASTS and _narrow(u)) for u in node.users)
