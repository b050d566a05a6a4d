"""Prefetch: the first candidates of the next workloads are compiled while the current one is measured.

The compile processes are mostly idle while a worker starts, baselines are compiled or finalists are compared. Without
prefetching, a search of many short workloads would mostly wait for first candidates.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from autotune.errors import Unsupported
from autotune.task import Config, Task, config_key
from autotune.tuner.context import Context
from autotune.tuner.options import Budget
from autotune.tuner.phases import compose
from autotune.tuner.seeds import planned, remembered, winners
from autotune.workload import Workload

WORKLOADS = 4
"""Default of :class:`Prefetcher`."""
FIRST = 14
"""Most candidates of a workload and of each part of its most promising compositions, in searches without a limit."""
_COMPOSITIONS = 2
_JOIN_S = 2.0
_SWITCH_S = 0.0005
"""Python's switch interval while prefetching. The search waits for the worker and the database thousands of times. At
the default interval it would wait 5 ms more for this thread each time: claiming a candidate took 15 ms instead of 6."""


class Prefetcher:
    """Keeps a run's compile pool busy with candidates that the search will need. A context manager.

    It is inactive when the cost model alone decides, which needs one candidate. It skips workloads with stored
    measurements, since their first candidates are measured already. Unused builds of a workload are dropped when the
    next one begins.

    Args:
        budget: returns the expected budget of a workload by its number.
        most: workloads, the current one included, whose candidates are prefetched; those with a leader
            (:meth:`Context.followed`) do not count.
        active: False to prefetch nothing; None for True on a GPU alone, since compiling disturbs measurements on a CPU.
    """

    def __init__(
        self,
        context: Context,
        workloads: Sequence[Workload],
        budget: Callable[[int], Budget],
        most: int = WORKLOADS,
        active: bool | None = None,
    ) -> None:
        self._context, self._workloads, self._budget, self._most = context, workloads, budget, most
        self._active = _overlaps(context.device) if active is None else active
        self._put = self._done = 0
        self._met: set[int] = set()
        self._wanted: set[int] = set()
        self._handed: dict[int, set[str]] = {}
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="autotune-prefetch", daemon=True)
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> Prefetcher:
        if self._active:
            self._pool = self._context.pool
            sys.setswitchinterval(min(_SWITCH_S, self._interval))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self.stop()
            self._thread.join(timeout=_JOIN_S)  # it may still compute compositions, which are not needed

    def stop(self) -> None:
        """Prefetch no more. Unused builds are dropped; code that they left in caches on disk stays."""
        if self._active:
            self._active = False
            sys.setswitchinterval(self._interval)
            self._leave(())  # no build is submitted from now on
            self._waiting.put(None)

    def advance(self, i: int, then: Sequence[int] | None = None) -> None:
        """Prefetch for workload ``i``, searched now, and for ``then``, the next ones (None: all that follow)."""
        if not self._active:
            return
        coming = self._coming([i, *(range(i + 1, len(self._workloads)) if then is None else then)])
        self._leave(coming)
        for k in coming:
            if k not in self._met and not self._context.measured(self._workloads[k]):
                self._put += 1
                self._waiting.put(k)
            self._met.add(k)

    def _coming(self, every: Sequence[int]) -> list[int]:
        """Return the workloads to prefetch: first all with a leader, which need one candidate, then the next ones.

        Workloads that are alike wait until one of them leads.
        """
        led: list[int] = []
        others: dict[str, int] = {}
        for k in every:
            workload = self._workloads[k]
            if self._context.followed(workload, self._budget(k)) is not None:
                led.append(k)
            else:
                waits = self._context.leader(workload) is None
                others.setdefault(self._context.alike(workload) if waits else workload.fingerprint, k)
        return [*led, *list(others.values())[: self._most]]

    @property
    def idle(self) -> bool:
        """True if all first candidates of the reached workloads have been submitted."""
        return self._done == self._put

    def _leave(self, coming: Sequence[int]) -> None:
        """Drop the unused builds of workloads outside ``coming``, except those of parts that ``coming`` shares."""
        with self._lock:
            self._wanted = set(coming)
            left = [self._handed.pop(k) for k in list(self._handed) if k not in self._wanted]
            wanted = set().union(*self._handed.values())
        if left:
            self._pool.forget(set().union(*left) - wanted)

    def _hand(self, i: int, part: Workload, config: Config) -> bool:
        """Build a candidate of workload ``i``, or of its part; False if the search has passed that workload."""
        with self._lock:
            if i not in self._wanted or self._context.interrupt.requested:
                return False
            self._handed.setdefault(i, set()).add(part.fingerprint)
            self._pool.prefetch(part, self._context.device, config)
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
            except Exception:  # the search of this workload raises the error again, and reports it
                pass
            self._done += 1


def _overlaps(device: str) -> bool:
    """True if compiling does not disturb measurements on ``device``."""
    return device.startswith("cuda")


def first(context: Context, workload: Workload, budget: Budget) -> Iterator[tuple[Workload, Config]]:
    """Yield the probable first candidates of a search of ``workload``, each with its workload or part.

    Raises:
        Unsupported: the workload cannot be searched.
    """
    task = context.task(workload)
    if (config := context.lead(task)) is not None:
        yield workload, config
        if context.followed(workload, budget) is not None:
            return
    compositions = compose.first_compositions(context, workload, context.compositions(task), budget)
    parts = {p.fingerprint: p for c in compositions[:_COMPOSITIONS] for p in c.parts}
    if not parts or workload.fingerprint in parts:
        yield from ((workload, config) for config in first_candidates(context, task, budget.trials))
    for fingerprint, part in parts.items():
        if fingerprint == workload.fingerprint or context.measured(part):
            continue
        try:
            share = compose.Parts().share(part, compositions)
            own = context.task(part, task)
            yield from ((part, config) for config in first_candidates(context, own, budget.part(share, None).trials))
        except Unsupported:
            continue
    if parts and workload.fingerprint not in parts:
        yield workload, task.normalize(task.default())


def first_candidates(context: Context, task: Task, trials: int | None) -> Iterator[Config]:
    """Yield the first candidates of a search that are not rejected, without those of neighbouring workloads.

    Args:
        trials: candidates that the search measures; None for no limit.
    """
    asked = context.options.seeds.get(task.workload.fingerprint, ())
    elsewhere = winners(context.store, context.key(task.workload))
    space = task.space(context.options.space_file)
    seed, liked = context.options.seed, remembered(context, task, space)
    found = set[str]()
    for proposal in planned(task, space, (), seed, asked=asked, elsewhere=elsewhere, liked=liked):
        if len(found) >= (FIRST if trials is None else trials):
            return
        config = task.normalize(proposal.config)
        key = config_key(config)
        # The default is first, and is always measured.
        if key not in found and (not found or task.reject(config) is None):
            found.add(key)
            yield config
