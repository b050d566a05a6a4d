"""What a region costs without stitching: one kernel for each aten operator, its tensors through memory."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.compiler.lower.op_names import GENERATORS, VIEWS
from autotune.compiler.lower.translate import meta, op_name, origin_name

_PICKING = frozenset(["gather", "index_select", "embedding", "index", "take"])
"""Operators that read no more of their table than they return."""


@dataclass(frozen=True)
class EagerCost:
    """Kernels and bytes of a region in eager mode.

    ``operators`` counts the kernels by aten operator, in order of appearance. Both numbers are lower bounds: an
    operator that eager mode computes in several kernels (``logsumexp``, a layer norm's backward) counts as one that
    reads its arguments and writes its results once.
    """

    kernels: int
    bytes: int
    operators: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"kernels": self.kernels, "bytes": self.bytes, "operators": dict(self.operators)}


def eager_cost(gm: fx.GraphModule) -> EagerCost:
    """The cost of a region's submodule, whose nodes carry fake tensors and name what they were decomposed from.

    Views cost nothing. A broadcast tensor is read once; an element that a tensor shows several times counts once. Nodes
    that hang together and come from one operator are one kernel, or as many as that operator is among them.
    """
    names: dict[str, int] = {}
    total = 0
    for nodes in _operators(gm.graph):
        name = origin_name(nodes[0]) or str(nodes[0].target)
        names[name] = names.get(name, 0) + max(1, sum(op_name(n) == name for n in nodes))
        inside = set(nodes)
        read = [_bytes(meta(n)) for n in dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)]
        made = sum(_bytes(meta(n)) for n in nodes if any(u not in inside for u in n.users))
        if name in _PICKING and read:
            table = max(range(len(read)), key=read.__getitem__)
            read[table] = min(read[table], made)
        total += sum(read) + made
    return EagerCost(sum(names.values()), total, names)


def _operators(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes that compute, those together that the same operator was decomposed into."""
    owner: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) in VIEWS | GENERATORS or getattr(node.target, "is_view", False):
            continue
        mine = [node]
        for given in node.all_input_nodes:
            theirs = owner.get(given)
            if theirs is None or theirs is mine:
                continue
            if node.target is operator.getitem or origin_name(given) == origin_name(node):
                theirs += mine
                for n in mine:
                    owner[n] = theirs
                mine = theirs
        for n in mine:
            owner[n] = mine
    return list({id(nodes): nodes for nodes in owner.values()}.values())


def _bytes(value: Any) -> int:
    return sum(touched(t) * t.element_size() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def touched(t: torch.Tensor) -> int:
    """Distinct elements of memory that a tensor shows; broadcast dimensions count once."""
    n = 1
    for extent, stride in zip(t.shape, t.stride(), strict=True):
        n *= int(extent) if stride or not extent else 1
    return n
