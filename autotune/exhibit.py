"""What a page of a report shows: words, a chart, a picture or a table. Domains make them, ``autotune.report`` lays
them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exhibit:
    """One section of a page. Every text is plain; whoever writes HTML escapes it.

    Attributes:
        title: of the section.
        text: a sentence or two about it.
        chart: a Vega-Lite specification without width and config, which :mod:`autotune.charts` adds.
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
