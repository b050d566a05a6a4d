"""Charts as pictures, for documents; see :mod:`autotune.charts`.

``python -m benchmarks.pictures`` draws the README's picture of users' programs, for a light and a dark page, from
``benchmarks/results/h200/user_programs.json``. ``make figures`` does so, and updates the tables of documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from autotune import charts
from benchmarks.form import RESULTS, ROOT, read
from benchmarks.user_programs import summary

PROGRAMS = RESULTS / "h200" / "user_programs.json"
DRAWN = {False: ROOT / "docs/pictures/user-programs.svg", True: ROOT / "docs/pictures/user-programs-dark.svg"}
"""The picture of :data:`PROGRAMS`, by whether the page is dark."""

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the version of Vega-Lite in a specification; nothing is fetched from there."""


def svg(chart: Mapping[str, Any], dark: bool = False) -> str:
    """A chart as the text of an SVG document, on white or for a dark page.

    Raises:
        UserError: the package that draws is missing.
    """
    made = {"$schema": SCHEMA, **chart, "config": {**charts.theme(dark), **chart.get("config", {})}}
    return str(charts.library().vegalite_to_svg(made, vl_version=charts.VERSION))


def compiled(chart: Mapping[str, Any]) -> dict[str, Any]:
    """A chart as Vega, which fails where it is no Vega-Lite.

    Raises:
        ValueError: what is wrong with it.
    """
    return dict(charts.library().vegalite_to_vega({"$schema": SCHEMA, **chart}, vl_version=charts.VERSION))


def installed() -> bool:
    """Return True if the library that draws charts is installed."""
    return find_spec("vl_convert") is not None


def origin(data: Mapping[str, Any]) -> str:
    """The comment that names the measurement in a picture of it."""
    return f"<!-- {data['device']}, {data['when']} -->"


def draw() -> None:
    """Draw the README's picture of users' programs.

    Raises:
        UserError: the package that draws is missing.
    """
    data = read(PROGRAMS)
    for dark, path in DRAWN.items():
        path.write_text(f"{svg(summary.chart(data), dark)}\n{origin(data)}\n")


if __name__ == "__main__":
    draw()
