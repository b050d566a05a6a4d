"""Short human names of regions, such as ``layer_norm f32 16384x1024``."""

from __future__ import annotations

from torch import fx

from autotune.compiler.lower.op_names import telling
from autotune.compiler.lower.translate import origin_name
from autotune.ir.forms.simplify import components
from autotune.ir.graph import SHORT, Graph

_MOST = 4


def describe(gm: fx.GraphModule, graph: Graph) -> str:
    """The operators that characterise a region, its :func:`form`, and how many parts it is of, where they have nothing
    to do with each other."""
    names = telling(map(origin_name, gm.graph.nodes))
    shown = "+".join(names[:_MOST]) + ("+..." if len(names) > _MOST else "")
    parts = len(components(graph))
    among = f" of {parts} parts" if parts > 1 else ""
    return f"{shown} {form(graph)}{among}"


def form(graph: Graph) -> str:
    """The type of a graph's largest output and the extents of its largest value."""
    largest = max(graph.outputs, key=lambda o: graph.size(o.axes))
    widest = max([v.axes for v in graph.values] + [o.axes for o in graph.outputs], key=graph.size)
    extents = "x".join(str(graph.extents[a]) for a in widest) or "1"
    return f"{SHORT[largest.dtype]} {extents}"
