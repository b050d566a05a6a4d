"""What the next workloads begin with is compiled while the present one is measured.

The processes that compile have little to do while a worker starts, baselines are compiled or finalists are compared,
and a search of many workloads with little time each would spend most of it waiting for its first candidates.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence

from autotune.errors import Unsupported
from autotune.task import ComposedTask, Composition, Config, Task, config_key
from autotune.tuner.context import Context
from autotune.workload import Workload

WORKLOADS = 4
"""Workloads, the present one among them, that are looked after."""
FIRST = 12
"""Candidates of each workload, and of each part of its most promising compositions."""
_COMPOSITIONS = 2


class Ahead:
    """Keeps a run's compile pool busy with what will be asked of it. A context manager.

    Does nothing on a CPU, where compiling disturbs what is measured, and nothing for a workload that is known: what a
    search begins with is measured then.
    """

    def __init__(self, context: Context, workloads: Sequence[Workload]) -> None:
        self._context, self._workloads = context, workloads
        self._active = _overlaps(context.device)
        self._reached = 0
        self._put = self._done = 0
        self._stop = threading.Event()
        self._waiting: queue.SimpleQueue[Workload | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="autotune-ahead", daemon=True)

    def __enter__(self) -> Ahead:
        if self._active:
            self._pool = self._context.pool
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._stop.set()
            self._waiting.put(None)
            self._thread.join(timeout=30)

    def reach(self, i: int) -> None:
        """Workload ``i`` is about to be searched."""
        if not self._active:
            return
        self._reached = max(self._reached, i)
        end = min(i + WORKLOADS, len(self._workloads))
        while self._reached < end:
            workload = self._workloads[self._reached]
            if not self._context.measured(workload):
                self._put += 1
                self._waiting.put(workload)
            self._reached += 1

    @property
    def idle(self) -> bool:
        """Whether everything is handed to the compilers as far as workloads were reached."""
        return self._done == self._put

    def _run(self) -> None:
        while not self._stop.is_set() and (workload := self._waiting.get()) is not None:
            try:
                for part, config in first(self._context, workload):
                    if self._stop.is_set():
                        return
                    self._pool.ahead(part, self._context.device, config)
            except Exception:  # whoever searches the workload tells what is wrong with it
                pass
            self._done += 1


def _overlaps(device: str) -> bool:
    """Whether compiling leaves measurements on ``device`` alone."""
    return device.startswith("cuda")


def first(context: Context, workload: Workload) -> Iterator[tuple[Workload, Config]]:
    """What a search of ``workload`` probably begins with, by the workload or part that it is a candidate of.

    Raises:
        Unsupported: the workload cannot be searched.
    """
    task = context.task(workload)
    compositions: Sequence[Composition] = ()
    if isinstance(task, ComposedTask):
        compositions = task.compositions(context.plans)
    parts = {p.fingerprint: p for c in compositions[:_COMPOSITIONS] for p in c.parts}
    if not parts or workload.fingerprint in parts:
        yield from ((workload, config) for config in beginnings(context, task))
    for fingerprint, part in parts.items():
        if fingerprint == workload.fingerprint or context.measured(part):
            continue
        try:
            yield from ((part, config) for config in beginnings(context, context.task(part)))
        except Unsupported:
            continue
    if parts and workload.fingerprint not in parts:
        yield workload, task.normalize(task.default())


def beginnings(context: Context, task: Task) -> list[Config]:
    """The default and the heuristics' candidates as :func:`autotune.tuner.seeds.plan` has them."""
    space = task.space(context.space_file)
    default = task.normalize(task.default())
    found = {config_key(default): default}
    for config in itertools.chain(context.seeds.get(task.workload.fingerprint, ()), [default], task.seeds()):
        fitted = space.project(config)
        if fitted is not None:
            fitted = task.normalize(fitted)
            if task.reject(fitted) is None:
                found.setdefault(config_key(fitted), fitted)
        if len(found) == FIRST:
            break
    return list(found.values())
