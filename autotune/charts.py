"""Sections of a report's page, its charts, and access to vl-convert, which draws them.

Domains make exhibits, ``autotune.report`` lays them out. Charts are Vega-Lite, plain JSON, so that making one needs no
import (``docs/decisions/008-plots.md`` has the reasons).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError

VERSION = "6.1"
"""Version of Vega-Lite, in vl-convert's numbering."""

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

COLOURS = {
    "autotune": "#16a34a",
    "inductor": "#3b82f6",
    "inductor best": "#1d4ed8",
    "torch.compile": "#3b82f6",
    "eager": "#9ca3af",
    "xla": "#a855f7",
    "ok": "#16a34a",
    "copy floor": "#0f766e",
}
"""Colour of each contender in every chart; readable on white and on black."""


@dataclass(frozen=True)
class Exhibit:
    """One section of a page. Every text is plain; the HTML writer escapes it.

    Attributes:
        title: of the section.
        text: a sentence or two about it.
        chart: a Vega-Lite specification without width and config, which the page adds.
        svg: a picture, as the text of an SVG document.
        heads: of a table's columns; ``rows`` its cells, numbers as numbers.
        folded: True to show the section collapsed.
    """

    title: str
    text: str = ""
    chart: Mapping[str, Any] | None = None
    svg: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str | float | None]] = ()
    folded: bool = False


def theme(dark: bool = False) -> dict[str, Any]:
    """A Vega-Lite ``config`` for a light or a dark page; the dark one sets no background."""
    ink, faint = ("#e5e7eb", "#374151") if dark else ("#1f2937", "#e5e7eb")
    text = {"labelColor": ink, "titleColor": ink}
    return {
        "background": None if dark else "white",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {**text, "gridColor": faint, "domainColor": faint, "tickColor": faint, "labelLimit": 260},
        "legend": {**text, "orient": "top", "columns": 4, "labelLimit": 260},
        "header": text,
        "title": {"color": ink, "anchor": "start"},
        "text": {"color": ink},
        "rule": {"color": ink},
    }


def scale(names: list[str]) -> dict[str, Any]:
    """A colour scale with :data:`COLOURS`, and colours of a palette for other names."""
    spare = iter(("#d97706", "#0891b2", "#db2777", "#65a30d", "#7c3aed", "#b45309", "#0d9488", "#be123c") * 8)
    return {"domain": names, "range": [COLOURS.get(name) or next(spare) for name in names]}


def javascript() -> str:
    """Vega, Vega-Lite and vega-embed as one script of 0.9 MB, for a page that loads nothing from elsewhere.

    Raises:
        UserError: vl-convert is not installed.
    """
    # The bundle declares top-level constants: a function around them avoids clashes with the page's own names.
    return f"(() => {{\n{library().javascript_bundle(vl_version=VERSION)}\n}})();\n"


def library() -> Any:
    """Import vl-convert, which draws charts and has the scripts; raises UserError if it is not installed."""
    try:
        import vl_convert
    except ImportError:
        raise UserError("charts need vl-convert-python: run `pip install 'autotune-torch[report]'`") from None
    return vl_convert


Chart = dict[str, Any]
OTHERS = "others"
"""Data set that a page's script fills with the points of all workloads of a device."""

MICROSECONDS = "microseconds"

_BAR = 22  # pixels of a bar with its gap
_LABELS = 200  # the widest a bar's name may be


def bars(values: Mapping[str, float], title: str) -> Chart:
    """Return a chart of named numbers as horizontal bars in their order, each coloured by its name.

    Args:
        title: of the axis, with the unit.
    """
    names = list(values)
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": _LABELS}}
    return {
        "data": {"values": [{"name": n, "value": _short(v)} for n, v in values.items()]},
        "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": {"band": 0.75}},
        "encoding": {
            "y": y,
            "x": {"field": "value", "type": "quantitative", "title": title},
            "color": {"field": "name", "type": "nominal", "scale": scale(names), "legend": None},
            "tooltip": [{"field": "name"}, {"field": "value", "type": "quantitative", "title": title}],
        },
        "height": _BAR * len(values),
    }


