"""Plans of a region, ranked."""

from __future__ import annotations

from autotune.fusion.ablation import Method
from autotune.fusion.cost import Figures
from autotune.fusion.graph import Graph
from autotune.fusion.plan import Shape, make_plan, read_text


def confined(shape: Shape, method: Method) -> Shape:
    """``shape`` without what a method lacks: packed groups in launches of their own, phases too."""
    out = []
    for launch in shape:
        phases = launch if method.packing else tuple((group,) for phase in launch for group in phase)
        if method.grid and (method.packing or len(launch) == len(phases)):
            out.append(phases)
        else:
            out.extend((phase,) for phase in phases)
    return tuple(out)


def shapes(graph: Graph, side: str, method: Method, figures: Figures, limit: int) -> list[Shape]:
    """The shapes of plans worth tuning, the most promising first."""
    return [confined(read_text(make_plan(graph, side).text), method)][:limit]
