"""Charts as pictures, for documents; see :mod:`autotune.charts`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from autotune import charts

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the version of Vega-Lite in a specification; nothing is fetched from there."""


def svg(chart: Mapping[str, Any]) -> str:
    """A chart as the text of an SVG document, on white.

    Raises:
        UserError: the package that draws is missing.
    """
    made = {"$schema": SCHEMA, **chart, "config": {**charts.theme(), **chart.get("config", {})}}
    return str(charts.library().vegalite_to_svg(made, vl_version=charts.VERSION))


def compiled(chart: Mapping[str, Any]) -> dict[str, Any]:
    """A chart as Vega, which fails where it is no Vega-Lite.

    Raises:
        ValueError: what is wrong with it.
    """
    return dict(charts.library().vegalite_to_vega({"$schema": SCHEMA, **chart}, vl_version=charts.VERSION))


def installed() -> bool:
    """Whether charts can be drawn here."""
    return find_spec("vl_convert") is not None
