"""Measuring every candidate of a space."""

from __future__ import annotations

import datetime
import random

from autotune import __version__
from autotune import device as devices
from autotune.errors import Unsupported, UserError
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


def record(context: Context, workload: Workload) -> Recording | str:
    """Measure what is not measured yet of a workload's space; answers why there is no recording where it ended early.

    Candidates come in random order, so that a device that warms up meanwhile favours none. Measurements are stored as
    a search's are: an interrupted recording is gone on with, and a search after it measures nothing again.

    Raises:
        UserError: the space is too large; no candidate works.
        WorkerFault: the machine failed.
    """
    try:
        task = context.task(workload)
    except Unsupported as why:
        raise UserError(f"{workload.label} cannot be searched: {why}") from None
    space = task.space(context.space_file)
    if space.size > MOST_POINTS:
        raise UserError(
            f"{workload.label}: {space.size} points are too many to measure each: narrow a copy of"
            f" search_spaces/{workload.kind}.toml to {MOST_POINTS} at most, and give it as --space"
        )
    candidates: dict[str, Config] = {}
    keys = []
    for index in range(space.size):
        config = task.normalize(space.at(index))
        keys.append(config_key(config))
        candidates.setdefault(keys[-1], config)
    outside = [task.normalize(config) for config in (task.default(), *task.seeds())]
    candidates |= {config_key(config): config for config in outside}
    candidates = {key: config for key, config in candidates.items() if task.reject(config) is None}
    if len(candidates) > MOST:
        raise UserError(f"{workload.label}: {len(candidates)} candidates are too many; narrow the space to {MOST}")
    measured = _measure(context, task, list(candidates.values()))
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
        space=space,
        default=outside[0],
        seeds=tuple(config for config in outside[1:] if config_key(config) in candidates),
        rows=rows,
        points=tuple(numbers.get(key, -1) for key in keys),
        about={"device": identity.label, "environment": software.to_json(), "autotune": __version__, "date": made},
    )


def _measure(context: Context, task: Task, candidates: list[Config]) -> dict[str, Measurement] | str:
    """The first timing of every candidate, by its key."""
    random.Random(context.seed).shuffle(candidates)
    s = context.session(task, Budget(trials=len(candidates), patience=0))
    learn_stored(s)
    seeds = [Seed(config, "asked") for config in candidates]
    stop = Explorer(s, task.space(context.space_file), None, seeds, until_s=None, patience=0).run()
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
