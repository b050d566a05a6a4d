"""The cost of a region in eager mode: one kernel for each aten operator, with its tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.lower.op_names import GENERATORS, VIEWS

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
    """The cost of a region's submodule, whose nodes have fake tensors and the operator they were decomposed from.

    Views cost nothing. A broadcast tensor is read once, and each element counts once. Connected nodes from one operator
    are one kernel, or one for each occurrence of that operator among them.
    """
    facts = GraphFacts(gm.graph)
    names: dict[str, int] = {}
    total = 0
    for nodes in _operators(facts):
        name = facts[nodes[0]].origin or str(nodes[0].target)
        names[name] = names.get(name, 0) + max(1, sum(facts[n].operator == name for n in nodes))
        total += moved_bytes(facts, nodes, name)
    return EagerCost(sum(names.values()), total, names)


def moved_bytes(facts: GraphFacts, nodes: Sequence[fx.Node], name: str) -> int:
    """Lower bound on the bytes that one kernel for ``nodes``, which are operator ``name``, reads and writes.

    It is at least ``UNKNOWN_BYTES`` if a size is symbolic.
    """
    inside = set(nodes)
    given = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
    read = [facts[n].touched_bytes for n in given]
    made = sum(facts[n].touched_bytes for n in nodes if any(u not in inside for u in n.users))
    if name in _PICKING and read:
        table = max(range(len(read)), key=read.__getitem__)
        read[table] = min(read[table], made)
    return sum(read) + made


def _operators(facts: GraphFacts) -> list[list[fx.Node]]:
    """The nodes that compute, grouped by the operator that they were decomposed from."""
    owner: dict[fx.Node, list[fx.Node]] = {}
    for node in facts.nodes:
        is_view = facts[node].operator in VIEWS or getattr(node.target, "is_view", False)
        if node.op != "call_function" or is_view or facts[node].operator in GENERATORS:
            continue
        mine = [node]
        for given in node.all_input_nodes:
            theirs = owner.get(given)
            if theirs is None or theirs is mine:
                continue
            if facts[node].operator == "getitem" or facts[given].origin == facts[node].origin:
                theirs += mine
                for n in mine:
                    owner[n] = theirs
                mine = theirs
        for n in mine:
            owner[n] = mine
    return list({id(nodes): nodes for nodes in owner.values()}.values())