def history(
    candidates: Sequence[Mapping[str, Any]],
    levels: Mapping[str, float],
    *,
    shown: Callable[[float], float] = float,
    unit: str = MICROSECONDS,
) -> Chart:
    """Return a chart of latency, or another figure, against candidates in the order of measurement.

    Args:
        candidates: with ``n``, ``us`` (None for a failure), ``status``, ``configuration``.
        levels: name to microseconds: baselines, and the deployed code.
        shown: converts stored microseconds (less is better) to a figure in ``unit``.
    """
    best, so_far = math.inf, []
    for c in candidates:
        if c["us"] is not None:
            best = min(best, c["us"])
        if math.isfinite(best):
            so_far.append({"n": c["n"], "us": _short(shown(best)), "series": "best so far"})
    failed = any(c["us"] is None for c in candidates)
    names = ["candidate", "best so far", *(["failed"] if failed else []), *levels]
    own = ["#0891b2", "#d97706", *(["#dc2626"] if failed else [])]
    colours = scale(list(levels))
    colour = {
        "field": "series",
        "type": "nominal",
        "title": None,
        "scale": {"domain": names, "range": [*own, *colours["range"]]},
    }
    x = {"field": "n", "type": "quantitative", "title": "candidates", "axis": {"tickMinStep": 1, "format": "d"}}
    y = {
        "field": "us",
        "type": "quantitative",
        "title": f"{unit} (log)",
        "scale": {"type": "log", "nice": False, "padding": 12},
    }
    tooltip = [
        {"field": "n", "title": "candidate"},
        {"field": "status"},
        {"field": "us", "format": ".4~g", "title": unit},
    ]
    tooltip.append({"field": "configuration"})
    rows = [
        {**c, "us": None if c["us"] is None else _short(shown(c["us"])), "series": "candidate" if c["us"] else "failed"}
        for c in candidates
    ]
    layers: list[Chart] = [
        {
            "data": {"values": [r for r in rows if r["us"] is not None]},
            "mark": {"type": "point", "filled": True, "size": 28, "opacity": 0.75},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
        },
        {
            "data": {"values": [r for r in rows if r["us"] is None]},
            "mark": {"type": "tick", "orient": "vertical", "size": 10, "thickness": 2},
            "encoding": {"x": x, "y": {"value": 4}, "color": colour, "tooltip": tooltip},
        },
        {
            "data": {"values": so_far},
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "data": {"values": [{"us": _short(shown(us)), "series": name} for name, us in levels.items()]},
            "mark": {"type": "rule", "strokeDash": [5, 3]},
            "encoding": {"y": y, "color": colour, "tooltip": [{"field": "series"}, {"field": "us", "title": unit}]},
        },
    ]
    return {"height": 260, "layer": [layer for layer in layers if layer["data"]["values"]]}


def roofline(own: Mapping[str, tuple[int, float]], bandwidth_gbs: float, reach: tuple[float, float]) -> Chart:
    """Return a chart of time against bytes moved, with the device's bandwidth line; only cached data is below it.

    Args:
        own: name to bytes and microseconds: the deployed code and its baselines.
        bandwidth_gbs: in 10^9 bytes per second.
        reach: smallest and largest number of bytes shown.
    """
    low, high = reach[0] / 2, reach[1] * 2
    line = [{"bytes": b, "us": b / bandwidth_gbs / 1e3, "name": f"{bandwidth_gbs:.4g} GB/s"} for b in (low, high)]
    x = {
        "field": "bytes",
        "type": "quantitative",
        "title": "bytes (log)",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {"format": ".2~s", "labelOverlap": True},
    }
    y = {
        "field": "us",
        "type": "quantitative",
        "title": "microseconds (log)",
        "scale": {"type": "log", "nice": False, "padding": 8},
        "axis": {"labelOverlap": True},
    }
    tooltip = [{"field": "name"}, {"field": "bytes", "format": ".4~s"}, {"field": "us", "format": ".4~g"}]
    names = list(own)
    layers: list[Chart] = [
        {
            "data": {"name": OTHERS, "values": []},
            "mark": {"type": "circle", "size": 18, "opacity": 0.45, "color": "#9ca3af", "clip": True},
            "encoding": {"x": x, "y": y, "tooltip": tooltip},
        },
        {
            "data": {"values": line},
            "mark": {"type": "line", "strokeDash": [5, 3], "color": "#dc2626", "tooltip": True},
            "encoding": {"x": x, "y": y, "tooltip": [{"field": "name"}]},
        },
    ]
    if own:
        values = [{"name": n, "bytes": b, "us": _short(us)} for n, (b, us) in own.items()]
        layers.append(
            {
                "data": {"values": values},
                "mark": {"type": "point", "filled": True, "size": 110},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {"field": "name", "type": "nominal", "title": None, "scale": scale(names)},
                    "tooltip": tooltip,
                },
            }
        )
    return {"height": 280, "layer": layers}


def speedups(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return a chart with every speedup as a tick, one line for each ``of``.

    Args:
        rows: with ``of``, ``name``, ``speedup``.
    """
    return {
        "data": {"values": list(rows)},
        "height": 34 * len({row["of"] for row in rows}),
        "layer": [
            {
                "mark": {"type": "tick", "thickness": 2, "opacity": 0.6, "size": 18},
                "encoding": {
                    "y": {"field": "of", "type": "nominal", "title": None, "axis": {"labelLimit": _LABELS}},
                    "x": {
                        "field": "speedup",
                        "type": "quantitative",
                        "title": "speedup (log)",
                        "scale": {"type": "log", "nice": False, "padding": 10},
                        "axis": {"labelOverlap": True},
                    },
                    "color": {"value": "#16a34a"},
                    "tooltip": [{"field": "name"}, {"field": "speedup", "format": ".3~f"}],
                },
            },
            {
                "data": {"values": [{"speedup": 1}]},
                "mark": {"type": "rule", "strokeDash": [4, 3]},
                "encoding": {"x": {"field": "speedup", "type": "quantitative"}},
            },
        ],
    }


def _short(value: float) -> float:
    """Round to five significant digits: more are invisible, and pages get smaller."""
    return float(f"{value:.5g}")
