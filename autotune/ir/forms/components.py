"""The parts of a region that have nothing to do with each other: one update of an optimizer step beside the others.

Values belong together if one is computed from the other or if they vary over a common axis. What costs nothing to
compute again ties nothing together: constants, and numbers made of numbers alone (a learning rate, a step's bias
correction); each part that needs them has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.ir.forms.simplify import drop_dead, drop_slots
from autotune.ir.graph import REDUCTIONS, Graph


class _Sets:
    """Union-find over anything hashable."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def find(self, x: object) -> object:
        self.parent.setdefault(x, x)
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def union(self, x: object, y: object) -> None:
        self.parent[self.find(x)] = self.find(y)


def _numbers(graph: Graph) -> list[bool]:
    """For each value, whether it is one number that no reduction goes into."""
    out: list[bool] = []
    for v in graph.values:
        out.append(not v.axes and v.op not in REDUCTIONS and all(out[a] for a in v.args))
    return out


def components(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The outputs of each connected part of a graph, by their first output; () where there are none."""
    free = _numbers(graph)
    sets = _Sets()
    # Results that are numbers keep what they are made of.
    wanted = set(graph.making(o.value for o in graph.outputs if free[o.value]))
    for i in graph.live:
        v = graph.values[i]
        if v.op == "const" or (free[i] and i not in wanted):
            continue
        for a in v.args:
            if graph.values[a].op != "const" and free[a] == free[i]:
                sets.union(i, a)
        for axis in (*v.axes, *v.over):
            sets.union(i, ("axis", axis))
    found: dict[object, list[int]] = {}
    for k, o in enumerate(graph.outputs):
        for axis in o.axes:  # a number may be stored over an axis
            sets.union(("output", k), ("axis", axis))
        if graph.values[o.value].op != "const" and not (free[o.value] and o.axes):
            sets.union(("output", k), o.value)
    for k in range(len(graph.outputs)):
        found.setdefault(sets.find(("output", k)), []).append(k)
    return tuple(tuple(outputs) for outputs in found.values())


def part(graph: Graph, outputs: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """The graph of some outputs alone, and which of the graph's slots each of its slots is."""
    return drop_slots(drop_dead(replace(graph, outputs=tuple(graph.outputs[k] for k in outputs))))
