"""Reductions that one walk computes together although one of them is over values that the other makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.ir.graph import Graph
from autotune.ir.ops import POINTWISE


@dataclass(frozen=True)
class Online:
    """A maximum and a sum of exponentials of one value, computed in one pass.

    ``total`` = sum(exp(score - shift)), where ``shift`` follows from ``peak`` = max(score) by row operators only.
    """

    score: int
    peak: int
    total: int
    shift: int


@dataclass(frozen=True)
class Moments:
    """A sum and the sum of squared deviations from the mean that follows from it, computed in one pass.

    ``total`` = sum(score), ``square`` = sum((score - total / n)^2).
    """

    score: int
    total: int
    square: int


@dataclass(frozen=True)
class Column:
    """One accumulator for each column.

    Attributes:
        kind: "sum", "max", "min", "prod", or "moments" (running mean and sum of squared deviations).
        value: of the main graph: what is accumulated.
        dtype: arithmetic type of the accumulator.
        planes: arrays of partials it leaves.
    """

    kind: str
    value: int
    dtype: str

    @property
    def planes(self) -> int:
        return 2 if self.kind == "moments" else 1

    @property
    def storage(self) -> str:
        return "int32" if self.dtype == "bool" else self.dtype


def find_online(graph: Graph) -> tuple[Online, ...]:
    """Pairs (max, sum of exp) that one pass can compute together.

    The sum's argument must be ``exp(score - shift)`` with ``shift`` made from ``peak = max(score)`` and constants
    alone, as softmax, log_softmax and logsumexp (with its guard against infinities) have it.
    """
    vals = graph.values
    peaks = {(v.args[0], v.over): i for i, v in enumerate(vals) if v.op == "max" and v.dtype == "float32"}
    found: dict[int, Online] = {}
    for i, v in enumerate(vals):
        if v.op != "sum" or v.dtype != "float32":
            continue
        exponential = vals[v.args[0]]
        if exponential.op != "exp" or vals[exponential.args[0]].op != "sub":
            continue
        score, shift = vals[exponential.args[0]].args
        peak = peaks.get((score, v.over), i)
        if peak < i and _made_from(graph, shift, peak):
            # One sum for each maximum: a second one would need its own running shift.
            found.setdefault(peak, Online(score, peak, i, shift))
    return tuple(found.values())


def find_moments(graph: Graph, cols: Iterable[int]) -> tuple[Moments, ...]:
    """Sums over the columns with the sum of squared deviations from their mean beside them, as a variance has it."""
    vals, over = graph.values, tuple(sorted(cols))
    live = graph.live
    sums = {vals[i].args[0]: i for i in live if vals[i].op == "sum" and vals[i].over == over}
    n = graph.size(over)
    found = []
    for i in live:
        v = vals[i]
        if v.op != "sum" or v.over != over or v.dtype != "float32" or n < 2:
            continue
        square = vals[v.args[0]]
        if square.op != "mul" or square.args[0] != square.args[1] or vals[square.args[0]].op != "sub":
            continue
        score, middle = vals[square.args[0]].args
        if score not in sums or vals[middle].op != "mul":
            continue
        total, mean = sums[score], vals[middle]
        scale = next((vals[a] for a in mean.args if vals[a].op == "const"), None)
        if total in mean.args and scale is not None and abs(float(scale.number) * n - 1) < 1e-6:
            found.append(Moments(score, total, i))
    return tuple(found)


def _made_from(graph: Graph, i: int, root: int) -> bool:
    if i == root:
        return True
    v = graph.values[i]
    if v.op == "const":
        return True
    if v.op not in POINTWISE:
        return False
    return all(_made_from(graph, a, root) for a in v.args) and v.axes == graph.values[root].axes
