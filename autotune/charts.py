"""Sections of a report's page, and access to vl-convert, which draws their charts.

Domains make exhibits, ``autotune.report`` lays them out. Charts are Vega-Lite, plain JSON, so that making one needs no
import (``docs/decisions/008-plots.md`` has the reasons).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
