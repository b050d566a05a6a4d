"""State shared by the searches of one run (database, machine, options), and the state of one workload's search."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune import device as devices
from autotune.device import DeviceIdentity
from autotune.domain import Domain, alike_of, domain_of, identity_of, open_task
from autotune.errors import Unsupported, UserError
from autotune.files import resource_dir
from autotune.measure.outcome import Blame, Outcome
from autotune.measure.policy import Policy
from autotune.measure.pool import BaselinePool, Built, CompilePool
from autotune.measure.worker import MachineFault, Measurer
from autotune.space import Space, holds
from autotune.store.records import Effort, Key, Measurement
from autotune.store.store import Store
from autotune.store.tables.measurements import owner_name
from autotune.task import Artifact, Composition, Config, Status, Task, config_key
from autotune.tuner.options import Budget, Pace, SearchOptions
from autotune.tuner.result import Progress, Result
from autotune.tuner.threads import Interrupt, Memory
from autotune.words import size
from autotune.workload import Workload, digest

PLANS = 6
"""Maximum number of compositions per workload."""
_REMEMBERED = 48  # workloads whose compositions and picks are remembered
_TASKS = 96
"""Remembered tasks, of workloads and of parts. A task remembers what it has computed, and prefetching computes it."""
_ENOUGH = 0.5  # a workload searched with this share of its present time is not searched again
_SPARED = 3
"""Consecutive candidates out of memory or killed, after which the machine counts as faulty."""


@dataclass(frozen=True)
class Leader:
    """The first decided search of workloads that are alike: the others take its best configuration.

    Attributes:
        cut: its time or an interrupt ended its search.
        settled: more time would gain nothing.
    """

    workload: Workload
    config: Config
    cut: bool
    settled: bool


@dataclass
class Context:
    """Shared resources of one run. The worker and the pools start on first use; :meth:`close` ends them.

    Attributes:
        device: "cpu" or "cuda:N".
        policy: the measurement policy, from the options or the domain.
        lent: worker and pools owned and closed by the caller.
        picked: the cost model's picks by workload and space.
        end: time by ``time.monotonic()`` at which the run ends; None without a limit.
        leaders: by :meth:`alike`.
        stored_keys: workload to the fingerprints of its device (or devices) and their software, if another host has
            stored them.
    """

    store: Store
    device: str
    policy: Policy
    options: SearchOptions = field(default_factory=SearchOptions)
    lent: tuple[Measurer | CompilePool | None, ...] = ()
    report: Callable[[Progress], None] | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    owner: str = field(default_factory=owner_name)
    interrupt: Interrupt = field(default_factory=Interrupt)
    pace: Pace = field(default_factory=Pace)
    stored_keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    end: float | None = None
    leaders: dict[str, Leader] = field(default_factory=dict)
    _alike: dict[str, str] = field(default_factory=dict)
    _worker: Measurer | None = None
    _pool: CompilePool | None = None
    _baselines: BaselinePool | None = None
    _ids: dict[DeviceIdentity, tuple[str, str]] = field(default_factory=dict)
    _devices: dict[str, DeviceIdentity | None] = field(default_factory=dict)
    _figures: dict[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    _confined: dict[str, Any] = field(default_factory=dict)
    _tasks: Memory[tuple[str, bool], Task] = field(default_factory=lambda: Memory(_TASKS))
    _planned: Memory[str, Sequence[Composition]] = field(default_factory=lambda: Memory(_REMEMBERED))
    picked: Memory[tuple[str, str], Iterable[Config]] = field(default_factory=lambda: Memory(_REMEMBERED))

    def close(self) -> None:
        """End the worker and the pools, unless they are lent."""
        with contextlib.ExitStack() as stack:
            for own in (self._worker, self._pool, self._baselines):
                if own is not None and not any(own is other for other in self.lent):
                    stack.callback(own.close)

    @property
    def left_s(self) -> float:
        """Seconds until the end of the run; infinite without a limit."""
        return math.inf if self.end is None else max(0.0, self.end - time.monotonic())

    def worker(self, workload: Workload) -> Measurer:
        """Return the measuring worker, opened on ``workload``."""
        if self._worker is None:
            self._worker = domain_of(workload.kind).open_measurer(workload, self.device, self.policy)
        self._worker.open(workload)
        return self._worker

    @property
    def pool(self) -> CompilePool:
        if self._pool is None:
            self._pool = CompilePool(timeout_s=self.policy.build_s)
        return self._pool

    def baselines(self, workload: Workload) -> BaselinePool | None:
        """Return the pool that compiles a workload's baselines, or None.

        It is None for a domain without compiled baselines, for a worker lent by the caller, and on a CPU, where
        compiling disturbs measurements.
        """
        if type(domain_of(workload.kind)).compile_baselines is Domain.compile_baselines:
            return None
        own = not any(other is self._worker for other in self.lent if other is not None)
        if self._baselines is None and self.device.startswith("cuda") and own:
            self._baselines = BaselinePool(timeout_s=self.policy.baseline_s)
        return self._baselines

    def _stored_ids(self, workload: Workload) -> tuple[str, str]:
        """Return the fingerprints of the device (or devices) and of the software; store them if they are new."""
        if workload.fingerprint in self.stored_keys:
            return self.stored_keys[workload.fingerprint]
        identity = identity_of(workload, self.device)
        if identity not in self._ids:
            environment = devices.environment(self.device)
            self._ids[identity] = self.store.put_device(identity), self.store.put_environment(environment)
        return self._ids[identity]

    def key(self, workload: Workload) -> Key:
        """Return the key of a workload; store the workload if it is new."""
        if not workload.source and self.store.get_workload(workload.fingerprint) is not None:
            fingerprint = workload.fingerprint  # a part that is known as a workload keeps its name and its program
        else:
            fingerprint = self.store.put_workload(workload)
        if fingerprint not in self._confined:
            self._confined[fingerprint] = domain_of(workload.kind).confined(workload)
        device, environment = self._stored_ids(workload)
        return Key(fingerprint, device, environment, self.policy.key)

    def alike(self, workload: Workload) -> str:
        """See :func:`autotune.domain.alike_of`."""
        if workload.fingerprint not in self._alike:
            self._alike[workload.fingerprint] = alike_of(workload)
        return self._alike[workload.fingerprint]

    def leader(self, workload: Workload) -> Leader | None:
        """Return this run's decided search of another workload that is alike, or None.

        A workload with :attr:`SearchOptions.seeds` of its own has no leader.
        """
        found = self.leaders.get(self.alike(workload))
        apart = found is None or found.workload.fingerprint == workload.fingerprint
        return None if apart or workload.fingerprint in self.options.seeds else found

    def followed(self, workload: Workload, budget: Budget) -> Leader | None:
        """Return the leader whose configuration alone a search with this budget measures, or None.

        A search of a few candidates follows any leader. Others search on if the leader's time ended its search.
        """
        found = self.leader(workload)
        return None if found is not None and found.cut and budget.trials is None else found

    def lead(self, task: Task) -> Config | None:
        """Return the best configuration of the task's leader as one of the task's space, or None."""
        leader = self.leader(task.workload)
        config = None if leader is None else task.take(leader.config, leader.workload)
        fitted = None if config is None else self.fitted(task, config)
        return None if fitted is None or task.reject(fitted) is not None else fitted

    def fitted(self, task: Task, config: Config) -> Config | None:
        """Return the nearest configuration of the space of ``config``'s composition; None if there is none."""
        try:
            space = task.space_for(config, self.options.space_file)
        except Unsupported:  # this version does not compose it
            return None
        fitted = space.project(config)
        return None if fitted is None else task.normalize(fitted)

    def decided(self, workload: Workload, found: Result, *, cut: bool, settled: bool) -> None:
        """Make a search that has a winner the leader of the workloads that are alike, unless they have another."""
        if found.winner and found.best is not None and self.leader(workload) is None:
            self.leaders[self.alike(workload)] = Leader(workload, found.best, cut, settled)

    def measured(self, workload: Workload) -> bool:
        """True if a measurement of the workload is stored for this device, software and policy."""
        device, environment = self._stored_ids(workload)
        return bool(self.store.measurements(workload.fingerprint, device, environment, self.policy.key, limit=1))

    def task(self, workload: Workload, whole: Task | None = None) -> Task:
        """Return the workload's task, with this run's method and the device's calibration if one is stored.

        The search and its prefetching thread share it.

        Args:
            whole: the task that contains the workload as a part. The run's method belongs to the whole's domain.

        Raises:
            UserError: the domain has no such method.
            Unsupported: the task raised it, or the device has less memory than the workload takes.
        """
        where = (self._stored_ids(workload)[0], workload.kind)
        if where[0] not in self._devices:
            self._devices[where[0]] = self.store.get_device(where[0])
        identity = self._devices[where[0]]
        if identity and (need := domain_of(workload.kind).bytes_held(workload)) > identity.memory_mib << 20:
            raise Unsupported(f"it takes {size(need)} of memory, and the device has {size(identity.memory_mib << 20)}")
        if where not in self._figures:
            found = self.store.get_calibration(*where)
            self._figures[where] = found.figures if found else {}
        own = whole is None or whole.workload.kind == workload.kind
        method = self.options.method if own else ""
        return self._tasks.get(
            (workload.fingerprint, own), lambda: open_task(workload, self.device).under(method, self._figures[where])
        )

    def compositions(self, task: Task) -> Sequence[Composition]:
        """Return the compositions of the task's workload, the most promising first; empty if it has no parts.

        Raises:
            Unsupported: the task raised it.
        """
        return self._planned.get(task.workload.fingerprint, lambda: task.compositions(PLANS))

    def session(self, task: Task, budget: Budget, whole: Session | None = None) -> Session:
        """Return a search's state, with the worker opened on its workload.

        Args:
            whole: the session of the workload that contains this one as a part.
        """
        file = self.options.space_file
        space = task.space(file)
        narrowed = space if file and space.fingerprint != task.space().fingerprint else None
        return Session(self, task, self.key(task.workload), self.worker(task.workload), budget, narrowed, whole)

    def scope(self, key: Key) -> str:
        """Return a digest of the restrictions on this run's searches of ``key``, which distinguishes their efforts.

        The domain's restrictions beyond the shipped spaces are included only after a call of :meth:`key` for the
        workload.
        """
        own = self._confined.get(key.workload)
        return self._scope if own is None else digest([self._scope, own])

    @cached_property
    def _scope(self) -> str:
        """The part of the digest that all workloads share.

        It includes the shipped spaces, since a new version of them adds choices to a finished search.
        """
        shipped = [p.read_text() for p in sorted(resource_dir("search_spaces").glob("*.toml"))]
        options = self.options
        file = Path(options.space_file).read_text() if options.space_file else ""
        own = {"space": file, "method": options.method, "sampler": options.sampler}
        return digest({**own, "shipped": shipped, "autotune": __version__})

    def searched(self, key: Key, budget: Budget, granted: float | None) -> Effort | None:
        """Return the effort that makes another search of ``key`` unnecessary, or None.

        A search with a given number of candidates is always necessary.

        Args:
            granted: seconds that the search would get now; None for no limit.
        """
        if budget.trials is not None:
            return None
        effort = self.store.get_effort(key, self.scope(key))
        if effort is None:
            return None
        timed = granted is not None and effort.granted >= _ENOUGH * granted
        return effort if effort.settled or timed else None

    def note(self, s: Session, stop: str, settled: bool, granted: float | None) -> None:
        """Store the effort of a session's search, unless it was interrupted."""
        if not self.interrupt.requested:
            self.store.add_effort(Effort(s.key, self.scope(s.key), s.elapsed, granted or 0.0, settled, stop))


