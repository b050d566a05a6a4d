"""What a search reports: while it runs, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from autotune.store.records import BUSY
from autotune.task import Config

_RENAMED = ("best_us", "baseline_errors", "search_s", "bytes_moved", "others")
"""Fields of a result that its JSON has under other names, or not."""


class BusyMachine(UserWarning):
    """Other processes disturbed a final comparison: its latencies and its winner are not to be trusted."""


@dataclass(frozen=True)
class Progress:
    """A moment of a search, for a progress display.

    Attributes:
        workload: its label.
        phase: "search", "repeat" (near-best candidates again), "final" (against the baselines) or "done".
        measured: candidates measured by this search, failures included; at most ``trials``.
        best_us: the best latency so far in microseconds, None before there is one.
        left_s: seconds of the time budget left; None without one.
        note: one line about what just happened.
        part: whether ``best_us`` is of a part of the workload that is searched by itself.
        device: where, if on several side by side; else empty.
        saved_us: at the end, what a call saves beside the fastest baseline; 0 where a baseline won.
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
        reused: candidates answered from measurements that were stored before, or by another search meanwhile.
        failed: new failures by status; "invalid" ones were rejected before compiling and are not in ``measured``.
        best: the fastest candidate's configuration; None where none worked.
        best_us: its latency in the final comparison, or in its last timing where that did not come about.
        default_us: the default's latency from the same comparison; its first timing where it was hopeless.
        baselines: name to latency; None for one that failed, with the reason in ``baseline_errors``.
        references: name to latency of what was timed beside them and is no way to do the work (a part of it alone).
        metrics: figures of the domain's own for the best candidate, by name.
        winner: "autotune", or the baseline that is deployed because it was faster; empty before a final comparison.
        deployed_us: latency of what is deployed.
        noise: interquartile range over median of the winner's samples.
        stop: why the search ended.
        seconds: the search took, the final comparison included; ``search_s`` of them until that began.
        restarts: worker processes that had to be replaced; ``restart_s`` seconds were spent waiting for starts.
        others: processors that other processes kept busy during the final comparison (CPU only): near 0 on a quiet
            machine, and a reason to search again where it is not.
        interrupted: ended by the user.
        begun: False where the run's time was up before, and this is what an earlier search came to.
        error: what kept the machine from measuring; empty if nothing did.
        fault: that was the machine's fault and would be met by other workloads too, so that the run ended with it.
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
    bytes_moved: int = 0
    others: float | None = None
    interrupted: bool = False
    begun: bool = True
    error: str = ""
    fault: bool = False

    @property
    def busy(self) -> bool:
        """Whether other processes disturbed the final comparison too much for it to be trusted."""
        return self.others is not None and self.others > BUSY

    @property
    def ok(self) -> bool:
        """Whether any candidate could be measured, now or before. False is exit code 1."""
        return self.best is not None

    @property
    def speedup(self) -> float | None:
        """Latency of the fastest baseline over that of what is deployed; at least 1, None without a comparison."""
        times = [t for t in self.baselines.values() if t is not None]
        return min(times) / self.deployed_us if times and self.deployed_us else None

    def to_json(self) -> dict[str, Any]:
        """The JSON object that ``--json`` prints for one workload."""
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
            "bytes": self.bytes_moved,
            "others_busy": None if self.others is None else round(self.others, 2),
        }


def busy_note(results: Sequence[Result]) -> str:
    """One line that says how busy the machine was, or "" if every final comparison was quiet enough."""
    busy = max((r.others or 0.0 for r in results if r.busy), default=0.0)
    if not busy:
        return ""
    return (
        f"other processes kept {busy:.1f} processors busy during the final comparison: search again on a quiet machine"
        " before you trust these latencies"
    )
