"""The table of ``benchmarks.precision``'s results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.fusion.report import geometric_mean

CONTENDERS = {"eager": "eager", "inductor": "Inductor", "autotune": "autotune", "autotune_strict": "strict"}


def markdown(data: Mapping[str, Any]) -> str:
    """Errors of each case in units of 1e-6, and the geometric mean of autotune's over Inductor's."""
    head = ["case", *(f"{kind}: {title}" for kind in ("rms", "max") for title in CONTENDERS.values())]
    lines = [_row(head), _row(["---", *("---:" for _ in head[1:])])]
    for case in data["cases"]:
        lines.append(_row([case["name"], *(_micro(case[who][kind]) for kind in ("rms", "max") for who in CONTENDERS)]))
    told = []
    for who in ("autotune", "autotune_strict"):
        ratios = [
            [case[who][kind] / case["inductor"][kind] for case in data["cases"] if case["inductor"][kind]]
            for kind in ("rms", "max")
        ]
        rms, most = map(geometric_mean, ratios)
        mean = f"{rms:.2f} times its rms and {most:.2f} times its max error in the geometric mean"
        told.append(f"{CONTENDERS[who]}: {mean}, at most {max(ratios[0]):.2f} and {max(ratios[1]):.2f} times")
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    caption = f"{data['device']}, torch {data['versions']['torch']}; in units of 1e-6, {made}."
    return "\n".join([*lines, "", f"Against Inductor, {'; '.join(told)}.", "", caption]) + "\n"


def _micro(error: float) -> str:
    return f"{error * 1e6:.3g}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
