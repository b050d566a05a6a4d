"""Schedules without a search: the few candidates of a region that cost models and stored measurements predict best.

Each candidate is verified and timed once. The fastest is compared once with Inductor's code of the region, and stored
as a schedule of lower rank (:data:`autotune.store.records.PREDICTED`): a search replaces it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.device import environment, identify
from autotune.domain import open_task, policy_for
from autotune.measure.worker import Contender
from autotune.runtime.ladder import Level, Match
from autotune.runtime.match import from_package
from autotune.space import Config
from autotune.store.records import PREDICTED, Key, Measurement, Schedule
from autotune.task import Task, config_key
from autotune.tuner.seeds import picks, winners

if TYPE_CHECKING:
    from autotune.measure.outcome import Outcome
    from autotune.measure.pool import Built, CompilePool
    from autotune.measure.worker import Worker
    from autotune.store import Store
    from autotune.task import Artifact
    from autotune.workload import Workload

MOST = 4
"""Maximum number of candidates of a region."""
MARGIN = 1.03
"""Required speedup of a candidate over Inductor's code."""
NO_GAIN = "the models expect no gain"
_PLANS, _OF_EACH = 2, 2
"""Number of proposed compositions of a region, and of configurations of each of their parts."""
_SEED = 0


@dataclass(frozen=True)
class Proposal:
    """A candidate and its origin.

    Attributes:
        origin: "default", "model", "neighbour" (the same family at other rows), "elsewhere" (the same workload on
            another device or with other software) or "packaged" (shipped with autotune).
        expected_us: by the cost model; None without a model.
    """

    config: Config
    origin: str
    expected_us: float | None


@dataclass(frozen=True)
class Prediction:
    """The outcome for one workload.

    Attributes:
        origin, expected_us: of the fastest candidate, as in :class:`Proposal`.
        expected_gain: of :func:`gain`.
        latency_us: of the fastest candidate, None if none works.
        inductor_us: of Inductor's code in the same comparison.
        won: True if it is :data:`MARGIN` times as fast as Inductor's code.
        why: reason why nothing was compared; "" after a comparison.
        seconds: duration.
    """

    workload: str
    label: str
    origin: str = ""
    expected_us: float | None = None
    expected_gain: float | None = None
    latency_us: float | None = None
    inductor_us: float | None = None
    won: bool = False
    why: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields."""
        return asdict(self)


def proposals(task: Task, stored: Iterable[tuple[str, Config]] = ()) -> list[Proposal]:
    """The candidates to try for a workload, at most :data:`MOST`; the default is the first.

    Args:
        stored: origins and configurations that were best at other rows, on other devices or with other software.
    """
    default = task.normalize(task.default())
    found = {config_key(default): Proposal(default, "default", task.predict(default))}
    adapted = ((origin, task.adapt(config)) for origin, config in stored)
    for origin, config in itertools.chain(adapted, _modelled(task)):
        fitted = None if config is None else task.normalize(config)
        if fitted is not None and len(found) < MOST and task.reject(fitted) is None:
            found.setdefault(config_key(fitted), Proposal(fitted, origin, task.predict(fitted)))
    return list(found.values())


def gain(task: Task, proposed: Sequence[Proposal]) -> float | None:
    """The predicted gain of the best proposal over the user's own code, as a ratio; None without a model."""
    ours = min((p.expected_us for p in proposed if p.expected_us), default=None)
    return None if ours is None else task.expected_gain(ours)


def _modelled(task: Task) -> Iterator[tuple[str, Config]]:
    """The best configurations by the cost models, with their origin: of the whole region, or composed of parts."""
    compositions = task.compositions(_PLANS)
    if not compositions:
        yield from (("model", config) for config in picks(task, task.space(), _SEED, _OF_EACH))
        return
    for made in compositions:
        choices = []
        for part in made.parts:
            own = open_task(part, task.device)
            liked = picks(own, own.space(), _SEED, _OF_EACH) or [own.normalize(own.default())]
            choices.append([(config, own.predict(config) or 1.0) for config in liked])
        yield from (("model", config) for config, _ in list(made.combine(choices))[:1])


