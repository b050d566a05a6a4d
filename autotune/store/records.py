"""Records of the store, as plain dataclasses without SQL, for the tuner and the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from autotune.measure.outcome import Outcome
from autotune.space import is_number
from autotune.task import REFERENCE, Artifact, Config, Status

BUSY = 0.25
"""Processors used by other processes, above which a comparison on the CPU is not trusted."""
PREDICTED = "predicted"
"""The ``space`` of a schedule without a search: the best of a few predicted candidates, or Inductor's code."""


@dataclass(frozen=True)
class Key:
    """A measurement's key: fingerprints of workload, device, environment and measuring policy."""

    workload: str
    device: str
    environment: str
    policy: str


@dataclass(frozen=True)
class Measurement:
    """One measurement of a candidate, or the reason why it failed.

    Attributes:
        stage: "screen" (the cheap first timing), "repeat" (near-best, timed again) or "final" (interleaved with the
            baselines). A candidate has at most one measurement per key and stage.
        latency_us: median of ``samples`` in microseconds; None unless status is ok.
        error: largest error over tolerance in verification; None if not verified.
        noise: relative spread of the samples, (p75 - p25) / median; None unless status is ok.
    """

    key: Key
    config: Config
    status: Status
    stage: str = "screen"
    latency_us: float | None = None
    samples: tuple[float, ...] = ()
    noise: float | None = None
    error: float | None = None
    reason: str = ""
    run: str = ""
    compile_s: float = 0.0
    measure_s: float = 0.0
    when: float = 0.0
    """Seconds since the epoch; 0 lets the store fill it in."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The domain's own metrics, such as GB/s."""

    @classmethod
    def of(cls, key: Key, config: Config, stage: str, outcome: Outcome, run: str, compile_s: float = 0.0) -> Self:
        """Return an outcome's record, not stored yet."""
        return cls(
            key=key,
            config=config,
            status=outcome.status,
            stage=stage,
            latency_us=outcome.latency_us,
            samples=outcome.samples,
            noise=outcome.noise,
            error=outcome.error,
            reason=outcome.reason,
            run=run,
            compile_s=compile_s,
            measure_s=outcome.seconds,
            metrics=outcome.metrics,
        )


@dataclass(frozen=True)
class Schedule:
    """The winner of a final comparison, to deploy for a workload on a device.

    ``config`` is None if a baseline won. Then the region runs without a stored kernel, which also counts as a hit.
    ``baselines`` maps names ("eager", "inductor") to latencies in microseconds from the same interleaved run, including
    those of references (:data:`autotune.task.REFERENCE`).
    ``others`` is the mean number of processors that other processes used during the run. It is None on a GPU, where it
    does not matter, or if not recorded.
    """

    key: Key
    config: Config | None
    latency_us: float
    baselines: Mapping[str, float]
    artifact: Artifact | None = None
    winner: str = "autotune"
    family: str = ""
    extent: int = 0
    when: float = 0.0
    others: float | None = None
    space: str = ""
    """Fingerprint of the user's narrowed space of the candidates; empty for the shipped space, and :data:`PREDICTED`
    for a few predicted candidates."""

    @property
    def busy(self) -> bool:
        """True if the machine was too busy for the decision, which another search repeats."""
        return self.others is not None and self.others > BUSY

    @property
    def predicted(self) -> bool:
        """True if it comes from no search."""
        return self.space == PREDICTED

    @property
    def rivals(self) -> dict[str, float]:
        """The baselines that could be deployed, to which speedups refer."""
        return {name: us for name, us in self.baselines.items() if not name.startswith(REFERENCE)}

    @property
    def references(self) -> dict[str, float]:
        """The references among the baselines, by their names without the prefix."""
        return {n.removeprefix(REFERENCE): us for n, us in self.baselines.items() if n.startswith(REFERENCE)}


@dataclass(frozen=True)
class Miss:
    """A region of a deployment without a fitting schedule, for ``autotune search --missed``."""

    workload: str
    device: str
    count: int = 1
    reason: str = ""
    when: float = 0.0


@dataclass(frozen=True)
class Effort:
    """The progress of a workload's search under one key.

    Attributes:
        scope: digest of the search's limits; efforts of different scopes cannot be compared.
        seconds: total time of all its searches so far.
        granted: the largest share of time, in seconds, with which a search finished; 0 before.
        settled: True if it ended without further gain or candidates, and not at the time limit.
        stop: the reason why the last search ended.
    """

    key: Key
    scope: str
    seconds: float
    granted: float
    settled: bool
    stop: str = ""
    when: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The result of timing a whole step, for one of its graphs.

    Attributes:
        graph: fingerprint, of :func:`autotune.runtime.inductor.verdict.graph_fingerprint`; ``device`` and
            ``environment`` too.
        mode: of ``torch.compile``, without its own CUDA graphs.
        left: fingerprints of the workloads whose regions are left to Inductor in that graph; usually none.
        record: the measurements, equal for all graphs of a step (:meth:`autotune.bench.decide.Decision.record`).
        when: seconds since the epoch; 0 lets the store fill it in.
    """

    graph: str
    device: str
    environment: str
    mode: str
    left: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    when: float = 0.0

    @property
    def timed(self) -> bool:
        """False for a search in a program whose kernels were not compared in the program's steps."""
        return "target" in self.record or is_number(self.record.get("compile_us"))

    @property
    def busy(self) -> bool:
        """As :attr:`Schedule.busy`."""
        others = self.record.get("others_busy")
        return is_number(others) and others > BUSY


@dataclass(frozen=True)
class Saving:
    """Steps of a graph that ran stored kernels, counted by one process in one week.

    Attributes:
        process: a random name.
        graph, device, environment, mode: as of a :class:`Verdict`.
        week: its Monday in UTC, such as "2026-11-23".
        program: name of the program, for people.
        steps: calls of the graph's code in this week.
        alone_us: microseconds that the kernels of one call save, from the separate final comparisons of its regions.
    """

    process: str
    graph: str
    device: str
    environment: str
    mode: str
    week: str
    program: str = ""
    steps: int = 0
    alone_us: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Figures of a device from a short measured run, by name; names have the units (``copy_gbs``, ...)."""

    device: str
    kind: str
    figures: Mapping[str, float]
    when: float = 0.0


@dataclass(frozen=True)
class Run:
    """One invocation of a search."""

    id: str
    command: str
    state: str = "running"  # running, done, interrupted, failed
    started: float = 0.0
    finished: float | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
