"""Answers of ``search c3`` and ``lookup c3``: times and metrics of a scenario, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.cli.output import console, is_busy, microseconds, print_busy_note, ratio
from autotune.domains.c3.results import Isolated
from autotune.domains.c3.strategy import BASELINES


def deployed_config(config: Mapping[str, Any] | None, winner: str, side: str) -> dict[str, Any] | None:
    """The strategy that a schedule deploys: the winning baseline's, or ``config``."""
    found = BASELINES[side].get(winner, config)
    return None if found is None else dict(found)


def figures(
    baselines: Mapping[str, float | None], references: Mapping[str, float], deployed_us: float | None
) -> dict[str, Any]:
    """Times in microseconds and metrics; null where unknown.

    Args:
        baselines: times of the baselines, from a schedule.
        references: isolated times of both parts.
        deployed_us: time of the deployed strategy.
    """
    alone = Isolated.of(references)
    metrics: dict[str, Any] = {"speedup": None, "fraction": None, "t_over_max": None}
    if alone is not None and deployed_us is not None:
        metrics = alone.figures(deployed_us)
    return {
        "t_compute_us": alone.compute if alone else None,
        "t_comm_us": alone.comm if alone else None,
        "t_comm_by_engine_us": dict(alone.engines) if alone else {},
        "kind": alone.kind if alone else None,
        "ideal": round(alone.ideal, 4) if alone else None,
        "sequential_us": baselines.get("sequential"),
        "naive_us": baselines.get("naive"),
        "deployed_us": deployed_us,
        **metrics,
    }


def print_scenario(answer: Mapping[str, Any]) -> None:
    """Print a scenario's answer as a table on stdout."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    engines = ", ".join(f"{name} {microseconds(us)}" for name, us in answer["t_comm_by_engine_us"].items())
    rows = [
        ("scenario", answer["label"]),
        ("computation alone", microseconds(answer["t_compute_us"])),
        ("collective alone", f"{microseconds(answer['t_comm_us'])}{f' ({engines})' if engines else ''}"),
        ("longer operation", answer["kind"] or "–"),
        ("ideal speedup", ratio(answer["ideal"])),
        ("sequential", microseconds(answer["sequential_us"])),
        ("naive overlap", microseconds(answer["naive_us"])),
        ("tuned", f"{microseconds(answer['deployed_us'])}{' (busy)' if is_busy(answer) else ''}"),
        ("speedup over both alone", ratio(answer["speedup"])),
        ("share of the ideal", _percent(answer["fraction"])),
        ("time over the longer", ratio(answer["t_over_max"])),
        ("match", _match(answer)),
        ("strategy", answer["strategy_label"] or "–"),
    ]
    for name, text in rows:
        if text != "–":
            table.add_row(name, text)
    console().print(table, markup=False, highlight=False)
    print_busy_note([answer])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _match(answer: Mapping[str, Any]) -> str:
    level = str(answer["match"])
    if level != "nearest":
        return level
    return f"{level}: {answer['tuned_label']}, sizes differ by a factor of at most {2 ** answer['distance']:.3g}"
