"""Indices of a region's operators and the ranges that eager mode and Inductor demand of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import Region

_ALONG = frozenset(["gather", "scatter", "index_add"])
"""Operators with arguments (table, dimension, index): negative indices are out of range."""

_LISTED = frozenset(["index", "index_put"])
"""Operators with arguments (table, indices by dimension): negative indices count from the end."""

Extent = int | torch.SymInt


@dataclass(frozen=True)
class Indexed:
    """One index tensor of an operator and its range.

    Attributes:
        index: the node that computes it.
        low, extent: the index must be in ``[low, extent)``.
        operand: names the index and the operator, for an error.
    """

    index: fx.Node
    low: Extent
    extent: Extent
    operand: str


def indices_of(facts: GraphFacts, region: Region, origin: Mapping[fx.Node, fx.Node]) -> Iterator[Indexed]:
    """The index tensors of a region's operators. Those of operators that torch trusts (``_unsafe_index``) are left out.

    Args:
        facts: about the graph that the region was found in.
        origin: from the region's nodes to those of Inductor's graph, where they are others.
    """
    for n in region.nodes:
        node = origin.get(n, n)
        for index, dim, negative in _indices(facts[n].operator, node):
            if index.meta["val"].dtype not in (torch.int32, torch.int64):
                continue  # a mask
            shape = _argument(node, 0).meta["val"].shape
            extent = shape[dim] if shape else 1
            operand = f"the index {index.name} of {facts[n].origin}"
            yield Indexed(index, -extent if negative else 0, extent, operand)


def _indices(name: str, node: fx.Node) -> Iterator[tuple[fx.Node, int, bool]]:
    """The index tensors of a call of operator ``name``, the dimension of each, and whether it may be negative."""
    if name in _ALONG:
        yield _argument(node, 2), _argument(node, 1), False
    elif name == "embedding":
        yield _argument(node, 1), 0, False
    elif name in _LISTED:
        yield from ((index, dim, True) for dim, index in enumerate(_argument(node, 1)) if index is not None)


def _argument(node: fx.Node, number: int) -> Any:
    """An argument by its position, which the graph may give by name."""
    schema = node.target._schema  # type: ignore[union-attr]
    return node.args[number] if number < len(node.args) else node.kwargs[schema.arguments[number].name]
