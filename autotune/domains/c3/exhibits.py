"""Exhibits of a scenario in a report: bars against the ideal; see :mod:`autotune.charts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.charts import Exhibit
from autotune.device import DeviceIdentity
from autotune.domains.c3.results import Isolated
from autotune.store.records import Schedule
from autotune.workload import Workload

Chart = dict[str, Any]
COLOURS = {
    "sequential": "#d1d5db",
    "naive": "#9ca3af",
    "naive swapped": "#6b7280",
    "order": "#93c5fd",
    "partition": "#c4b5fd",
    "copy engine": "#fcd34d",
    "tuned": "#16a34a",
}
RED = "#dc2626"


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
    shown = [Exhibit("Against the ideal", about, chart=against_ideal(found, alone.ideal))]
    times = {"computation": alone.compute, **{f"collective by {name}": us for name, us in alone.engines.items()}}
    shown.append(Exhibit("Each side alone", heads=("side", "µs"), rows=list(times.items())))
    if config:
        rows = [(str(name), str(value)) for name, value in config.items()]
        shown.append(Exhibit("Strategy", heads=("parameter", "value"), rows=rows))
    return shown


def against_ideal(found: Mapping[str, float], ideal: float) -> Chart:
    """One scenario's speedups as bars, and a line at the ideal.

    Args:
        found: family, or baseline, to speedup over one after the other.
    """
    spare = dict.fromkeys(found, "#0891b2") | COLOURS
    x = {"field": "speedup", "type": "quantitative", "title": "speedup over one after the other"}
    bar = {
        "data": {"values": [{"family": name, "speedup": round(value, 4)} for name, value in found.items()]},
        "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": {"band": 0.75}},
        "encoding": {
            "y": {"field": "family", "type": "nominal", "sort": None, "title": None},
            "x": x,
            "color": {
                "field": "family",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": list(found), "range": [spare[name] for name in found]},
            },
            "tooltip": [{"field": "family"}, {"field": "speedup", "format": ".3f"}],
        },
    }
    line = {
        "data": {"values": [{"family": "ideal", "speedup": round(ideal, 4)}]},
        "mark": {"type": "rule", "strokeWidth": 2, "color": RED, "tooltip": True},
        "encoding": {"x": x, "tooltip": [{"field": "family"}, {"field": "speedup", "format": ".3f"}]},
    }
    return {"height": 24 * len(found), "layer": [bar, line]}
