"""A plot of regret against candidates, from a file of :mod:`benchmarks.search_quality.contributions`.

python -m benchmarks.search_quality.plot benchmarks/results/h200/search_all_neighbours.json search-quality.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autotune import charts
from benchmarks import pictures
from benchmarks.form import read
from benchmarks.replay.regret import geometric

LINES = {"default": "default", "without any seed": "without seeds and model", "random alone": "random search"}
"""Variant to its name in the picture."""


def chart(data: Any) -> dict[str, Any]:
    """Regret against candidates, in the geometric mean over the spaces."""
    values = [
        {
            "candidates": n,
            "search": label,
            "regret": geometric([c["searches"][name]["regret"][k] for c in data["cases"]]) or None,  # no log of 0
        }
        for name, label in LINES.items()
        for k, n in enumerate(data["budgets"])
    ]
    return {
        "width": 560,
        "height": 280,
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "candidates", "type": "quantitative", "title": "candidates measured"},
            "y": {
                "field": "regret",
                "type": "quantitative",
                "title": "above the best there is",
                "scale": {"type": "log"},
                "axis": {"format": "~%"},
            },
            "color": {
                "field": "search",
                "type": "nominal",
                "title": None,
                "scale": charts.scale(list(LINES.values())),
            },
        },
    }


def main() -> None:
    """Read the figures, write the picture."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("figures", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(pictures.svg(chart(read(args.figures))) + "\n")


if __name__ == "__main__":
    main()
