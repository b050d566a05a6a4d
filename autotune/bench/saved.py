"""GPU hours that stored kernels have saved, from counted steps and the verdicts on them.

A verdict has the times of a step with and without stored kernels: such savings are measured. Without a verdict, each
region is assumed to save as much in its step as alone: such savings are assumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autotune.space import is_number

if TYPE_CHECKING:
    from autotune.store import Saving, Verdict

_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Saved:
    """Savings of a program on one kind of device in one week.

    Attributes:
        device: fingerprint.
        week: its Monday in UTC, as "2026-11-23".
        steps: steps whose graphs have verdicts, and calls of other graphs.
        measured_h, assumed_h: hours of the device.
    """

    program: str
    device: str
    week: str
    steps: int
    measured_h: float
    assumed_h: float

    @property
    def hours(self) -> float:
        """Sum of measured and assumed hours."""
        return self.measured_h + self.assumed_h

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the fields."""
        return asdict(self)


def saved(counted: Iterable[Saving], verdicts: Sequence[Verdict]) -> list[Saved]:
    """Add up counts of all processes, by program, device and week.

    A step may have several graphs with one verdict. Each process has run as many steps as the least of their counts.
    """
    steps = {(v.graph, v.device, v.environment, v.mode): _step(v) for v in verdicts}
    least: dict[tuple[_Key, str, str], tuple[int, float]] = {}
    found: dict[_Key, list[float]] = {}
    for one in counted:
        key = (one.program, one.device, one.week)
        total = found.setdefault(key, [0, 0.0, 0.0])
        step = steps.get((one.graph, one.device, one.environment, one.mode))
        if step is None:
            total[0] += one.steps
            total[2] += one.steps * one.alone_us
            continue
        name, won_us = step
        before = least.get((key, one.process, name))
        least[key, one.process, name] = (one.steps if before is None else min(before[0], one.steps), won_us)
    for (key, _, _), (count, won_us) in least.items():
        found[key][0] += count
        found[key][1] += count * won_us
    made = [Saved(*key, int(n), measured / 3.6e9, assumed / 3.6e9) for key, (n, measured, assumed) in found.items()]
    return sorted(made, key=lambda s: (s.week, s.hours), reverse=True)


def _step(verdict: Verdict) -> tuple[str, float] | None:
    """Return the shared name of a step's graphs, and the microseconds saved per step; None if not timed."""
    record = verdict.record
    theirs, ours = record.get("compile_us"), record.get("autotune_us")
    if not is_number(theirs):
        return None
    name = json.dumps([verdict.device, verdict.environment, verdict.mode, dict(record)], sort_keys=True, default=str)
    return name, theirs - ours if is_number(ours) else 0.0


__all__ = ["Saved", "saved"]
