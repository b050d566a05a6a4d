"""How well C3's heuristics do on scenarios that were searched.

``python -m benchmarks.c3_heuristics RESULT.json FIGURES.json``: RESULT is of ``python -m benchmarks.c3``, FIGURES of
``autotune calibrate c3 --json``. Nothing is measured: choices are looked up among the strategies that the search has
tried, so that the model can be worked on without the machine. And so that it is not fitted to those scenarios, the
choices for each of the calibration's own GEMMs are told too, by what was measured of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.domains.c3.calibration.heuristics import choose
from autotune.domains.c3.calibration.model import Model
from autotune.domains.c3.calibration.tables import gemm_name, parse_strategy, strategy_name
from autotune.domains.c3.scenario import Gemm, Scenario, parse_gemm
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize
from autotune.task import Config

WITHIN = 1.1
CLOSE = 1.02


@dataclass(frozen=True)
class Choice:
    """What the heuristics chose for a case.

    Attributes:
        over_tuned: its time over that of the tuned strategy, both of one run; None where it was not measured.
        listed: the same of the best of the strategies that a search begins with.
    """

    case: str
    label: str
    tuned: str
    over_tuned: float | None
    listed: float | None = None


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
        chosen = choose(scenario, figures, side)
        over = [_over_tuned(case, scenario, config, side) for config in chosen]
        listed = min((o for o in over if o is not None), default=None)
        out.append(Choice(case["name"], _label(chosen[0], side), tuned["label"], over[0], listed))
    return out


def left_out(figures: Mapping[str, float], side: str, *, by_rule: bool = False) -> list[Choice]:
    """First choices for the GEMMs of a calibration, each beside the collectives that it was measured with, and without
    any figure of its own: how well the tables tell of what is not in them.

    Args:
        by_rule: choose without any figures.
    """
    model = Model.of(figures)
    curves: dict[tuple[str, Gemm], dict[str, list[tuple[float, float]]]] = {}
    for name, unhidden in figures.items():
        match name.split("."):
            case ["unhidden", op, strategy, shape, dtype, percent]:
                point = float(percent.removesuffix("pct")) / 100, unhidden
                curves.setdefault((op, parse_gemm(shape, dtype)), {}).setdefault(strategy, []).append(point)
    out = []
    for (op, gemm), by_strategy in curves.items():
        own = f".{gemm_name(gemm)}."
        others = {} if by_rule else {name: v for name, v in figures.items() if own not in f"{name}."}
        count = max(len(curve) for curve in by_strategy.values())
        for k in range(count):  # the sizes, the smallest first; of a strategy without one of them, none is known
            points = {name: sorted(curve)[k] for name, curve in by_strategy.items() if len(curve) == count}
            times = {name: max(1.0, comm) + unhidden * min(1.0, comm) for name, (comm, unhidden) in points.items()}
            name = next(iter(points))
            nbytes = _size(model, Scenario(gemm, op, 1024, 2), name, model.gemms[gemm] * points[name][0], side)
            scenario = Scenario(gemm, op, nbytes, 2)
            chosen = choose(scenario, others, side)[0]
            best = min(times, key=times.__getitem__)
            time = times.get(strategy_name(chosen))
            over = time / times[best] if time is not None else None
            label = f"{op} {nbytes >> 20} MiB {gemm.label}"
            out.append(Choice(label, _label(chosen, side), best.replace(",", " "), over))
    return out


def _size(model: Model, scenario: Scenario, name: str, comm_us: float, side: str) -> int:
    """The bytes that take a strategy's collective so long."""
    config = parse_strategy(name, side)
    sizes = [replace(scenario, nbytes=round(2 ** (k / 32)) << 10) for k in range(23 * 32)]
    return min(sizes, key=lambda s: abs((model.comm_us(s, config) or 0.0) - comm_us)).nbytes


def share(choices: Iterable[Choice]) -> float | None:
    """How many of the measured choices are within 10% of the tuned time; None where none was measured."""
    known = [c.over_tuned <= WITHIN for c in choices if c.over_tuned is not None]
    return statistics.fmean(known) if known else None


def _over_tuned(case: Mapping[str, Any], scenario: Scenario, chosen: Config, side: str) -> float | None:
    tuned = case["strategies"]["tuned"]
    # The fixed strategies are today's in every result; what a search found may be of a version that ran it otherwise.
    if (ms := _named(case.get("beside", {}), scenario, chosen, side)) is not None:
        return float(ms / tuned["ms"])
    compared = [e for e in (*case["strategies"].values(), case.get("heuristic"), case.get("default")) if e]
    for entry in compared:  # of the final comparison, where it was part of it
        if normalize(entry["strategy"], scenario, side) == chosen:
            return float(entry["ms"] / tuned["ms"])
    searched = case["measured"]
    ms = _named(searched, scenario, chosen, side)
    best = searched.get(tuned["label"])
    return float(ms / best) if ms and best else None


def _named(times: Mapping[str, float | None], scenario: Scenario, chosen: Config, side: str) -> float | None:
    """The time of a strategy among those of labels, which an older version may have written otherwise."""
    if (ms := times.get(_label(chosen, side))) is not None:
        return ms
    for label, ms in times.items():
        if ms is not None and normalize(parse_strategy(label.replace(" ", ","), side), scenario, side) == chosen:
            return ms
    return None


def _label(config: Mapping[str, Any], side: str) -> str:
    return (HostStrategy if side == "cpu" else Strategy).of(config).label


def main() -> None:
    """Print the choices, and how near to tuned they come."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("figures", type=Path, nargs="?", help="without it: the choice by rule")
    args = parser.parse_args()
    data = json.loads(args.result.read_text())
    figures = json.loads(args.figures.read_text())["figures"] if args.figures else {}
    side = "cpu" if any("threads" in c["strategies"]["naive"]["strategy"] for c in data["cases"]) else "cuda"
    choices = held_out(data["cases"], figures, side)
    _print(choices)
    begun = [c.listed for c in choices if c.listed is not None]
    print(f"{sum(o <= CLOSE for o in begun)} of {len(begun)} lists hold a strategy within 2% of tuned")
    if figures:
        print("\nGEMMs of the calibration, by the figures of the others")
        _print(left_out(figures, side))


def _print(choices: Sequence[Choice]) -> None:
    for c in choices:
        over = "not measured" if c.over_tuned is None else f"{c.over_tuned:.3f}"
        print(f"{c.case:44} {over:>12}  {c.label}" + ("" if c.label == c.tuned else f"  (tuned: {c.tuned})"))
    near = share(choices)
    known = [c.over_tuned for c in choices if c.over_tuned is not None]
    told = "none was measured"
    if near is not None:
        mean = math.exp(statistics.fmean(map(math.log, known)))
        told = f"{near:.0%} within 10% of tuned, {mean:.3f} in the geometric mean, {max(known):.3f} at worst"
    print(f"{told}; {len(known)} of {len(choices)} first choices were measured")


if __name__ == "__main__":
    main()
