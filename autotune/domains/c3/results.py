"""Metrics of a scenario's times, their table in a terminal, and their charts in a report (:mod:`autotune.charts`).

The metrics are ConCCL's. The computation and the collective are each timed alone, on all devices. The ideal speedup
over running them in sequence is ``(T_gemm + T_comm) / max(T_gemm, T_comm)``. A strategy that takes ``T_c3`` has the
speedup ``(T_gemm + T_comm) / T_c3``, and realises ``(speedup - 1) / (ideal - 1)`` of the ideal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.charts import Exhibit
from autotune.cli.output import console, is_busy, microseconds, print_busy_note, ratio
from autotune.domains.c3.scenario import LONG
from autotune.domains.c3.strategy import BASELINES
from autotune.store.records import Schedule
from autotune.task import REFERENCE
from autotune.workload import Workload

COMPUTE = "compute"
COMM = "comm:"
"""Names of the isolated times: "compute", and "comm:ENGINE" for each engine."""

Chart = dict[str, Any]
COLOURS = {
    "sequential": "#d1d5db",
    "naive": "#9ca3af",
    "naive swapped": "#6b7280",
    "order": "#93c5fd",
    "partition": "#c4b5fd",
    "copy engine": "#fcd34d",
    "tuned": "#16a34a",
}
RED = "#dc2626"


@dataclass(frozen=True)
class Isolated:
    """Isolated times of the computation and the collective.

    Attributes:
        compute: time of the computation, in any unit.
        engines: time of the collective for each engine that could be measured; at least one.
    """

    compute: float
    engines: Mapping[str, float]

    @classmethod
    def of(cls, times: Mapping[str, float], scale: float = 1.0) -> Isolated | None:
        """Select isolated times from times by name, with or without a reference's prefix; None if one is missing."""
        plain = {name.removeprefix(REFERENCE): us * scale for name, us in times.items() if us and us > 0}
        engines = {name.removeprefix(COMM): us for name, us in plain.items() if name.startswith(COMM)}
        return cls(plain[COMPUTE], engines) if COMPUTE in plain and engines else None

    @property
    def comm(self) -> float:
        """Time of the fastest engine."""
        return min(self.engines.values())

    @property
    def engine(self) -> str:
        """The fastest engine."""
        return min(self.engines, key=lambda name: self.engines[name])

    @property
    def longest(self) -> float:
        return max(self.compute, self.comm)

    @property
    def ideal(self) -> float:
        """The maximum speedup if neither part slows the other down."""
        return (self.compute + self.comm) / self.longest

    @property
    def kind(self) -> str:
        """The longer side: "compute", "communication", or "equal"."""
        if self.compute > LONG * self.comm:
            return "compute"
        return "communication" if self.comm > LONG * self.compute else "equal"

    def speedup(self, time: float) -> float:
        """Speedup over running both in sequence."""
        return (self.compute + self.comm) / time

    def fraction(self, time: float) -> float | None:
        """Share of the ideal gain that ``time`` realises; None if there is no possible gain."""
        gain = self.ideal - 1
        return (self.speedup(time) - 1) / gain if gain > 1e-6 else None

    def figures(self, time: float) -> dict[str, Any]:
        """Speedup, fraction of the ideal, and time relative to the longer part."""
        fraction = self.fraction(time)
        return {
            "speedup": round(self.speedup(time), 4),
            "fraction": None if fraction is None else round(fraction, 4),
            "t_over_max": round(time / self.longest, 4),
        }


def exhibits(workload: Workload, config: Mapping[str, Any] | None, schedule: Schedule | None) -> Sequence[Exhibit]:
    """Sections of a report about a searched scenario; see ``autotune.domain.Domain``."""
    alone = Isolated.of(schedule.references) if schedule else None
    if schedule is None or alone is None:
        return ()
    found = {name: alone.speedup(us) for name, us in sorted(schedule.rivals.items(), key=lambda item: -item[1])}
    if schedule.winner == "autotune":
        found["tuned"] = alone.speedup(schedule.latency_us)
    longer = alone.kind if alone.kind != "equal" else "neither"
    about = f"The line is the ideal, {alone.ideal:.3f}: the shorter side wholly hidden. Longer is: {longer}."
    shown = [Exhibit("Against the ideal", about, chart=against_ideal(found, alone.ideal))]
    times = {"computation": alone.compute, **{f"collective by {name}": us for name, us in alone.engines.items()}}
    shown.append(Exhibit("Each side alone", heads=("side", "µs"), rows=list(times.items())))
    if config:
        rows = [(str(name), str(value)) for name, value in config.items()]
        shown.append(Exhibit("Strategy", heads=("parameter", "value"), rows=rows))
    return shown


def against_ideal(found: Mapping[str, float], ideal: float) -> Chart:
    """A scenario's speedups as a bar chart, with a line at the ideal.

    Args:
        found: family or baseline to its speedup over running both in sequence.
    """
    spare = dict.fromkeys(found, "#0891b2") | COLOURS
    x = {"field": "speedup", "type": "quantitative", "title": "speedup over one after the other"}
    bar = {
        "data": {"values": [{"family": name, "speedup": round(value, 4)} for name, value in found.items()]},
        "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": {"band": 0.75}},
        "encoding": {
            "y": {"field": "family", "type": "nominal", "sort": None, "title": None},
            "x": x,
            "color": {
                "field": "family",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": list(found), "range": [spare[name] for name in found]},
            },
            "tooltip": [{"field": "family"}, {"field": "speedup", "format": ".3f"}],
        },
    }
    line = {
        "data": {"values": [{"family": "ideal", "speedup": round(ideal, 4)}]},
        "mark": {"type": "rule", "strokeWidth": 2, "color": RED, "tooltip": True},
        "encoding": {"x": x, "tooltip": [{"field": "family"}, {"field": "speedup", "format": ".3f"}]},
    }
    return {"height": 24 * len(found), "layer": [bar, line]}


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
