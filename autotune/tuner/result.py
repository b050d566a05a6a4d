"""Reports of a search: progress and the final result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from autotune.store.records import BUSY
from autotune.task import Config

_RENAMED = ("best_us", "baseline_errors", "search_s", "bytes_moved", "others")
"""Fields of a result that its JSON renames or omits."""


class BusyMachine(UserWarning):
    """Other processes disturbed a final comparison: its latencies and its winner are unreliable."""


@dataclass(frozen=True)
class Progress:
    """A moment of a search, for a progress display.

    Attributes:
        workload: its label.
        phase: "search", "repeat" (near-best candidates again), "final" (against the baselines) or "done".
        measured: candidates measured by this search, failures included; at most ``trials``.
        best_us: the best latency so far in microseconds, None before the first one.
        left_s: seconds of the time budget left; None without one.
        note: one line on the last event.
        part: True if ``best_us`` is of a part of the workload that is searched separately.
        device: the device, in a search on several; else empty.
        saved_us: at the end, microseconds saved per call against the fastest baseline; 0 if a baseline won.
    """

    workload: str
    phase: str
    measured: int
    trials: int
    reused: int
    failed: int
    best_us: float | None
    elapsed_s: float
    left_s: float | None
    note: str = ""
    part: bool = False
    device: str = ""
    saved_us: float = 0.0


@dataclass(frozen=True)
class Result:
    """Outcome of searching one workload. Latencies in microseconds.

    Attributes:
        workload: fingerprint.
        measured: candidates measured by this search and stored, those that failed included.
        reused: candidates answered from measurements stored earlier or by a concurrent search.
        failed: new failures by status; "invalid" ones were rejected before compiling and are not in ``measured``.
        best: the fastest candidate's configuration; None if none worked.
        best_us: its latency in the final comparison, or in its last timing without a comparison.
        default_us: the default's latency from the same comparison; its first timing if it was too slow for it.
        baselines: name to latency; None for one that failed, with the reason in ``baseline_errors``.
        references: name to latency of references timed in the same comparison that do not do the whole work (a part of
            it, for example).
        metrics: domain-specific figures for the best candidate, by name.
        winner: "autotune", or the baseline that is deployed because it was faster; empty before a final comparison.
        deployed_us: latency of the deployed code.
        noise: interquartile range over median of the winner's samples.
        stop: why the search ended.
        seconds: duration of the search, including the final comparison; ``search_s`` of them before it.
        restarts: replaced worker processes; ``restart_s`` is the seconds spent waiting for their starts.
        baseline_s: seconds of the final comparison that prepared baselines, mostly compilation by torch.
        others: processors that other processes kept busy during the final comparison (CPU only): near 0 on a quiet
            machine. Larger values are a reason to search again.
        interrupted: ended by the user.
        begun: False if the run's time was up before this workload; the result is then an earlier search's.
        error: the error that prevented measurements; empty without one.
        fault: True if the machine caused the error and other workloads would fail too, so that the run ended with it.
    """

    workload: str
    label: str
    kind: str
    device: str
    policy: str
    measured: int = 0
    reused: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    best: Config | None = None
    best_us: float | None = None
    default_us: float | None = None
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    baseline_errors: Mapping[str, str] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    winner: str = ""
    deployed_us: float | None = None
    noise: float | None = None
    stop: str = ""
    seconds: float = 0.0
    search_s: float = 0.0
    restarts: int = 0
    restart_s: float = 0.0
    baseline_s: float = 0.0
    bytes_moved: int = 0
    others: float | None = None
    interrupted: bool = False
    begun: bool = True
    error: str = ""
    fault: bool = False

    @property
    def busy(self) -> bool:
        """True if other processes disturbed the final comparison too much to trust it."""
        return self.others is not None and self.others > BUSY

    @property
    def ok(self) -> bool:
        """True if any candidate could be measured, now or earlier. False leads to exit code 1."""
        return self.best is not None

    @property
    def speedup(self) -> float | None:
        """Latency of the fastest baseline over that of the deployed code; at least 1, None without a comparison."""
        times = [t for t in self.baselines.values() if t is not None]
        return min(times) / self.deployed_us if times and self.deployed_us else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints for one workload."""
        baselines: dict[str, dict[str, Any]] = {}
        for name, latency in self.baselines.items():
            baselines[name] = {"latency_us": latency}
            if name in self.baseline_errors:
                baselines[name]["error"] = self.baseline_errors[name]
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _RENAMED}
        return {
            **{name: dict(value) if isinstance(value, Mapping) else value for name, value in named.items()},
            "ok": self.ok,
            "best": None if self.best is None else {"config": dict(self.best), "latency_us": self.best_us},
            "baselines": baselines,
            "speedup": self.speedup,
            "seconds": round(self.seconds, 3),
            "restart_s": round(self.restart_s, 3),
            "baseline_s": round(self.baseline_s, 3),
            "bytes": self.bytes_moved,
            "others_busy": None if self.others is None else round(self.others, 2),
        }


def busy_note(results: Sequence[Result]) -> str:
    """Return a one-line warning about a busy machine, or "" if every final comparison was quiet enough."""
    busy = max((r.others or 0.0 for r in results if r.busy), default=0.0)
    if not busy:
        return ""
    return (
        f"other processes kept {busy:.1f} processors busy during the final comparison: do not trust these"
        " latencies, and search again on a quiet machine"
    )
