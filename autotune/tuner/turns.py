"""A run's workloads, their budgets, and the sequential search of all of them on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.tuner.context import Context
from autotune.tuner.options import FINAL_SHARE, Budget, SearchOptions
from autotune.tuner.prefetch import Prefetcher
from autotune.tuner.result import Result
from autotune.tuner.study import known, tune
from autotune.tuner.threads import Lease
from autotune.workload import Workload

_LEAST_S = 1.0


class Clock:
    """Shares a run's seconds among its workloads.

    Every workload has a fixed cost: its inputs, the compilation of baselines and the final comparison. The clock learns
    the fixed cost from finished workloads and reserves it for the remaining ones. A run of many workloads thus stays
    within its total time. The first workload is excluded, since its cost includes the start of the worker and the
    compile processes.

    Args:
        timeout: seconds for all; None for no limit.
        shares: of each workload, in order.
        devices: number of devices that search in parallel, each with its own clock. One device searches a workload.
    """

    def __init__(self, timeout: float | None, shares: Sequence[float], devices: int = 1) -> None:
        self._timeout, self._shares, self._devices = timeout, list(shares), devices
        self._begin = time.monotonic()
        self._fixed: list[float] = []

    @property
    def up(self) -> bool:
        """True if the fixed cost of another workload would exceed the time."""
        if self._timeout is None:
            return False
        others = self._fixed[1:]
        return time.monotonic() - self._begin + (statistics.fmean(others) if others else 0.0) >= self._timeout

    @property
    def end(self) -> float | None:
        """The end of the run's time by ``time.monotonic()``; None without a limit."""
        return None if self._timeout is None else self._begin + self._timeout

    def beside(self) -> Clock:
        """Return the clock of another device, with this clock's start."""
        other = Clock(self._timeout, self._shares, self._devices)
        other._begin = self._begin
        return other

    def granted(self, i: int) -> float | None:
        """Return workload ``i``'s share of the devices' total seconds, used or not; ``timeout`` at most."""
        if self._timeout is None:
            return None
        return self._timeout * min(1.0, self._devices * self._shares[i] / sum(self._shares))

    def budget(self, i: int, options: SearchOptions, then: Sequence[int] | None = None) -> Budget:
        """Return the budget of workload ``i``, the next on this device.

        Args:
            then: the workloads after it; None for all that follow.
        """
        if self._timeout is None:
            return options.budget(None)
        left = max(self._timeout - (time.monotonic() - self._begin), 1.0)
        shares = [self._shares[k] for k in (i, *(range(i + 1, len(self._shares)) if then is None else then))]
        part = shares[0] / sum(shares)
        if not self._fixed:
            return options.budget(left * part)
        first, *others = self._fixed
        fixed = statistics.fmean(others or [min(first, FINAL_SHARE * left * part)])
        search = max((left - fixed * len(shares)) * part, _LEAST_S)
        return replace(options.budget(search + fixed), final=fixed)

    def done(self, seconds: float, searched: float) -> None:
        """Record a workload that took ``seconds``, ``searched`` of them for its search."""
        if seconds > 0:
            self._fixed.append(max(seconds - searched, 0.0))


@dataclass(frozen=True)
class Turns:
    """A run's workloads in the order of their turns.

    Attributes:
        shares: share of the run's time for each workload.
        devices: number of devices that search them.
    """

    workloads: Sequence[Workload]
    shares: Sequence[float]
    options: SearchOptions
    devices: int = 1

    def chosen(self, numbers: Sequence[int]) -> Turns:
        """Return a subset of the turns, or all in another order, by their numbers."""
        workloads, shares = [self.workloads[i] for i in numbers], [self.shares[i] for i in numbers]
        return replace(self, workloads=workloads, shares=shares)

    def clock(self) -> Clock:
        """Return a clock that starts now; each device has one."""
        return Clock(self.options.timeout, self.shares, self.devices)

    def expected(self, clock: Clock, i: int) -> Budget:
        """Return the expected budget of the ``i``-th workload before its turn."""
        return self.options.budget(clock.granted(i))

    def known(self, context: Context, clock: Clock, i: int) -> Iterator[Result]:
        """Yield the result of an earlier search of the ``i``-th workload, if any, in place of a new search."""
        found = known(context, self.workloads[i], self.expected(clock, i), clock.granted(i))
        if found is not None:
            yield found


def alone(context: Context, turns: Turns) -> Generator[Result, None, None]:
    """Search on the context's device; yield results as they arrive.

    Raises:
        UserError: raised by :func:`autotune.tuner.study.tune`.
    """
    clock, begun = turns.clock(), False
    context.end = clock.end
    with (
        Lease(context.store, context.owner),
        Prefetcher(context, turns.workloads, lambda i: turns.expected(clock, i)) as prefetcher,
    ):
        for i, workload in enumerate(turns.workloads):
            if clock.up and begun and not turns.options.every:  # each run begins at least one
                yield from turns.known(context, clock, i)
                continue
            prefetcher.advance(i)
            result = tune(context, workload, clock.budget(i, turns.options), clock.granted(i))
            clock.done(result.seconds, result.search_s)
            begun = begun or result.seconds > 0
            yield result
            if result.interrupted or result.fault:
                return


def order(context: Context, turns: Turns) -> list[int]:
    """Return the numbers of the workloads in search order.

    1. Workloads with nothing left to do, which take no time and leave theirs to the others.
    2. Workloads without a stored winner and without a finished search.
    3. Workloads without a stored winner whose search has finished before. A long search may find no winner each time.
    4. Workloads with a stored winner that a new search may improve.

    Repeated runs thus reach all workloads. Within a class, the largest shares come first.
    """
    clock = turns.clock()
    keys = [context.key(workload) for workload in turns.workloads]
    stored = {s.key: s for device in {key.device for key in keys} for s in context.store.schedules(device)}

    def turn(i: int) -> tuple[int, float]:
        found = stored.get(keys[i])
        if found is None:
            ended = context.store.get_effort(keys[i], context.scope(keys[i])) is not None
            return (2 if ended else 1), -turns.shares[i]
        over = not found.busy and not found.space and turns.options.space_file is None
        done = over and context.searched(keys[i], turns.expected(clock, i), clock.granted(i)) is not None
        return (0 if done else 3), -turns.shares[i]

    return sorted(range(len(keys)), key=turn)
