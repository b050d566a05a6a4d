"""What came of one attempt to measure something."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.measure.blame import Blame
from autotune.task import Status


@dataclass(frozen=True)
class Outcome:
    """Result of a job in the worker.

    Attributes:
        samples: microseconds, in the order taken; empty unless ``status`` is OK.
        error: largest error over tolerance that verification found; None where it was not reached.
        reason: one line; empty when OK.
        seconds: wall time the job took, waiting for start-up excluded.
        fault: whose fault a failure is; nothing is stored of a candidate that is not to blame.
        metrics: figures of the domain's own, by name.
    """

    status: Status
    samples: tuple[float, ...] = ()
    error: float | None = None
    reason: str = ""
    seconds: float = 0.0
    fault: Blame = Blame.CANDIDATE
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def latency_us(self) -> float | None:
        """Median of the samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def noise(self) -> float | None:
        """(p75 - p25) / median of the samples."""
        return spread(self.samples) if self.samples else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": str(self.status),
            "samples": list(self.samples),
            "error": self.error,
            "reason": self.reason,
            "fault": str(self.fault),
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], seconds: float = 0.0) -> Outcome:
        return cls(
            status=Status(data["status"]),
            samples=tuple(float(s) for s in data["samples"]),
            error=None if data["error"] is None else float(data["error"]),
            reason=str(data["reason"]),
            seconds=seconds,
            fault=Blame(data.get("fault", "")),
            metrics={str(name): float(figure) for name, figure in (data.get("metrics") or {}).items()},
        )


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    q1, q2, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return (q3 - q1) / q2 if q2 > 0 else 0.0


def one_line(text: object, limit: int = 300) -> str:
    """``text`` as a single line of at most ``limit`` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