@dataclass
class Session:
    """The search of one workload: its budget, and the results of its candidates.

    Attributes:
        context: of the run.
        trials: candidates that the current phase may measure; by default the most that ``budget`` allows.
        narrowed: the user's space, which restricts deployment; None for the shipped one.
        whole: the session of the workload that contains this one as a part.
        done: candidates measured by the searches of its parts.
        search_s: seconds after which the final comparison began.
        known: candidate key to the measurement that ranks it: its repeated timing, else its first one, or its failure.
            Final latencies are excluded, since they compare only with latencies of the same comparison. Mixed into the
            ranking, they would favour candidates that were never in a final.
        final_us: latency of the best candidate in the final comparison; None before it.
        saved_us: microseconds per call that the deployed code saves against the fastest baseline.
        spared: keys of candidates that this search leaves out after machine failures; nothing is stored for them.
    """

    context: Context
    task: Task
    key: Key
    worker: Measurer
    budget: Budget
    narrowed: Space | None = None
    whole: Session | None = None
    done: int = 0
    search_s: float = 0.0
    started: float = field(default_factory=lambda: time.monotonic())
    known: dict[str, Measurement] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    measured: int = 0
    reused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    final_us: float | None = None
    saved_us: float = 0.0
    spared: set[str] = field(default_factory=set)
    _row: int = 0
    """Number of consecutive spared candidates."""
    _allowed: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trials = self.budget.most

    @property
    def label(self) -> str:
        """Label in progress output: that of the workload, or of the whole that contains it."""
        workload = self._top.task.workload
        return workload.label or workload.fingerprint[:12]

    @cached_property
    def default(self) -> Config:
        """The task's default in normalized form."""
        return self.task.normalize(self.task.default())

    @property
    def trials_left(self) -> int | None:
        """Candidates of the budget that neither this search nor those of its parts have measured; None for no limit."""
        return None if self.budget.trials is None else self.budget.trials - self.done - self.measured

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds of the time budget left; None without one."""
        return None if self.budget.timeout is None else max(0.0, self.budget.timeout - self.elapsed)

    def allows(self, config: Config) -> bool:
        """True if a candidate may be deployed: always, unless the user's narrowed space excludes it.

        The default and stored candidates of wider searches may be outside that space.
        """
        if self.narrowed is None:
            return True
        key = config_key(config)
        if key not in self._allowed:
            space = self.narrowed
            with contextlib.suppress(Unsupported):  # stored by an earlier version, which had more plans
                space = self.task.space_for(config, self.context.options.space_file)
            self._allowed[key] = holds(space, config, self.task.normalize)
        return self._allowed[key]

    @property
    def tried(self) -> bool:
        """True if any deployable candidate has been tried; invalid ones do not count."""
        return any(m.status is not Status.INVALID and self.allows(m.config) for m in self.known.values())

    def ranking(self) -> list[Measurement]:
        """Return the working candidates that may be deployed, fastest first."""
        good = [m for m in self.known.values() if m.status is Status.OK and m.latency_us is not None]
        return sorted((m for m in good if self.allows(m.config)), key=lambda m: m.latency_us or 0.0)

    @property
    def best_us(self) -> float | None:
        ranking = self.ranking()
        return ranking[0].latency_us if ranking else None

    def build(self, config: Config) -> Future[Built]:
        return self.context.pool.submit(self.task.workload, self.task.device, config)

    def keep(self, m: Measurement) -> Measurement:
        """Store a measurement and return the stored one, which is another search's if that search was first."""
        if not self.context.store.add_measurement(m):
            m = self.context.store.get_measurement(m.key, m.config, m.stage) or m
        self.learn(m)
        return m

    def learn(self, m: Measurement) -> None:
        """Rank a candidate by this measurement from now on."""
        if m.stage != "final" or m.status is not Status.OK:
            self.known[config_key(m.config)] = m

    def measure(self, config: Config, built: Built, stage: str, limit_us: float | None = None) -> Measurement:
        """Measure a built candidate and store the outcome; after a machine fault, try once more.

        Raises:
            MachineFault: the machine failed again, for reasons beyond this candidate; nothing is stored.
            UserError: a setting is wrong.
        """
        built = self._once_more(config, built)
        outcome = self._outcome(config, built, stage, limit_us)
        if outcome.fault and built.artifact is not None:
            outcome = self._outcome(config, built, stage, limit_us)
        m = Measurement.of(self.key, config, stage, outcome, self.context.run, built.seconds)
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
        seed = self.context.options.seed
        return self.worker.measure(config, built.artifact, stage=stage, seed=seed, limit_us=limit_us)

    def spare(self, m: Measurement, fault: Blame) -> None:
        """Leave a candidate out of this search without storing it, after two machine failures on it.

        Raises:
            MachineFault: the machine would fail on other candidates too.
            UserError: a setting is wrong.
        """
        if fault is Blame.USER:
            raise UserError(m.reason)
        top = self._top
        top._row += 1
        if fault is Blame.MACHINE or top._row >= _SPARED:
            raise MachineFault(m.reason)
        self.spared.add(config_key(m.config))
        self.context.store.release(self.key, m.config, m.stage, self.context.owner)
        self.learn(m)

    @property
    def _top(self) -> Session:
        return self.whole or self

    def _once_more(self, config: Config, built: Built) -> Built:
        """Return the build, or that of a second try if the first failed by a machine fault."""
        return self.build(config).result() if built.artifact is None and built.fault else built

    def artifact(self, config: Config) -> Built:
        """Return the artifact of a candidate; rebuild it if an earlier search measured it."""
        have = self.artifacts.get(config_key(config))
        if have is not None:
            return Built(have)
        built = self._once_more(config, self.build(config).result())
        if built.artifact is not None:
            self.artifacts[config_key(config)] = built.artifact
        return built

    def report(self, phase: str, note: str = "") -> None:
        """Report progress; a part's progress is reported under its whole."""
        if self.context.report is None:
            return
        top = self._top
        sessions = (self,) if top is self else (top, self)
        self.context.report(
            Progress(
                workload=self.label,
                phase=phase,
                measured=sum(s.done + s.measured for s in sessions),
                trials=top.budget.most,
                reused=sum(s.reused for s in sessions),
                failed=sum(n for s in sessions for status, n in s.failed.items() if status != Status.INVALID),
                best_us=self.best_us if self.final_us is None else self.final_us,
                elapsed_s=top.elapsed,
                left_s=top.left,
                note=note,
                part=top is not self,
                saved_us=self.saved_us,
            )
        )
