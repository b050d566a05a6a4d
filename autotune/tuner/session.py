"""What every phase of a search shares: the store and its claims, the worker, the compile pool, what is known so far."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from autotune.errors import Unsupported, UserError
from autotune.measure.blame import Blame
from autotune.measure.outcome import Outcome
from autotune.measure.policy import Policy
from autotune.measure.pool import Built, CompilePool
from autotune.measure.worker import MachineFault, Measurer
from autotune.space import Space, holds
from autotune.store.records import Key, Measurement
from autotune.store.store import Store
from autotune.task import Artifact, ComposedTask, Config, Status, Task, config_key
from autotune.tuner.devices.interrupt import Interrupt
from autotune.tuner.result import Progress

LEASE_S = 30.0
"""How long a claim outlives a search on another host that was killed; on this host its death is seen at once."""

_SPARED = 3
"""So many candidates in a row that memory ran out for, or that were killed, are no coincidence."""


class Lease:
    """Renews every claim of ``owner`` from a thread, since one measurement may take longer than a lease."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self._owner = store, owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=LEASE_S)
        self._store.release_all(self._owner)

    def _run(self) -> None:
        while not self._stop.wait(LEASE_S / 3):
            try:
                self._store.renew(self._owner, LEASE_S)
            except Exception:  # a database that stays away is reported by the search's own next write
                continue


