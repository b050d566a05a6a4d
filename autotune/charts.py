"""What a page of a report shows, and the one door to vl-convert, which draws its charts.

Domains make exhibits, ``autotune.report`` lays them out. Charts are Vega-Lite, plain JSON, so that whoever makes one
imports nothing; ``docs/decisions/008-plots.md`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError

VERSION = "6.1"
"""Of Vega-Lite, as vl-convert counts them."""

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
"""One colour for each contender, in every chart; readable on white and on black."""


@dataclass(frozen=True)
class Exhibit:
    """One section of a page. Every text is plain; whoever writes HTML escapes it.

    Attributes:
        title: of the section.
        text: a sentence or two about it.
        chart: a Vega-Lite specification without width and config, which the page adds.
        svg: a picture, as the text of an SVG document.
        heads: of a table's columns; ``rows`` its cells, numbers as numbers.
        folded: whether the reader has to open it.
    """

    title: str
    text: str = ""
    chart: Mapping[str, Any] | None = None
    svg: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str | float | None]] = ()
    folded: bool = False


def theme(dark: bool = False) -> dict[str, Any]:
    """A Vega-Lite ``config`` for a light or a dark page, without a background of its own when dark."""
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
    """A colour scale with :data:`COLOURS`, and some of a palette for names that are not among them."""
    spare = iter(("#d97706", "#0891b2", "#db2777", "#65a30d", "#7c3aed", "#b45309", "#0d9488", "#be123c") * 8)
    return {"domain": names, "range": [COLOURS.get(name) or next(spare) for name in names]}


def javascript() -> str:
    """Vega, Vega-Lite and vega-embed as one script of 0.9 MB, for a page that loads nothing from elsewhere.

    Raises:
        UserError: the package that has it is missing.
    """
    # The bundle declares constants at its top: a function around them keeps them from the page's own names.
    return f"(() => {{\n{library().javascript_bundle(vl_version=VERSION)}\n}})();\n"


def library() -> Any:
    """The package that draws and has the scripts; raises UserError where it is missing."""
    try:
        import vl_convert
    except ImportError:
        raise UserError("charts need vl-convert-python: pip install 'autotune[report]'") from None
    return vl_convert
