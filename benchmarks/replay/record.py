"""Measure every candidate of a workload's space, for searches to be replayed."""

from __future__ import annotations

import argparse
import datetime
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune import device as devices
from autotune.cli.options import add_db, add_device, natural_int
from autotune.device import resolve_device
from autotune.domain import domain_of, identity_of, policy_for
from autotune.errors import Unsupported, UserError, printable, safe_line
from autotune.files import check_output
from autotune.space import Space
from autotune.store import Store
from autotune.store.records import Measurement
from autotune.task import Config, Status, Task, config_key
from autotune.tuner.context import Context
from autotune.tuner.options import Budget, SearchOptions
from autotune.tuner.phases.explore import SEEDS, Explorer, learn_stored
from autotune.tuner.seeds import Seed
from autotune.tuner.threads import Lease
from autotune.workload import Workload
from benchmarks.replay.recording import SUFFIX, Recording, Row

MOST_POINTS = 500_000
"""Points of a space, each of which has to be looked at."""
MOST = 20_000
"""Candidates, each of which has to be measured."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of a space.

    Attributes:
        keys: of the candidate that each point of the space means, in its order.
        outside: the default and the heuristics' suggestions, which may be no points of the space.
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
    found = found or Candidates.of(task_of(context, workload), context.options.space_file)
    task, candidates, outside = found.task, found.configs, found.outside
    measured = _measure(context, task, list(candidates.values()), limit_s)
    if isinstance(measured, str):
        return measured
    numbers = {key: k for k, key in enumerate(candidates)}
    rows = tuple(_row(task, config, measured[key]) for key, config in candidates.items())
    if not any(row.status is Status.OK for row in rows):
        raise UserError(f"{workload.label}: none of {len(rows)} candidates works, so there is nothing to replay")
    made = datetime.datetime.now(datetime.UTC).date().isoformat()
    identity, software = identity_of(workload, context.device), devices.environment(context.device)
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
    random.Random(context.options.seed).shuffle(candidates)
    s = context.session(task, Budget(trials=len(candidates), patience=0))
    learn_stored(s)
    seeds = [Seed(config, "asked") for config in candidates]
    stop = Explorer(s, task.space(context.options.space_file), None, seeds, until_s=limit_s, patience=0).run()
    key = s.key
    found = context.store.measurements(key.workload, key.device, key.environment, key.policy)
    screens = {config_key(m.config): m for m in found if m.stage == "screen"}
    missing = sum(config_key(config) not in screens for config in candidates)
    if missing:
        why = "the machine failed on these" if stop == SEEDS else stop
        return f"{missing} of {len(candidates)} candidates are not measured ({why}); the same command goes on with them"
    return screens


def _row(task: Task, config: Config, m: Measurement) -> Row:
    return Row(config, m.status, m.latency_us, task.predict(config), m.compile_s, m.measure_s)


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "record",
        help="measure every candidate of a workload's space",
        description="Measure every candidate of the search space of workloads that the database holds (`autotune show`"
        " lists them), and write what became of each into a file for each workload. Measurements are stored as a "
        "search's are: the same command goes on where it was interrupted.",
    )
    about = "a workload's id as `autotune show` prints it, or its whole label"
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="+", help=about)
    about = "a narrowed copy of search_spaces/DOMAIN.toml: every candidate in it is measured"
    parser.add_argument("--space", metavar="FILE", help=about)
    parser.add_argument("--out", metavar="FOLDER", default=".", help="where the files go (default: here)")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the order and of random inputs")
    add_device(parser)
    add_db(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record; returns 0, 1 where something was left unmeasured, or 130 if it was interrupted."""
    device, folder, whole = resolve_device(args.device), Path(args.out), True
    Store.open(args.db, migrate=False, readonly=True).close()  # one that is not there has no workload, and is not made
    with Store.open(args.db) as store:
        workloads = [_found(store, name) for name in args.workloads]
        check_output(folder / f"x{SUFFIX}", f"--out {folder}", make=True)
        options = SearchOptions(space_file=args.space, seed=args.seed)
        for workload in workloads:
            context = Context(store, device, policy_for(workload, device), options)
            try:
                with context.interrupt, Lease(store, context.owner):
                    made = record(context, workload)
            finally:
                context.close()
            if context.interrupt.requested:
                raise KeyboardInterrupt
            if isinstance(made, str):
                print(f"autotune: NOT RECORDED: {printable(workload.label)}: {made}", file=sys.stderr)
                whole = False
                continue
            path = folder / f"{_file_name(workload)}{SUFFIX}"
            made.save(path)
            print(f"{path}: {len(made.rows)} candidates, {made.optimum_us:.1f} us the best of them")
    return 0 if whole else 1


def _found(store: Store, name: str) -> Workload:
    """The workload of an id or a label."""
    near = store.find_workloads(name)
    found = [w for w in near if w.label == name or (len(name) > 3 and w.fingerprint.startswith(name))]
    if not found:
        raise UserError(f"{store.name} has no workload {name!r}: `autotune show` lists them, a search adds its own")
    if len(found) > 1:
        raise UserError(f"{name!r} is several workloads: name one by its id, {found[0].fingerprint[:12]} say")
    if why := domain_of(found[0].kind).damage(found[0]):
        raise UserError(f"{found[0].fingerprint[:12]} may not be measured: {safe_line(why, 500)}")
    return found[0]


def _file_name(workload: Workload) -> str:
    """The label as a file's name; labels come from databases, and may hold anything."""
    words = re.sub(r"[^A-Za-z0-9.]+", "_", workload.label).strip("._")[:80]
    return f"{words or workload.kind}-{workload.fingerprint[:8]}"