class Trials:
    """Trials of workloads' proposals on one device. Threads may call :meth:`run` concurrently, each with a worker.

    Args:
        store: database for schedules and measurements.
        device: "cpu" or "cuda:N".
        run: id of the run for its measurements.
    """

    def __init__(self, store: Store, device: str, pool: CompilePool, run: str) -> None:
        self._store, self._device, self._pool, self._run = store, device, pool, run
        self._lock = threading.Lock()  # guards the store and the decided schedules
        self._decided: list[Schedule] = []
        self._here, self._env = identify(device), environment(device)
        with self._lock:
            self._stored_ids = store.put_device(self._here), store.put_environment(self._env)

    def run(self, workload: Workload, worker: Worker) -> Prediction:
        """Try a workload's proposals and compare the fastest with Inductor's code. :meth:`store` stores the result.

        Raises:
            WorkerFault: the machine failed.
        """
        begin = time.monotonic()
        key = Key(workload.fingerprint, *self._stored_ids, policy_for(workload, self._device).key)
        task = open_task(workload, self._device)
        with self._lock:
            self._store.put_workload(workload)
            figures = self._store.get_calibration(key.device, workload.kind)
            stored = [("elsewhere", config) for config in winners(self._store, key)[:1]]
            near = self._store.neighbours(
                workload.family, key.device, workload.fingerprint, extent=workload.extent, limit=2
            )
            packaged, _ = from_package(workload, Match(Level.NONE), self._store, self._here, self._env)
        stored += [("neighbour", m.config) for _, m in near]
        if packaged.schedule is not None and packaged.schedule.config is not None:
            stored.insert(0, ("packaged", packaged.schedule.config))
        task = task.under("", figures.figures if figures else {})
        proposed = proposals(task, stored)
        expected = gain(task, proposed)
        if expected is not None and expected < MARGIN:
            return Prediction(workload.fingerprint, workload.label, expected_gain=expected, why=NO_GAIN)
        builds = [self._pool.submit(workload, self._device, p.config) for p in proposed]
        worker.open(workload)
        best: tuple[float, Proposal, Artifact] | None = None
        why = ""
        for proposal, build in zip(proposed, builds, strict=True):
            built = build.result()
            if built.artifact is None:
                why = built.reason
                continue
            limit = best[0] if best else None
            outcome = worker.measure(
                proposal.config, built.artifact, stage="screen", seed=_SEED, limit_us=limit and 3.0 * limit
            )
            self._keep(key, proposal.config, built, outcome)
            if outcome.ok and outcome.latency_us is not None:
                if best is None or outcome.latency_us < best[0]:
                    best = outcome.latency_us, proposal, built.artifact
            else:
                why = outcome.reason
        found = Prediction(workload.fingerprint, workload.label, why=why or "no candidate works")
        if best is not None:
            found = self._compared(key, workload, best[1], best[2], worker)
        return replace(found, expected_gain=expected, seconds=round(time.monotonic() - begin, 3))

    def store(self) -> None:
        """Store the results so far. The compilation of the program's first code must not find them."""
        with self._lock:
            for schedule in self._decided:
                if self._store.schedule_of(schedule.key) is None:  # another process may have stored one meanwhile
                    self._store.put_schedule(schedule)
            self._decided.clear()

    def _compared(self, key: Key, workload: Workload, best: Proposal, artifact: Artifact, worker: Worker) -> Prediction:
        contender = Contender("predicted", best.config, artifact)
        outcomes = worker.compare([contender], seed=_SEED + 1, without=("eager",))
        ours, inductor = outcomes["predicted"], outcomes.get("inductor")
        known: dict[str, Any] = {"workload": key.workload, "label": workload.label, "origin": best.origin}
        known |= {"expected_us": best.expected_us, "latency_us": ours.latency_us}
        if not ours.ok or inductor is None or not inductor.ok or not ours.latency_us or not inductor.latency_us:
            return Prediction(**known, why=ours.reason or (inductor.reason if inductor else "no code of Inductor's"))
        won = ours.latency_us * MARGIN <= inductor.latency_us
        schedule = Schedule(
            key,
            best.config if won else None,
            ours.latency_us if won else inductor.latency_us,
            {"inductor": inductor.latency_us},
            artifact if won else None,
            "autotune" if won else "inductor",
            workload.family,
            workload.extent,
            others=worker.others,
            space=PREDICTED,
        )
        with self._lock:
            self._decided.append(schedule)
        return Prediction(**known, inductor_us=inductor.latency_us, won=won)

    def _keep(self, key: Key, config: Config, built: Built, outcome: Outcome) -> None:
        """Store a measurement, as a search would, unless the machine failed."""
        if outcome.fault:
            return
        measured = Measurement(
            key=key,
            config=config,
            status=outcome.status,
            latency_us=outcome.latency_us,
            samples=outcome.samples,
            noise=outcome.noise,
            error=outcome.error,
            reason=outcome.reason,
            run=self._run,
            compile_s=built.seconds,
            measure_s=outcome.seconds,
            metrics=outcome.metrics,
        )
        with self._lock:
            self._store.add_measurement(measured)


def failed(workload: Workload, why: str) -> Prediction:
    """The outcome of a workload that was not tried."""
    return Prediction(workload.fingerprint, workload.label, why=why)


__all__ = ["MARGIN", "MOST", "NO_GAIN", "Prediction", "Proposal", "Trials", "failed", "gain", "proposals"]
