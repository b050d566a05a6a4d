"""The C3 suite as charts: bars of all scenarios, and a timeline as a file has it; see :mod:`autotune.charts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.domains.c3.results import COLOURS, RED, Chart
from benchmarks.c3.case import over_sequential, speedups

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
                    "xOffset": {"field": "family", "type": "nominal", "sort": list(COLOURS)},
                    "y": y,
                    "color": {**_colour(list(COLOURS)), **({} if legend else {"legend": None})},
                    "tooltip": told,
                },
            },
            {
                "data": {"values": ideals},
                "mark": {"type": "tick", "thickness": 2, "color": RED, "bandSize": 52},
                "encoding": {"x": x, "y": y, "tooltip": told},
            },
        ],
    }


def _colour(names: list[str]) -> Chart:
    return {
        "field": "family",
        "type": "nominal",
        "title": None,
        "scale": {"domain": names, "range": [COLOURS[name] for name in names]},
    }


def picture(chart: Chart) -> Chart:
    """A timeline for a file: its panels get a width."""
    return {**chart, "vconcat": [{**panel, "width": _WIDE} for panel in chart["vconcat"]]}
