"""What a report shows of a region: its plan as a picture, and the bytes that each kernel moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.charts import Exhibit
from autotune.domains.fusion.drawing.anatomy import Anatomy, dissect
from autotune.domains.fusion.drawing.picture import Drawing, draw
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.store.records import Schedule
    from autotune.workload import Workload

_OPERATORS = 400
"""Operators beyond which a plan is a table only: its picture would be unreadable."""


def exhibits(
    workload: Workload, config: Mapping[str, Any] | None, schedule: Schedule | None, device: DeviceIdentity
) -> Sequence[Exhibit]:
    """See ``autotune.domain.Domain``. The plan is the winner's, else the greedy one."""
    graph = Graph.from_json(workload.spec)
    try:
        anatomy = dissect(graph, dict(config or {}), device.kind, device.units)
    except Unsupported as error:
        return (Exhibit("Plan", f"It has no kernels of ours: {error}"),)
    left = schedule is not None and schedule.config is None
    about = f"{plural(anatomy.kernels, 'kernel')}, {_size(anatomy.bytes)} moved, {_size(graph.bytes_moved)} at least."
    about += " A baseline won: the region is left as it was." if left else ""
    rows = [
        (
            f"{number}.{place}" if len(launch) > 1 else str(number),
            group.scheme,
            group.shape,
            ", ".join(t.label for t in group.reads),
            ", ".join(t.label for t in group.writes),
            group.bytes / 2**20,
            group.private_bytes / 2**20,
        )
        for number, launch in enumerate(anatomy.launches, 1)
        for place, group in enumerate(launch, 1)
    ]
    heads = ("launch", "scheme", "shape", "reads", "writes", "MiB moved", "MiB of partial results")
    shown = [Exhibit("Plan", about, svg=_picture(workload, graph, anatomy))]
    shown.append(Exhibit("Bytes by kernel", heads=heads, rows=rows))
    if config:
        settings = [(str(name), str(value)) for name, value in config.items()]
        shown.append(Exhibit("Configuration", heads=("parameter", "value"), rows=settings, folded=True))
    return shown


def _picture(workload: Workload, graph: Graph, anatomy: Anatomy) -> str:
    if sum(len(group.operators) for group in anatomy.groups) > _OPERATORS:
        return ""
    after = f"{plural(anatomy.kernels, 'kernel')}, {_size(anatomy.bytes)} moved"
    before = f"at least {_size(graph.bytes_moved)} in and out"
    return draw(workload.label, [Drawing("region", before, after, anatomy)])


def _size(n: int) -> str:
    return f"{n / 2**20:.3g} MiB"
