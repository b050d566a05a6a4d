"""Which inputs of a region's program say where elements are, and how far they may reach.

A table of one row needs no index in a region's graph: its row is read, wherever the index points. The user's own
program, which is the baseline, still checks the index. RoBERTa has such a table, of the types of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_VIEWS = ("reshape", "view", "expand", "unsqueeze", "squeeze", "permute", "slice", "select", "clone")
_FOLLOWED = frozenset(
    # What the last ones pick is where their result points.
    [*_VIEWS, "convert_element_type", "gather", "index", "index_select"]
)


def positions(program: fx.GraphModule) -> dict[int, int]:
    """For each input that indexes something by itself, the bound on it.

    Args:
        program: aten calls, with fake tensors in ``meta["val"]`` (:func:`autotune.compiler.regions.symbols.traced`).
    """
    inputs = {n: k for k, n in enumerate(program.graph.find_nodes(op="placeholder"))}
    bounds: dict[int, int] = {}
    for node in program.graph.nodes:
        for index, bound in _indexed(node):
            source = index
            while source.op == "call_function" and _name(source) in _FOLLOWED:
                source = source.args[0]
            if source in inputs:
                k = inputs[source]
                bounds[k] = min(bound, bounds.get(k, bound))
    return bounds


def _indexed(node: fx.Node) -> list[tuple[Any, int]]:
    """The index arguments of a call, and the extent that each points into."""
    name, args = _name(node), node.args
    if name == "embedding":
        return [(args[1], _shape(args[0])[0])]
    if name in ("gather", "index_select") or name.startswith(("scatter", "index_add", "index_fill")):
        return [(args[2], _shape(args[0])[args[1]])] if len(args) > 2 and isinstance(args[2], fx.Node) else []
    if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put"):
        return [(i, n) for i, n in zip(args[1], _shape(args[0]), strict=False) if i is not None]  # type: ignore[arg-type]
    return []


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target.overloadpacket.__name__) if isinstance(target, torch._ops.OpOverload) else ""


def _shape(node: Any) -> Any:
    return node.meta["val"].shape


__all__ = ["positions"]