@dataclass
class Session:
    """State of one search of one workload. ``seed`` is that of the verification's random inputs."""

    task: Task
    store: Store
    key: Key
    policy: Policy
    worker: Measurer
    pool: CompilePool
    interrupt: Interrupt
    owner: str
    run: str
    trials: int
    timeout: float | None
    seed: int
    report: Callable[[Progress], None] | None = None
    narrowed: Space | None = None
    """The user's own space, to which what is deployed is confined; None for the shipped one."""
    space_file: str | None = None
    label: str = ""
    """What progress is told of: the workload, or the larger one that it is a part of."""
    done: int = 0
    """Candidates that the searches of its parts have measured."""
    search_s: float = 0.0
    """Seconds after which the final comparison began."""
    whole: Session | None = None
    """The session of the workload that this one is a part of."""
    most: int = 0
    """Candidates of the whole budget, of which ``trials`` is what the present phase may measure."""
    started: float = field(default_factory=lambda: time.monotonic())
    known: dict[str, Measurement] = field(default_factory=dict)
    """Candidate (its key) to what it is ranked by: its repeated timing, else its first; or why it failed.

    Latencies of a final comparison are left out: they belong beside those they were taken with, and a ranking that
    mixed them with others would put whoever was never in a final first.
    """
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    measured: int = 0
    reused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    final_us: float | None = None
    """Latency of the best candidate in the final comparison, once there was one."""
    spared: set[str] = field(default_factory=set)
    """Candidates (their keys) that this search leaves out as the machine failed on them: nothing of it is stored."""
    _row: int = 0
    """How many of them came in a row."""
    _allowed: dict[str, bool] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds of the time budget left; None without one."""
        return None if self.timeout is None else max(0.0, self.timeout - self.elapsed)

    def allows(self, config: Config) -> bool:
        """Whether a candidate may be deployed: always, unless the user's narrowed space leaves it out.

        The default and what is stored from wider searches may be outside.
        """
        if self.narrowed is None:
            return True
        key = config_key(config)
        if key not in self._allowed:
            space = self.narrowed
            if isinstance(self.task, ComposedTask):
                with contextlib.suppress(Unsupported):  # stored by an earlier version, which had more plans
                    space = self.task.space_for(config, self.space_file)
            self._allowed[key] = holds(space, config, self.task.normalize)
        return self._allowed[key]

    @property
    def tried(self) -> bool:
        """Whether any candidate that may be deployed has been tried; those that never could work do not count."""
        return any(m.status is not Status.INVALID and self.allows(m.config) for m in self.known.values())

    def ranking(self) -> list[Measurement]:
        """Candidates that work and may be deployed, fastest first."""
        good = [m for m in self.known.values() if m.status is Status.OK and m.latency_us is not None]
        return sorted((m for m in good if self.allows(m.config)), key=lambda m: m.latency_us or 0.0)

    @property
    def best_us(self) -> float | None:
        ranking = self.ranking()
        return ranking[0].latency_us if ranking else None

    def build(self, config: Config) -> Future[Built]:
        return self.pool.submit(self.task.workload, self.task.device, config)

    def measurement(
        self,
        config: Config,
        status: Status,
        stage: str,
        outcome: Outcome | None = None,
        reason: str = "",
        compile_s: float = 0.0,
    ) -> Measurement:
        """A record of this search, not stored yet."""
        return Measurement(
            key=self.key,
            config=config,
            status=status,
            stage=stage,
            latency_us=outcome.latency_us if outcome else None,
            samples=outcome.samples if outcome else (),
            noise=outcome.noise if outcome else None,
            error=outcome.error if outcome else None,
            reason=outcome.reason if outcome else reason,
            run=self.run,
            compile_s=compile_s,
            measure_s=outcome.seconds if outcome else 0.0,
            metrics=outcome.metrics if outcome else {},
        )

    def keep(self, m: Measurement) -> Measurement:
        """Store a measurement. Answers what is stored: another search may have been first, and then that counts."""
        if not self.store.add_measurement(m):
            m = self.store.get_measurement(m.key, m.config, m.stage) or m
        self.learn(m)
        return m

    def learn(self, m: Measurement) -> None:
        """Rank a candidate by this measurement from now on."""
        if m.stage != "final" or m.status is not Status.OK:
            self.known[config_key(m.config)] = m

    def measure(self, config: Config, built: Built, stage: str, limit_us: float | None = None) -> Measurement:
        """Measure what was built and store what came of it, unless the machine is to blame: then once more.

        Raises:
            MachineFault: the machine failed again, and not for this candidate alone; nothing is stored.
            UserError: a setting is wrong.
        """
        built = self._once_more(config, built)
        outcome = self._outcome(config, built, stage, limit_us)
        if outcome.fault and built.artifact is not None:
            outcome = self._outcome(config, built, stage, limit_us)
        m = self.measurement(config, outcome.status, stage, outcome, compile_s=built.seconds)
        if outcome.fault:
            self.spare(m, outcome.fault)
            return m
        self._top._row = 0
        m = self.keep(m)
        if m.status is Status.OK and built.artifact is not None:
            self.artifacts[config_key(config)] = built.artifact
        return m

    def _outcome(self, config: Config, built: Built, stage: str, limit_us: float | None) -> Outcome:
        if built.artifact is None:
            return Outcome(Status.COMPILE_ERROR, reason=built.reason, fault=built.fault)
        return self.worker.measure(config, built.artifact, stage=stage, seed=self.seed, limit_us=limit_us)

    def spare(self, m: Measurement, fault: Blame) -> None:
        """Leave a candidate out of this search, storing nothing, since the machine failed on it twice.

        Raises:
            MachineFault: it would fail on others too.
            UserError: a setting is wrong.
        """
        if fault is Blame.USER:
            raise UserError(m.reason)
        top = self._top
        top._row += 1
        if fault is Blame.MACHINE or top._row >= _SPARED:
            raise MachineFault(m.reason)
        self.spared.add(config_key(m.config))
        self.store.release(self.key, m.config, m.stage, self.owner)
        self.learn(m)

    @property
    def _top(self) -> Session:
        return self.whole or self

    def _once_more(self, config: Config, built: Built) -> Built:
        """What was built, or a second try where the machine is to blame that nothing was."""
        return self.build(config).result() if built.artifact is None and built.fault else built

    def artifact(self, config: Config) -> Built:
        """The artifact of a candidate, built again where an earlier search measured it."""
        have = self.artifacts.get(config_key(config))
        if have is not None:
            return Built(have)
        built = self._once_more(config, self.build(config).result())
        if built.artifact is not None:
            self.artifacts[config_key(config)] = built.artifact
        return built

    def tell(self, phase: str, note: str = "") -> None:
        """Report progress: of a part, as of the whole that it belongs to."""
        if self.report is None:
            return
        top = self._top
        sessions = (self,) if top is self else (top, self)
        self.report(
            Progress(
                workload=self.label,
                phase=phase,
                measured=sum(s.done + s.measured for s in sessions),
                trials=top.most,
                reused=sum(s.reused for s in sessions),
                failed=sum(n for s in sessions for status, n in s.failed.items() if status != Status.INVALID),
                best_us=self.best_us if self.final_us is None else self.final_us,
                elapsed_s=top.elapsed,
                left_s=top.left,
                note=note,
                part=top is not self,
            )
        )
