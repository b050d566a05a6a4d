"""A run's workloads and what each may spend; and how one device gets through them, one after the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from autotune.tuner.ahead import Ahead
from autotune.tuner.budget import Budget, Clock
from autotune.tuner.context import Context
from autotune.tuner.outcome import known
from autotune.tuner.result import Result
from autotune.tuner.session import Lease
from autotune.tuner.study import tune
from autotune.workload import Workload


@dataclass(frozen=True)
class Turns:
    """A run's workloads in the order of their turns.

    Attributes:
        shares: of each, of the run's time.
        trials: candidates of each; ``timeout``, seconds of all; ``patience`` of each: see :class:`Budget`.
        every: whether all are begun, however late.
        devices: on which they are searched.
    """

    workloads: Sequence[Workload]
    shares: Sequence[float]
    trials: int | None
    timeout: float | None
    patience: int | None
    every: bool = False
    devices: int = 1

    def clock(self) -> Clock:
        """A clock that starts now; each device has one."""
        return Clock(self.timeout, self.shares, self.devices)

    def expected(self, clock: Clock, i: int) -> Budget:
        """What the ``i``-th workload may spend, as far as that is known before its turn."""
        return Budget(self.trials, clock.granted(i), self.patience)

    def known(self, context: Context, clock: Clock, i: int) -> Iterator[Result]:
        """What an earlier search came to of the ``i``-th workload, which is not begun any more; nothing where there
        was none."""
        found = known(context, self.workloads[i], self.expected(clock, i), clock.granted(i))
        if found is not None:
            yield found


def alone(context: Context, turns: Turns) -> Generator[Result, None, None]:
    """Search on the context's device; results as they come.

    Raises:
        UserError: as :func:`autotune.tuner.study.tune`.
    """
    clock, begun = turns.clock(), False
    with (
        Lease(context.store, context.owner),
        Ahead(context, turns.workloads, lambda i: turns.expected(clock, i)) as ahead,
    ):
        for i, workload in enumerate(turns.workloads):
            if clock.up and begun and not turns.every:  # each run begins one at least
                yield from turns.known(context, clock, i)
                continue
            ahead.reach(i)
            result = tune(context, workload, clock.budget(i, turns.trials, turns.patience), clock.granted(i))
            clock.done(result.seconds, result.search_s)
            begun = begun or result.seconds > 0
            yield result
            if result.interrupted or result.fault:
                return
