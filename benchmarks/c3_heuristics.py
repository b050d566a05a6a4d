"""How well C3's heuristics do on scenarios that were searched.

``python -m benchmarks.c3_heuristics RESULT.json FIGURES.json``: RESULT is of ``autotune bench c3``, FIGURES of
``autotune calibrate c3 --json``. Nothing is measured: the first choice is looked up among the strategies that the
search has tried, so that the model can be worked on without the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.c3.heuristics import choose
from autotune.c3.scenario import Scenario
from autotune.c3.strategy import HostStrategy, Strategy, normalize
from autotune.task import Config

WITHIN = 1.1


@dataclass(frozen=True)
class Choice:
    """What the heuristics chose for a case.

    Attributes:
        over_tuned: its time over that of the tuned strategy, both of one run; None where it was not measured.
    """

    case: str
    label: str
    tuned: str
    over_tuned: float | None


def held_out(cases: Iterable[Mapping[str, Any]], figures: Mapping[str, float], side: str) -> list[Choice]:
    """The heuristics' first choices for the cases of a result file.

    Args:
        figures: of a calibration; empty for the choice by rule.
        side: "cuda" or "cpu".
    """
    out = []
    for case in cases:
        scenario = Scenario.from_json(case["scenario"])
        tuned = case["strategies"]["tuned"]
        if tuned is None:
            continue
        chosen = choose(scenario, figures, side)[0]
        label = _label(chosen, side)
        out.append(Choice(case["name"], label, tuned["label"], _over_tuned(case, scenario, chosen, side)))
    return out


def share(choices: Iterable[Choice]) -> float | None:
    """How many of the measured choices are within 10% of the tuned time; None where none was measured."""
    known = [c.over_tuned <= WITHIN for c in choices if c.over_tuned is not None]
    return statistics.fmean(known) if known else None


def _over_tuned(case: Mapping[str, Any], scenario: Scenario, chosen: Config, side: str) -> float | None:
    tuned = case["strategies"]["tuned"]
    compared = [e for e in (*case["strategies"].values(), case.get("heuristic"), case.get("default")) if e]
    for entry in compared:  # of the final comparison, where it was part of it
        if normalize(entry["strategy"], scenario, side) == chosen:
            return float(entry["ms"] / tuned["ms"])
    searched = case["measured"]
    ms, best = searched.get(_label(chosen, side)), searched.get(tuned["label"])
    return ms / best if ms and best else None


def _label(config: Mapping[str, Any], side: str) -> str:
    return (HostStrategy if side == "cpu" else Strategy).of(config).label


def main() -> None:
    """Print the choices, and the share within 10% of tuned."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("figures", type=Path, nargs="?", help="without it: the choice by rule")
    args = parser.parse_args()
    data = json.loads(args.result.read_text())
    figures = json.loads(args.figures.read_text())["figures"] if args.figures else {}
    side = "cpu" if any("threads" in c["strategies"]["naive"]["strategy"] for c in data["cases"]) else "cuda"
    choices = held_out(data["cases"], figures, side)
    for c in choices:
        over = "not measured" if c.over_tuned is None else f"{c.over_tuned:.3f}"
        print(f"{c.case:28} {over:>12}  {c.label}" + ("" if c.label == c.tuned else f"  (tuned: {c.tuned})"))
    near = share(choices)
    known = sum(c.over_tuned is not None for c in choices)
    told = "none was measured" if near is None else f"{near:.0%} within 10% of tuned"
    print(f"{told}; {known} of {len(choices)} first choices were measured")


if __name__ == "__main__":
    main()
