"""The C3 suite as charts: bars of all scenarios, bars of one, and what ran when in one; see :mod:`autotune.charts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.domains.c3.report.form import FAMILIES

Chart = dict[str, Any]
_COLOURS = {
    "sequential": "#d1d5db",
    "naive": "#9ca3af",
    "naive swapped": "#6b7280",
    "order": "#93c5fd",
    "partition": "#c4b5fd",
    "copy engine": "#fcd34d",
    "tuned": "#16a34a",
}
_ROWS = {
    "compute": "computation",
    "nccl": "NCCL kernels",
    "copies": "copies",
    "kernels": "Numba kernels",
    "gloo": "gloo",
    "copy": "copies through shared memory",
}
_LANES = ("#2563eb", "#9333ea", "#d97706", "#16a34a", "#9333ea", "#d97706")
_RED = "#dc2626"
_WIDE = 760
"""Pixels of a timeline in a picture; a page's charts are as wide as the page."""


def bars(data: Mapping[str, Any]) -> Chart:
    """Speedups over sequential of every scenario, a panel for each collective; a mark is the ideal."""
    cases = data["cases"]
    panels = [[c for c in cases if c["collective"] == name] for name in dict.fromkeys(c["collective"] for c in cases)]
    return {
        "title": f"Speedup over one after the other: {data['device']}",
        "vconcat": [_panel(panel, legend=n == 0) for n, panel in enumerate(panels)],
        "resolve": {"legend": {"color": "independent"}},
        "config": {"axisX": {"labelAngle": 90, "labelLimit": 200}, "legend": {"columns": 7}},
    }


def _panel(cases: list[Mapping[str, Any]], *, legend: bool) -> Chart:
    rows = [
        {"scenario": case["name"], "family": name, "speedup": round(value, 4)}
        for case in cases
        for name, value in speedups(case).items()
    ]
    ideals = [{"scenario": c["name"], "family": "ideal", "speedup": round(over_sequential(c), 4)} for c in cases]
    x = {"field": "scenario", "type": "nominal", "sort": None, "title": None}
    y = {"field": "speedup", "type": "quantitative", "title": "speedup"}
    told = [{"field": "scenario"}, {"field": "family"}, {"field": "speedup", "format": ".2f"}]
    return {
        "title": cases[0]["collective"],
        "width": {"step": 8},
        "height": 160,
        "layer": [
            {
                "data": {"values": rows},
                "mark": "bar",
                "encoding": {
                    "x": x,
                    "xOffset": {"field": "family", "type": "nominal", "sort": list(_COLOURS)},
                    "y": y,
                    "color": {**_colour(list(_COLOURS)), **({} if legend else {"legend": None})},
                    "tooltip": told,
                },
            },
            {
                "data": {"values": ideals},
                "mark": {"type": "tick", "thickness": 2, "color": _RED, "bandSize": 52},
                "encoding": {"x": x, "y": y, "tooltip": told},
            },
        ],
    }


def _colour(names: list[str]) -> Chart:
    return {
        "field": "family",
        "type": "nominal",
        "title": None,
        "scale": {"domain": names, "range": [_COLOURS[name] for name in names]},
    }


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
    spare = dict.fromkeys(found, "#0891b2") | _COLOURS
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
        "mark": {"type": "rule", "strokeWidth": 2, "color": _RED, "tooltip": True},
        "encoding": {"x": x, "tooltip": [{"field": "family"}, {"field": "speedup", "format": ".3f"}]},
    }
    return {"height": 24 * len(found), "layer": [bar, line]}


def timeline(case: Mapping[str, Any]) -> Chart:
    """What ran when in a case, naively overlapped and tuned, on one scale; the times are rank 0's."""
    runs = {name: case["timeline"][name] for name in ("naive", "tuned") if name in case["timeline"]}
    rows = [
        {
            "run": name,
            "row": _ROWS[span["row"]],
            "name": span["name"],
            "start": span["start_us"] / 1e3,
            "end": (span["start_us"] + span["us"]) / 1e3,
            "us": span["us"],
        }
        for name, run in runs.items()
        for span in run["spans"]
    ]
    used = [words for words in dict.fromkeys(_ROWS.values()) if any(row["row"] == words for row in rows)]
    colours = dict(zip(_ROWS.values(), _LANES, strict=True))
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
                        "scale": {"domain": used, "range": [colours[words] for words in used]},
                    },
                    "tooltip": [{"field": "name"}, {"field": "us"}, {"field": "start", "title": "from, ms"}],
                },
            }
        )
    return {"title": f"{case['name']}: what ran when, on rank 0", "vconcat": panels}


def picture(chart: Chart) -> Chart:
    """A timeline for a file: its panels get a width."""
    return {**chart, "vconcat": [{**panel, "width": _WIDE} for panel in chart["vconcat"]]}
