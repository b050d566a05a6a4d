"""Exhibits of a scenario in a report: bars against the ideal, and a timeline where one is stored; see
:mod:`autotune.charts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.charts import Exhibit
from autotune.domains.c3.results import FAMILIES, Isolated

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
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
_ROWS = {
    "compute": ("computation", "#2563eb"),
    "nccl": ("NCCL kernels", "#9333ea"),
    "copies": ("copies", "#d97706"),
    "kernels": ("Numba kernels", "#16a34a"),
    "gloo": ("gloo", "#9333ea"),
    "copy": ("copies through shared memory", "#d97706"),
}
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
    shown = [Exhibit("Against the ideal", about, chart=against_ideal(found, alone.ideal))]
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
    chart = against_ideal(speedups(case), over_sequential(case))
    shown = [Exhibit("Against the ideal", about, chart=chart)]
    for panel in timeline(case)["vconcat"] if case.get("timeline") else ():
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


def speedups(case: Mapping[str, Any]) -> dict[str, float]:
    """Family to speedup over sequential; those that worked."""
    found = {"sequential": 1.0}
    for name in FAMILIES:
        if entry := case["strategies"].get(name):
            found[name.replace("_", " ")] = case["sequential_ms"] / entry["ms"]
    return found


def over_sequential(case: Mapping[str, Any]) -> float:
    """The ideal over what one after the other took in the same comparison."""
    longest: float = max(case["t_gemm_ms"], case["t_comm_ms"])
    return float(case["sequential_ms"]) / longest


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


def timeline(case: Mapping[str, Any]) -> Chart:
    """Timelines of a case, naively overlapped and tuned, on one scale; the times are rank 0's."""
    runs = {name: case["timeline"][name] for name in ("naive", "tuned") if name in case["timeline"]}
    rows = [
        {
            "run": name,
            "row": _ROWS[span["row"]][0],
            "name": span["name"],
            "start": span["start_us"] / 1e3,
            "end": (span["start_us"] + span["us"]) / 1e3,
            "us": span["us"],
        }
        for name, run in runs.items()
        for span in run["spans"]
    ]
    colours = {words: colour for words, colour in _ROWS.values() if any(row["row"] == words for row in rows)}
    used = list(colours)
    panels = []
    for name, run in runs.items():
        entry = case["strategies"].get(name)
        panels.append(
            {
                "title": f"{name}: {run['us'] / 1e3:.3g} ms" + (f", {entry['label']}" if entry else ""),
                "height": 26 * len({row["row"] for row in rows if row["run"] == name}),
                "data": {"values": [row for row in rows if row["run"] == name]},
                "mark": {"type": "bar", "stroke": "#ffffff", "strokeWidth": 0.5},
                "encoding": {
                    "y": {"field": "row", "type": "nominal", "sort": used, "title": None},
                    "x": {
                        "field": "start",
                        "type": "quantitative",
                        "title": "ms",
                        "scale": {"domain": [0, max(r["us"] for r in runs.values()) / 1e3], "nice": False},
                    },
                    "x2": {"field": "end"},
                    "color": {
                        "field": "row",
                        "type": "nominal",
                        "legend": None,
                        "scale": {"domain": used, "range": list(colours.values())},
                    },
                    "tooltip": [{"field": "name"}, {"field": "us"}, {"field": "start", "title": "from, ms"}],
                },
            }
        )
    return {"title": f"{case['name']}: what ran when, on rank 0", "vconcat": panels}
