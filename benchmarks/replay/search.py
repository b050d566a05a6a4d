"""A search in a recording: the search's own code, with a task, a worker and a compile pool that look things up."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from autotune.errors import UserError
from autotune.measure.outcome import Outcome
from autotune.measure.policy import Policy
from autotune.measure.pool import Built, CompilePool
from autotune.measure.worker import Contender
from autotune.space import Config, Space
from autotune.store.records import Key, Measurement
from autotune.store.store import Store
from autotune.task import Artifact, Composition, Task, config_key
from autotune.tuner import seeds
from autotune.tuner.context import Context, Session
from autotune.tuner.options import Budget, SearchOptions
from autotune.tuner.phases.explore import Explorer
from autotune.tuner.samplers import is_guided
from autotune.tuner.studies import History
from autotune.workload import Workload
from benchmarks.replay.recording import Recording, Row

HELP = ("seeds", "model", "neighbours", "pruning")
"""What helps a sampler: heuristics and the default, the cost model's suggestions, steps from the best so far, and the
cost model's veto."""


@dataclass(frozen=True)
class Trace:
    """One search.

    Attributes:
        best_us: latency of the best so far, after each measured candidate; infinite while none works.
        seconds: wall time after each, as the recording machine would have taken: building, measuring, proposing.
        proposing_s: the search's own part of that, all together.
    """

    best_us: tuple[float, ...]
    seconds: tuple[float, ...]
    proposing_s: float


@dataclass
class _Task(Task):
    """The task of a recording. Without "seeds" it suggests none, and its default is ``start``."""

    recording: Recording
    without: frozenset[str]
    start: Config
    device: str = ""
    workload: Workload = field(init=False)

    def __post_init__(self) -> None:
        self.workload, self.device = self.recording.workload, self.recording.device

    def space(self, file: str | None = None) -> Space:
        return self.recording.space

    def default(self) -> Config:
        return self.start

    def seeds(self) -> Sequence[Config]:
        return () if "seeds" in self.without else self.recording.seeds

    def reject(self, config: Config) -> str | None:
        return None if self.recording.row(config) is not None else "not possible"

    def normalize(self, config: Config) -> Config:
        row = self.recording.row(config)
        return row.config if row is not None else config

    def build(self, config: Config) -> Artifact:
        raise NotImplementedError("a recording has no kernels")

    def adapt(self, config: Config) -> Config | None:
        return None

    def under(self, method: str, figures: Mapping[str, float]) -> Task:
        return self

    def compositions(self, limit: int) -> Sequence[Composition]:
        return ()

    def space_for(self, config: Config, file: str | None = None) -> Space:
        return self.recording.space

    def predict(self, config: Config) -> float | None:
        row = self.recording.row(config)
        return None if row is None else row.expected_us


class _Pool:
    """Every candidate is built at once, and measured in the order of proposal."""

    def __init__(self, recording: Recording, processes: int) -> None:
        self.processes, self._recording = processes, recording

    def submit(self, workload: Workload, device: str, config: Config) -> Future[Built]:
        row = self._recording.row(config)
        assert row is not None
        future: Future[Built] = Future()  # the measurer reports a failed compilation
        future.set_result(Built(Artifact("recorded", ())))
        return future


class _Measurer:
    """Answers with the recorded measurements, in order."""

    def __init__(self, recording: Recording) -> None:
        self.restarts, self.restart_s, self.baseline_s, self.bytes_moved = 0, 0.0, 0.0, 0
        self.others: float | None = None
        self._recording = recording
        self.rows: list[tuple[Row, float]] = []
        """What was asked for, and when, in seconds of this process."""

    def open(self, workload: Workload) -> None: ...

    def measure(
        self, config: Config, artifact: Artifact, *, stage: str, seed: int, limit_us: float | None = None
    ) -> Outcome:
        row = self._recording.row(config)
        assert row is not None
        self.rows.append((row, time.process_time()))
        samples = () if row.latency_us is None else (row.latency_us,)
        return Outcome(row.status, samples, reason="" if samples else "recorded", seconds=row.measure_s)

    def compare(self, contenders: Sequence[Contender], *, seed: int) -> dict[str, Outcome]:
        return {c.name: self.measure(c.config, c.artifact, stage="final", seed=seed) for c in contenders}

    def close(self) -> None: ...


class _Memory:
    """The methods of a store that a search calls, for one search."""

    def __init__(self) -> None:
        self._measurements: dict[str, Measurement] = {}

    def get_measurement(self, key: Key, config: Config, stage: str) -> Measurement | None:
        return self._measurements.get(config_key(config))

    def add_measurement(self, m: Measurement) -> bool:
        return self._measurements.setdefault(config_key(m.config), m) is m

    def claim(self, *_: object) -> bool:
        return True

    def release(self, *_: object) -> None: ...


def check_help(names: Sequence[str]) -> None:
    """Raise UserError where one of the names is not of :data:`HELP`."""
    if unknown := set(names) - set(HELP):
        raise UserError(f"there is no {sorted(unknown)[0]!r} to leave out; there is {', '.join(HELP)}")


def search(
    recording: Recording,
    sampler: str,
    *,
    candidates: int,
    seed: int = 0,
    without: Sequence[str] = (),
    asked: Sequence[Config] = (),
    processes: int | None = None,
) -> Trace:
    """Search a recording until so many candidates are measured, or none is left.

    Args:
        sampler: of :data:`autotune.tuner.samplers.SAMPLERS`.
        without: of :data:`HELP`, what to leave out. Without "seeds" the search begins at a random candidate.
        asked: configurations to measure first.
        processes: that compile ahead of measuring, and so how many candidates are proposed before an answer;
            None for the recording machine's.

    Raises:
        UserError: there is no such sampler, or nothing of the name in ``without``.
    """
    check_help(without)
    start = recording.default
    if "seeds" in without:
        start = recording.rows[random.Random(seed).choice([k for k in recording.points if k >= 0])].config
    task = _Task(recording, frozenset(without), start)
    measurer = _Measurer(recording)
    context = Context(
        store=cast(Store, _Memory()),
        device=task.device,
        policy=Policy("recorded"),
        options=SearchOptions(sampler=sampler, seed=seed),
        run="replay",
        owner="replay",
        _pool=cast(CompilePool, _Pool(recording, processes or recording.processes)),
    )
    key = Key(task.workload.fingerprint, "recorded", "recorded", "recorded")
    s = Session(context, task, key, measurer, Budget(trials=candidates))
    space, guided = recording.space, is_guided(sampler)
    began = time.process_time()
    begin = seeds.plan(task, space, (), seed, asked=asked)
    if "model" in without:
        begin = [found for found in begin if found.origin != "model"]
    history = History(sampler=sampler, seed=seed, space=space)
    polish, prune = guided and "neighbours" not in without, guided and "pruning" not in without
    Explorer(s, space, history, begin, until_s=None, patience=0, polish=polish, prune=prune).run()
    return _trace(recording, measurer.rows, began)


def _trace(recording: Recording, rows: Sequence[tuple[Row, float]], began: float) -> Trace:
    best, spent, measured = float("inf"), 0.0, []
    for row, at in rows:
        if row.latency_us is not None:
            best = min(best, row.latency_us)
        # On a GPU compilers work in parallel to the worker, one candidate each; on a CPU they take turns with it.
        building = row.compile_s / recording.processes
        spent += max(row.measure_s, building) if recording.device != "cpu" else row.measure_s + building
        measured.append((best, spent + at - began))
    proposing_s = rows[-1][1] - began if rows else 0.0
    return Trace(tuple(us for us, _ in measured), tuple(s for _, s in measured), proposing_s)
