"""What a report shows of a scenario: bars against the ideal, and what ran when where that is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.charts import Exhibit
from autotune.domains.c3.report import figure
from autotune.domains.c3.report.metrics import Isolated

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.store.records import Schedule
    from autotune.workload import Workload

_STRATEGIES = 40
"""Strategies of a search that are listed."""


def exhibits(
    workload: Workload, config: Mapping[str, Any] | None, schedule: Schedule | None, device: DeviceIdentity
) -> Sequence[Exhibit]:
    """Of a scenario that was searched; see ``autotune.domain.Domain``."""
    alone = Isolated.of(schedule.references) if schedule else None
    if schedule is None or alone is None:
        return ()
    found = {name: alone.speedup(us) for name, us in sorted(schedule.rivals.items(), key=lambda item: -item[1])}
    if schedule.winner == "autotune":
        found["tuned"] = alone.speedup(schedule.latency_us)
    longer = alone.kind if alone.kind != "equal" else "neither"
    about = f"The line is the ideal, {alone.ideal:.3f}: the shorter side wholly hidden. Longer is: {longer}."
    shown = [Exhibit("Against the ideal", about, chart=figure.against_ideal(found, alone.ideal))]
    times = {"computation": alone.compute, **{f"collective by {name}": us for name, us in alone.engines.items()}}
    shown.append(Exhibit("Each side alone", heads=("side", "µs"), rows=list(times.items())))
    if config:
        rows = [(str(name), str(value)) for name, value in config.items()]
        shown.append(Exhibit("Strategy", heads=("parameter", "value"), rows=rows))
    return shown


def case_exhibits(case: Mapping[str, Any]) -> Sequence[Exhibit]:
    """Of a case in a result file; see ``autotune.domain.Domain``."""
    about = f"The line is the ideal. Alone: computation {case['t_gemm_ms']:.4g} ms, "
    about += ", ".join(f"{engine} {ms:.4g} ms" for engine, ms in case["t_comm_by_engine_ms"].items()) + "."
    chart = figure.against_ideal(figure.speedups(case), figure.over_sequential(case))
    shown = [Exhibit("Against the ideal", about, chart=chart)]
    for panel in figure.timeline(case)["vconcat"] if case.get("timeline") else ():
        name, _, run = panel.pop("title").partition(": ")
        about = f"Both streams of rank 0, by the profiler: {run}."
        shown.append(Exhibit(f"What ran when: {name}", about, chart=panel))
    heads = ("family", "ms", "speedup", "of the ideal", "strategy")
    rows = [
        (name.replace("_", " "), s["ms"], s["speedup"], s["fraction"], s["label"])
        for name, s in case["strategies"].items() if s
    ]  # fmt: skip
    shown.append(Exhibit("Families of strategies", heads=heads, rows=rows))
    measured = sorted((case.get("measured") or {}).items(), key=lambda item: item[1])[:_STRATEGIES]
    if measured:
        about = "In the search, which is another run than the comparison above."
        shown.append(Exhibit("Strategies measured", about, heads=("strategy", "ms"), rows=measured, folded=True))
    return shown
