"""What a region's CUDA kernels are called, which is what profilers show: ``autotune_addmm_sigmoid_tanh_rsub``.

A kernel that does all of a region is named after the operators of the program that it was cut from; where a plan has
several launches, each after what its own groups compute, as their graphs say it. Names follow from the workload and the
plan alone, so candidates that differ in their schedules have equal ones: equal kernels stay equal cubins, stored once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autotune.compiler.lower.op_names import CASTS, PRODUCTS, telling
from autotune.compiler.planner.groups import Plan
from autotune.compiler.targets.cuda.source import PREFIX
from autotune.ir.forms.canonical import row_extent
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.ops import LIGHT, POINTWISE
from autotune.ir.oracle.operands import is_product
from autotune.workload import Json

LONGEST = 60
"""Characters of a name."""
_SUFFIX = 12  # of these, kept free for "_finish" and a number


def kernel_name(ops: Iterable[str]) -> str:
    """A kernel's name by the operators it computes: those that fit, in order, each once, matrix products among them in
    any case. An identifier, whatever characters the operators have."""
    room = LONGEST - len(PREFIX) - _SUFFIX
    cleaned = ("_".join(re.findall("[A-Za-z0-9]+", op))[:room].rstrip("_") for op in ops)
    words = list(dict.fromkeys(w for w in cleaned if w)) or ["kernel"]
    kept: set[str] = set()
    for word in sorted(words, key=lambda w: w not in PRODUCTS):
        if sum(len(w) + 1 for w in kept) + len(word) > room:
            break
        kept.add(word)
    return PREFIX + "_".join(w for w in words if w in kept)


def program_ops(source: Json) -> list[str]:
    """The telling operators of the aten calls that a region was cut from; empty where they are not known."""
    calls: Sequence[Any] = source.get("calls") or ()
    parts = [str(call.get("of", call["op"])).split(".") for call in calls]
    ops = [p[1] for p in parts if len(p) > 1]  # of "aten.addmm.default"
    return telling(op for op in ops if op not in CASTS) or telling(ops)


def graph_ops(graph: Graph, vectors: bool = False) -> list[str]:
    """The telling operators of a group's graph, sums of products as "mm" and "mv".

    Args:
        vectors: whether a sum over a matrix's rows times a vector is taken for a product of the two, which is what the
            program had; a weighted mean has the same form.
    """
    live = [graph.values[i] for i in graph.live]
    names = [
        _product(graph, i, vectors) or graph.values[i].op
        for i in graph.live
        if graph.values[i].op in REDUCTIONS or _is_heavy(graph.values[i].op)
    ]
    return list(dict.fromkeys(names or [v.op for v in live if v.op in POINTWISE] or ["copy"]))


def launch_names(plan: Plan, source: Json) -> list[str]:
    """The name of each launch of a plan; numbered where groups that differ in more than their rows would share one.

    Args:
        source: the program that the region was cut from, as aten calls; empty where it is not known.
    """
    ops = program_ops(source)
    vectors = not PRODUCTS.keys().isdisjoint(ops)
    names: list[str] = []
    met: dict[str, list[object]] = {}
    for launch in plan.launches:
        graphs = [plan.groups[k].graph for k in launch]
        whole = len(plan.launches) == 1 and ops
        own = ops if whole else [op for g in graphs for op in graph_ops(g, vectors)]
        name = kernel_name(own)
        equal, form = met.setdefault(name, []), [_any_rows(g) for g in graphs]
        if form not in equal:
            equal.append(form)
        nth = equal.index(form) + 1
        names.append(name if nth == 1 else f"{name}_{nth}")
    return names


def part_name(name: str, part: int) -> str:
    """The name of a launch's kernel number ``part``: what follows the first one finishes what that has begun."""
    return name if part == 0 else f"{name}_finish{part if part > 1 else ''}"


def _any_rows(graph: Graph) -> Graph:
    """``graph`` without the extent of its rows, which kernels take as an argument."""
    return replace(graph, extents=(0, *graph.extents[1:])) if row_extent(graph) else graph


def _is_heavy(op: str) -> bool:
    return op in POINTWISE and POINTWISE[op].cost > LIGHT


def _product(graph: Graph, i: int, vectors: bool) -> str | None:
    """ "mm" or "mv" where value ``i`` multiplies two matrices, or a matrix and a vector."""
    if not is_product(graph, i):
        return None
    terms = graph.values[graph.values[i].args[0]]
    one, other = (set(graph.values[a].axes) for a in terms.args)
    if one - other and other - one:
        return "mm"
    return "mv" if vectors else None
