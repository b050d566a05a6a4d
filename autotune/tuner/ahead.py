"""What the next workloads begin with is compiled while the present one is measured.

The processes that compile have little to do while a worker starts, baselines are compiled or finalists are compared,
and a search of many workloads with little time each would spend most of it waiting for its first candidates.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from autotune.errors import Unsupported
from autotune.space import Space
from autotune.task import Config, Task, config_key
from autotune.tuner.context import Context
from autotune.tuner.options import Budget
from autotune.tuner.phases import compose
from autotune.tuner.proposals.samplers import NONE
from autotune.tuner.proposals.seeds import remembered, suggested, winners
from autotune.workload import Workload

WORKLOADS = 4
"""Workloads, the present one among them, that are looked after."""
FIRST = 8
"""Candidates beside the cost model's of each workload, and of each part of its most promising compositions."""
_COMPOSITIONS = 2
_JOIN_S = 2.0
_SWITCH_S = 0.0005
"""Python's switch interval meanwhile. The search waits for the worker and the database thousands of times, and would
wait for this thread's 5 ms each time: claiming a candidate took 15 ms in place of 6."""


class Ahead:
    """Keeps a run's compile pool busy with what will be asked of it. A context manager.

    Does nothing on a CPU, where compiling disturbs what is measured, nothing where the cost model alone decides, which
    asks for one candidate, and nothing for a workload that is known: what a search begins with is measured then. What
    the search of a workload did not ask for is dropped when the next one begins.

    Args:
        budget: what a workload (its number) may spend, as far as that is known before its turn.
    """

    def __init__(self, context: Context, workloads: Sequence[Workload], budget: Callable[[int], Budget]) -> None:
        self._context, self._workloads, self._budget = context, workloads, budget
        self._active = _overlaps(context.device) and context.options.sampler != NONE
        self._put = self._done = 0
        self._met: set[int] = set()
        self._wanted: set[int] = set()
        self._handed: dict[int, set[str]] = {}
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="autotune-ahead", daemon=True)
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> Ahead:
        if self._active:
            self._pool = self._context.pool
            sys.setswitchinterval(min(_SWITCH_S, self._interval))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            sys.setswitchinterval(self._interval)
            self._leave(())  # nothing is handed over from now on
            self._waiting.put(None)
            self._thread.join(timeout=_JOIN_S)  # it may be thinking of plans, which nobody waits for

    def reach(self, i: int, then: Sequence[int] | None = None) -> None:
        """Workload ``i`` is about to be searched, and after it ``then``; None for all that follow."""
        if not self._active:
            return
        coming = [i, *(range(i + 1, len(self._workloads)) if then is None else then)][:WORKLOADS]
        self._leave(coming)
        for k in coming:
            if k not in self._met and not self._context.measured(self._workloads[k]):
                self._put += 1
                self._waiting.put(k)
            self._met.add(k)

    @property
    def idle(self) -> bool:
        """True if the compilers have all candidates of the workloads that were reached."""
        return self._done == self._put

    def _leave(self, coming: Sequence[int]) -> None:
        """Drop what is left of other workloads than ``coming``, unless one of those has such a part too."""
        with self._lock:
            self._wanted = set(coming)
            left = [self._handed.pop(k) for k in list(self._handed) if k not in self._wanted]
            wanted = set().union(*self._handed.values())
        if left:
            self._pool.forget(set().union(*left) - wanted)

    def _hand(self, i: int, part: Workload, config: Config) -> bool:
        """Build a candidate of workload ``i``, or of a part of it; False where the search has passed that workload."""
        with self._lock:
            if i not in self._wanted or self._context.interrupt.requested:
                return False
            self._handed.setdefault(i, set()).add(part.fingerprint)
            self._pool.ahead(part, self._context.device, config)
            return True

    def _run(self) -> None:
        while (i := self._waiting.get()) is not None:
            try:
                if i in self._wanted:
                    if (baselines := self._context.baselines(self._workloads[i])) is not None:
                        baselines.begin(self._workloads[i], self._context.device)
                    for part, config in first(self._context, self._workloads[i], self._budget(i)):
                        if not self._hand(i, part, config):
                            break
            except Exception:  # the search of this workload meets the error again, and reports it
                pass
            self._done += 1


def _overlaps(device: str) -> bool:
    """Whether compiling leaves measurements on ``device`` alone."""
    return device.startswith("cuda")


def first(context: Context, workload: Workload, budget: Budget) -> Iterator[tuple[Workload, Config]]:
    """Yield the probable first candidates of a search of ``workload``, each with the workload or part that it is of.

    Raises:
        Unsupported: the workload cannot be searched.
    """
    task = context.task(workload)
    compositions = compose.begun_with(context, workload, context.compositions(task), budget)
    parts = {p.fingerprint: p for c in compositions[:_COMPOSITIONS] for p in c.parts}
    if not parts or workload.fingerprint in parts:
        yield from ((workload, config) for config in beginnings(context, task))
    for fingerprint, part in parts.items():
        if fingerprint == workload.fingerprint or context.measured(part):
            continue
        try:
            yield from ((part, config) for config in beginnings(context, context.task(part, task)))
        except Unsupported:
            continue
    if parts and workload.fingerprint not in parts:
        yield workload, task.normalize(task.default())


def beginnings(context: Context, task: Task) -> Iterator[Config]:
    """The first candidates of a search without neighbours, as far as they can work: what is known at once, then what
    the cost model likes."""
    asked = context.options.seeds.get(task.workload.fingerprint, ())
    elsewhere = winners(context.store, context.key(task.workload))
    space = task.space(context.options.space_file)
    known = itertools.islice(suggested(task, space, asked, elsewhere), FIRST)
    found = set[str]()
    for config in itertools.chain((seed.config for seed in known), _liked(context, task, space)):
        config = task.normalize(config)
        key = config_key(config)
        # The default comes first, and is measured in any case.
        if key not in found and (not found or task.reject(config) is None):
            found.add(key)
            yield config


def _liked(context: Context, task: Task, space: Space) -> Iterator[Config]:
    yield from (fitted for config in remembered(context, task, space) if (fitted := space.project(config)) is not None)
