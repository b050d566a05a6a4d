"""Measuring every candidate of a space."""

from __future__ import annotations

import datetime
import random
from collections.abc import Mapping
from dataclasses import dataclass

from autotune import __version__
from autotune import device as devices
from autotune.errors import Unsupported, UserError
from autotune.space import Space
from autotune.store.records import Measurement
from autotune.task import ComposedTask, Config, Status, Task, config_key, place
from autotune.tuner.budget import Budget
from autotune.tuner.context import Context
from autotune.tuner.phases.explore import SEEDS, Explorer
from autotune.tuner.phases.screen import learn_stored
from autotune.tuner.proposals.seeds import Seed
from autotune.tuner.replay.recording import Recording, Row
from autotune.workload import Workload

MOST_POINTS = 500_000
"""Points of a space, each of which has to be looked at."""
MOST = 20_000
"""Candidates, each of which has to be measured."""


@dataclass(frozen=True)
class Candidates:
    """What there is to measure.

    Attributes:
        keys: of the candidate that each point of the space means, in its order.
        outside: the default, and what heuristics suggest, which need not be points of the space.
        configs: the candidates, by their keys.
    """

    task: Task
    space: Space
    keys: tuple[str, ...]
    outside: tuple[Config, ...]
    configs: Mapping[str, Config]

    @classmethod
    def of(cls, task: Task, space_file: str | None = None) -> Candidates:
        """All of a task's space, or of a narrowed copy of it.

        Raises:
            UserError: there are too many.
        """
        label, space = task.workload.label, task.space(space_file)
        if space.size > MOST_POINTS:
            raise UserError(
                f"{label}: {space.size} points are too many to measure each: narrow a copy of"
                f" search_spaces/{task.workload.kind}.toml to {MOST_POINTS} at most, and give it as --space"
            )
        points = [task.normalize(space.at(index)) for index in range(space.size)]
        keys = [config_key(config) for config in points]
        outside = [task.normalize(config) for config in (task.default(), *task.seeds())]
        every = dict(zip(keys, points, strict=True)) | {config_key(config): config for config in outside}
        configs = {key: config for key, config in every.items() if task.reject(config) is None}
        if len(configs) > MOST:
            raise UserError(f"{label}: {len(configs)} candidates are too many; narrow the space to {MOST}")
        return cls(task, space, tuple(keys), tuple(outside), configs)


def record(
    context: Context, workload: Workload, limit_s: float | None = None, found: Candidates | None = None
) -> Recording | str:
    """Measure what is not measured yet of a workload's space; answers why there is no recording where it ended early.

    Candidates come in random order, so that a device that warms up meanwhile favours none. Measurements are stored as
    a search's are: an interrupted recording is gone on with, and a search after it measures nothing again.

    Args:
        limit_s: seconds after which no further candidate is begun; None for as long as it takes.
        found: of the workload's task, where the caller has it.

    Raises:
        UserError: the space is too large; no candidate works.
        WorkerFault: the machine failed.
    """
    found = found or Candidates.of(task_of(context, workload), context.space_file)
    task, candidates, outside = found.task, found.configs, found.outside
    measured = _measure(context, task, list(candidates.values()), limit_s)
    if isinstance(measured, str):
        return measured
    numbers = {key: k for k, key in enumerate(candidates)}
    rows = tuple(_row(task, config, measured[key]) for key, config in candidates.items())
    if not any(row.status is Status.OK for row in rows):
        raise UserError(f"{workload.label}: none of {len(rows)} candidates works, so there is nothing to replay")
    made = datetime.datetime.now(datetime.UTC).date().isoformat()
    identity, software = place(workload, context.device), devices.environment(context.device)
    return Recording(
        workload=workload,
        device="cpu" if context.device == "cpu" else "cuda:0",
        processes=context.pool.processes,
        space=found.space,
        default=outside[0],
        seeds=tuple(config for config in outside[1:] if config_key(config) in candidates),
        rows=rows,
        points=tuple(numbers.get(key, -1) for key in found.keys),
        about={"device": identity.label, "environment": software.to_json(), "autotune": __version__, "date": made},
    )


def task_of(context: Context, workload: Workload) -> Task:
    """The workload's task; raises UserError where it has none."""
    try:
        return context.task(workload)
    except Unsupported as why:
        raise UserError(f"{workload.label} cannot be searched: {why}") from None


def _measure(
    context: Context, task: Task, candidates: list[Config], limit_s: float | None
) -> dict[str, Measurement] | str:
    """The first timing of every candidate, by its key."""
    random.Random(context.seed).shuffle(candidates)
    s = context.session(task, Budget(trials=len(candidates), patience=0))
    learn_stored(s)
    seeds = [Seed(config, "asked") for config in candidates]
    stop = Explorer(s, task.space(context.space_file), None, seeds, until_s=limit_s, patience=0).run()
    key = s.key
    found = s.store.measurements(key.workload, key.device, key.environment, key.policy)
    screens = {config_key(m.config): m for m in found if m.stage == "screen"}
    missing = sum(config_key(config) not in screens for config in candidates)
    if missing:
        why = "the machine failed on these" if stop == SEEDS else stop
        return f"{missing} of {len(candidates)} candidates are not measured ({why}); the same command goes on with them"
    return screens


def _row(task: Task, config: Config, m: Measurement) -> Row:
    expected = task.predict(config) if isinstance(task, ComposedTask) else None
    return Row(config, m.status, m.latency_us, expected, m.compile_s, m.measure_s)
