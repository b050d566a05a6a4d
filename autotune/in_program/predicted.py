"""Schedules without a search: the few candidates of a region that cost models and stored measurements predict best.

Each candidate is verified and timed once. The fastest is compared once with Inductor's code of the region, and stored
as a schedule of lower rank (:data:`autotune.store.records.PREDICTED`): a search replaces it.

``python -m autotune.in_program.predicted`` is the process that does it while the program compiles. The cost models run
in Python for a second a region. In another process they do not delay Inductor, and a failure only costs the
predictions. The process receives frames of :mod:`autotune.measure.child`. The first one has the ``device``: the
measuring processes start, and have torch compile a small region each, while the program is traced. ``workloads`` are
tried in the background. The answer to ``end`` follows when all were tried, or after a number of seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.device import environment, identify, usable_processors
from autotune.domain import domain_of, open_task, policy_for
from autotune.measure.child import ChildDied, ChildSilent, Link, serve
from autotune.measure.outcome import one_line
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Contender, MachineFault, Worker
from autotune.runtime.ladder import Level, Match
from autotune.runtime.match import from_package
from autotune.space import Config
from autotune.store import Store
from autotune.store.records import PREDICTED, Key, Measurement, Schedule
from autotune.task import Task, config_key
from autotune.tuner.seeds import picks, winners
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.task import Artifact

MOST = 4
"""Maximum number of candidates of a region."""
MARGIN = 1.03
"""Required speedup of a candidate over Inductor's code."""
NO_GAIN = "the models expect no gain"
_PLANS, _OF_EACH = 2, 2
"""Number of proposed compositions of a region, and of configurations of each of their parts."""
_SEED = 0
_KIND = "fusion"
"""Kind of all workloads."""
_WORKERS = 3
"""Maximum number of measuring processes. Compiling a region by Inductor takes seconds, timing it tenths of a second."""
_TRIAL_S = 4.0
"""Usual seconds of a region's trial. A CPU is not quiet meanwhile, since Inductor compiles."""
_ROOM, _OVER_HELD = 0.5, 10
"""Share of the device's memory for all of them, and the factor of a process's memory over the bytes of its region's
tensors: the oracle computes in fp64, and keeps intermediate values."""


@dataclass(frozen=True)
class Proposal:
    """A candidate and its origin.

    Attributes:
        origin: "default", "model", "heuristic", "neighbour" (the same family at other rows), "elsewhere" (the same
            workload on another device or with other software) or "packaged" (shipped with autotune).
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
    """The best configurations by the cost models, with their origin: of the whole region, or composed of parts.

    Without a model, those of heuristics.
    """
    compositions = task.compositions(_PLANS)
    if not compositions:
        liked = picks(task, task.space(), _SEED, _OF_EACH)
        yield from (("model", config) for config in liked) if liked else (("heuristic", c) for c in task.seeds())
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
        settings: the program's numerics.
    """

    def __init__(self, store: Store, device: str, pool: CompilePool, run: str, settings: Mapping[str, Any]) -> None:
        self._store, self._device, self._pool, self._run = store, device, pool, run
        self._settings = settings
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
        policy = policy_for(workload, self._device).under(self._settings)
        key = Key(workload.fingerprint, *self._stored_ids, policy.key)
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
            if not outcome.fault:
                with self._lock:
                    self._store.add_measurement(
                        Measurement.of(key, proposal.config, "screen", outcome, self._run, built.seconds)
                    )
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


class Predictor:
    """Trials of workloads, in a thread for each measuring process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Workload | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._found: list[Prediction] = []
        self._asked = 0
        self._changed = threading.Condition()
        self._trials: Trials | None = None
        self._room, self._taken = 0, 0  # bytes
        self._error = ""

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        """Handle a frame."""
        if "device" in message:
            self._begin(message["device"], message["numerics"])
        elif "workloads" in message:
            self._asked += len(message["workloads"])
            for workload in message["workloads"]:
                self._jobs.put(Workload.from_json(workload))
        else:
            link.send(self._end(float(message["end"])))

    def _begin(self, device: str, settings: dict[str, Any]) -> None:
        """Start the processes, which import what they need, then open the database."""
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a worker's baselines are one or two kernels
        count = 1 if device == "cpu" else max(1, min(_WORKERS, usable_processors() // 4))
        for number in range(count):
            thread = threading.Thread(target=self._run, args=(number, device, settings), daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            pool = CompilePool(timeout_s=domain_of(_KIND).policy(device).build_s)
            pool.start()
            numerics.restore(settings)
            self._room = int(_ROOM * (identify(device).memory_mib << 20))
            self._trials = Trials(Store.open(None), device, pool, uuid.uuid4().hex, settings)
        except Exception as error:
            with self._changed:
                self._error = one_line(error)
                self._changed.notify_all()

    def _run(self, number: int, device: str, settings: Mapping[str, Any]) -> None:
        domain = domain_of(_KIND)
        with Worker(None, device, domain.policy(device).within(_TRIAL_S).under(settings)) as worker:
            if (sample := domain.sample(number)) is not None:
                with contextlib.suppress(ChildDied, ChildSilent):  # the first trial reports it
                    worker.warm(sample)
            while (workload := self._jobs.get()) is not None and self._trials is not None:
                try:
                    with self._holding(_OVER_HELD * domain_of(workload.kind).bytes_held(workload)):
                        found = self._trials.run(workload, worker)
                except Exception as error:
                    found = Prediction(workload.fingerprint, workload.label, why=one_line(error))
                    if isinstance(error, MachineFault):
                        self._error = found.why
                with self._changed:
                    self._found.append(found)
                    self._changed.notify_all()

    @contextlib.contextmanager
    def _holding(self, need: int) -> Iterator[None]:
        """Reserve ``need`` bytes; waits until the regions of other threads leave enough."""
        with self._changed:
            while self._taken and self._taken + need > self._room:
                self._changed.wait()
            self._taken += need
        try:
            yield
        finally:
            with self._changed:
                self._taken -= need
                self._changed.notify_all()

    def _end(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        with self._changed:
            while len(self._found) < self._asked and not self._error and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            found, error = list(self._found), self._error
        if self._trials is not None:
            self._trials.store()
        return {"found": [one.to_json() for one in found], "left": self._asked - len(found), "error": error}


if __name__ == "__main__":
    serve(Predictor().handle)
