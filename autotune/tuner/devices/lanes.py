"""A search on several devices of one host at once: a process for each (:mod:`autotune.tuner.devices.dealing`)."""

from __future__ import annotations

import select
from collections import Counter
from collections.abc import Generator, Iterator, Sequence

from autotune.measure.child import Child, ChildSilent
from autotune.measure.pool import compile_threads, default_processes
from autotune.tuner.context import Context
from autotune.tuner.devices.dealing import Dealing, Lane, shared
from autotune.tuner.devices.turns import Turns
from autotune.tuner.outcome import recalled
from autotune.tuner.result import Result

MODULE = "autotune.tuner.devices.lane"
_POLL_S = 0.2  # between looks at whether the user interrupts


def side_by_side(context: Context, devices: Sequence[str], turns: Turns) -> Generator[Result, None, None]:
    """Search on several devices; results as they come. Where nothing is left to do, no lane is started.

    Close the iterator when done with it: that ends the lanes, and all that they started.

    Args:
        context: of the run, for one of the devices; the lanes have their own.
        devices: equal ones.

    Raises:
        UserError: as :func:`autotune.tuner.study.tune`.
        KeyboardInterrupt: the user interrupted before any workload was begun.
    """
    clock, todo = turns.clock(), dict[str, int]()
    times = Counter(workload.fingerprint for workload in turns.workloads)
    for i, workload in enumerate(turns.workloads):
        if workload.fingerprint in todo:
            continue
        budget, key = turns.expected(clock, i), context.key(workload)
        if (found := recalled(context, workload, key, budget, clock.granted(i))) is not None:
            yield found
        else:
            todo[workload.fingerprint] = i
    if todo:
        with Lanes(context, devices[: len(todo)], turns, list(todo.values())) as lanes:
            for result in lanes.results():
                yield from [result] * times[result.workload]


class Lanes(Dealing):
    """The lanes of this host's devices, a process for each.

    Args:
        todo: numbers of the workloads that are searched, in the order of their turns.
    """

    def __init__(self, context: Context, devices: Sequence[str], turns: Turns, todo: Sequence[int]) -> None:
        environment = compile_threads(len(devices))
        self._children = [Child(MODULE, environment) for _ in devices]
        lanes = [Lane(device, turns, child) for device, child in zip(devices, self._children, strict=True)]
        super().__init__(context, turns, lanes, todo)

    def results(self) -> Iterator[Result]:
        """Search; results as they come.

        Raises:
            UserError: a lane was told of a mistake of the user.
        """
        for lane in self._lanes:
            processes = default_processes(len(self._lanes))
            yield from self._send(lane, shared(self._context, self._turns, self._clock, lane.device, processes))
        while any(lane.turn is not None for lane in self._lanes) or (self._left() and self._alive()):
            if self._context.interrupt.requested and not self._stopped:
                self._stop()
            for lane in self._ready():
                yield from self._hear(lane)
            for lane in self._alive():
                if lane.hangs:
                    yield from self._lose(lane, ChildSilent("it was not heard of any more"))
                elif lane.turn is None and self._late:
                    self._end(lane)  # it was slow to start
        for i in self._left():  # the time is up, or no lane is left
            yield from self._turns.known(self._context, self._clock, i) if self._late else [self._failed(i)]

    def _ready(self) -> list[Lane]:
        """The lanes that have said something, after a moment at most."""
        alive = {child: lane for child, lane in zip(self._children, self._lanes, strict=True) if not lane.over}
        return [alive[child] for child in select.select(list(alive), [], [], _POLL_S)[0]]
