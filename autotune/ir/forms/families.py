"""Graphs that one kernel can run: equal but for the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autotune.ir.forms.canonical import canonicalize, one_body, to_workload
from autotune.ir.forms.simplify import remap
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.workload import canonical_json


@dataclass(frozen=True)
class Family:
    """What a canonical graph has in common with those that differ from it in the number of rows only.

    This is narrower than a workload's family: sums over the rows take kernels of their own.

    Attributes:
        key: the digest with the rows left open; of a graph without open rows its fingerprint.
        unit: for a row of elements the fingerprint at one element, where it has no axis left; for a graph without axes
            its own; "" for others.
    """

    key: str
    unit: str = ""

    def has(self, other: Family) -> bool:
        """Whether one kernel with the number of rows as a variable runs graphs of both."""
        return self.key == other.key or (self.unit != "" and self.unit == other.unit and self._one() != other._one())

    def _one(self) -> bool:
        return self.key == self.unit


def family_of(graph: Graph) -> Family:
    """The family of a canonical graph."""
    return _family(canonical_json(graph.to_json()))


@lru_cache(maxsize=4096)
def _family(text: str) -> Family:
    import json

    graph = Graph.from_json(json.loads(text))
    name, body = to_workload(graph).fingerprint, one_body(graph)
    if not graph.extents:
        return Family(name, name)
    at_one = single(graph) if body else None
    return Family(body or name, to_workload(at_one[0]).fingerprint if at_one else "")


def single(graph: Graph) -> tuple[Graph, tuple[int, ...], tuple[int, ...]] | None:
    """The canonical form of a row of elements when it has one element, with the order of its slots and outputs.

    None where the graph is not one row of independent elements, or an element's place in it matters.
    """
    if len(graph.extents) != 1:
        return None
    if any(v.op in REDUCTIONS or v.op == "index" or v.guards for v in graph.values):
        return None
    return canonicalize(remap(graph, list(range(len(graph.values))), {}, ()))
