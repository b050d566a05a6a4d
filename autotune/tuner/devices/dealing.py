"""What each of several devices searches: the workloads are dealt out to *lanes*, one a device.

The workloads are dealt out beforehand, the costliest first, so that a lane knows what comes next and how its time is to
be shared; one that is through takes over half of what waits in another. Lanes that search a part which their workloads
share do so together: the claims in the database keep them from measuring a candidate twice.

A lane has nothing to say in how it ends: it is killed with all that it started, and its claims are given back for it.
What it has measured is in the database. Lanes are processes of this host (:mod:`autotune.tuner.devices.dealing`) or
actors of a cluster (:mod:`autotune.tuner.cluster`); both speak as :mod:`autotune.tuner.devices.lane` has it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Protocol, Self

from autotune import task as tasks
from autotune.errors import UserError
from autotune.measure.child import Child, ChildDied, ChildSilent
from autotune.measure.pool import compile_threads, default_processes
from autotune.tuner.ahead import WORKLOADS
from autotune.tuner.context import Context
from autotune.tuner.devices.turns import Clock, Turns
from autotune.tuner.options import SearchOptions
from autotune.tuner.result import Progress, Result
from autotune.tuner.study import FAULT, recalled

_SEND_S = 180.0  # a lane reads once it has imported what it needs
_START_S = 300.0  # until a lane can be given a turn
_SILENT_S = 1800.0  # between two signs of life of a lane that has one: a candidate, a phase
_FAULTS = 2  # in a row: the device is broken, not a workload
MODULE = "autotune.tuner.devices.lane"
_POLL_S = 0.2  # between looks at whether the user interrupts

log = logging.getLogger(__name__)


class Process(Protocol):
    """Where a lane runs; :class:`autotune.measure.child.Child` is one."""

    def send(self, message: Mapping[str, Any], blob: bytes = b"", timeout: float = 60.0) -> None:
        """Hand over one frame; raises ChildDied or ChildSilent."""

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame if it has arrived; raises ChildDied once it has ended and all was handed out."""

    def interrupt(self) -> None:
        """Ask it to end what it has in hand in good order."""

    def terminate(self) -> None:
        """End it at once, waiting for nothing."""

    def kill(self) -> None:
        """End it at once. Never fails, may be called again."""


class Lane:
    """A device, the process that searches on it, and what it has to do, by the workloads' numbers.

    Args:
        device: what progress and warnings call it.
    """

    def __init__(self, device: str, turns: Turns, child: Process) -> None:
        self.device = device
        self.queue: list[int] = []
        self.turn: int | None = None
        self.clock = turns.clock()
        self.owner = ""
        """Of its claims; empty until it can be given a turn."""
        self.last: Progress | None = None
        """Where its turn is."""
        self.faults = 0
        """Workloads in a row on which the machine failed."""
        self.heard = time.monotonic()
        self.over = False
        self.child = child

    @property
    def hangs(self) -> bool:
        """Whether it should have been heard of by now."""
        return time.monotonic() - self.heard > (_SILENT_S if self.owner else _START_S)


class Dealing:
    """The lanes of a run, and what each has to do. A context manager: at its end none is left.

    Args:
        lanes: those that there are so far.
        todo: numbers of the workloads that are searched, in the order of their turns.
    """

    def __init__(self, context: Context, turns: Turns, lanes: Sequence[Lane], todo: Sequence[int]) -> None:
        self._context, self._turns = context, turns
        self._clock = turns.clock()
        self._begun = self._stopped = False
        self._tried: set[int] = set()
        """Turns that a machine has failed on."""
        self._why = ""
        self._lanes = list(lanes)
        for i in todo:
            least = min(self._lanes, key=self._weight)
            least.queue.append(i)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            if not lane.over:
                lane.child.terminate()
        for lane in self._lanes:
            self._end(lane)

    @property
    def _late(self) -> bool:
        """Whether no workload is begun any more."""
        return self._clock.up and self._begun and not self._turns.options.every

    def _alive(self) -> list[Lane]:
        return [lane for lane in self._lanes if not lane.over]

    def _left(self) -> list[int]:
        return sorted(i for lane in self._lanes for i in lane.queue)

    def _weight(self, lane: Lane) -> float:
        return sum(self._turns.shares[i] for i in lane.queue)

    def _hear(self, lane: Lane) -> Iterator[Result]:
        """Heed what a lane has said since."""
        while not lane.over:
            try:
                frame = lane.child.poll()
            except (ChildDied, ValueError) as why:
                yield from self._lose(lane, why)
                return
            if frame is None:
                return
            message, _ = frame
            lane.heard = time.monotonic()
            if "mistake" in message:
                mistake = UserError(message["mistake"])
                if self._alive() == [lane]:
                    raise mistake
                yield from self._lose(lane, mistake)  # the database failed it, or the others will tell of it too
                return
            if "progress" in message:
                lane.last = replace(Progress(**message["progress"]), device=lane.device)
                if self._context.report is not None:
                    self._context.report(lane.last)
                continue
            if "result" in message:
                result, turn = Result(**message["result"]), lane.turn
                lane.turn, lane.faults = None, lane.faults + 1 if result.stop == FAULT else 0
                lane.clock.done(result.seconds, result.search_s)
                if not (lane.faults and self._again(lane, turn)):
                    for other in self._lanes if result.fault else ():
                        other.queue.clear()  # on two devices, or on the only one: it is the host's fault
                    yield replace(result, interrupted=result.interrupted or self._stopped)
            else:
                lane.owner = message["owner"]
            yield from self._next(lane)

    def _next(self, lane: Lane) -> Iterator[Result]:
        """Give a lane its next turn, or its end; one whose device is broken leaves the rest to the others."""
        if lane.faults >= _FAULTS and len(self._alive()) > 1:
            log.warning("%s failed on %d workloads in a row: the other devices go on without it", lane.device, _FAULTS)
            self._end(lane)
            return
        if not lane.queue:
            rich = max(self._lanes, key=self._weight)
            lane.queue = rich.queue[::-2][::-1]  # every other one, so that both have costly ones and cheap ones
            rich.queue = [i for i in rich.queue if i not in lane.queue]
        if not lane.queue or self._late:
            self._end(lane)
            return
        lane.turn, lane.last, self._begun = lane.queue.pop(0), None, True
        budget = lane.clock.budget(lane.turn, self._options(lane.turn), lane.queue)
        then = lane.queue[: WORKLOADS - 1]
        yield from self._send(lane, {"turn": lane.turn, "then": then, "budget": asdict(budget)})

    def _options(self, turn: int) -> SearchOptions:
        """The options of a turn, whose lane has those of the run."""
        return self._turns.options

    def _again(self, lane: Lane, turn: int | None) -> bool:
        """Have another device search what the machine failed on, if there is one that has not failed itself."""
        others = [other for other in self._alive() if other is not lane and not other.faults]
        if turn is None or turn in self._tried or not others or self._stopped:
            return False
        self._tried.add(turn)
        min(others, key=self._weight).queue.append(turn)
        return True

    def _send(self, lane: Lane, message: dict[str, Any]) -> Iterator[Result]:
        try:
            lane.child.send(message, timeout=_SEND_S)
        except (ChildDied, ChildSilent) as why:
            yield from self._lose(lane, why)

    def _stop(self) -> None:
        """The user wants an end: every lane ends what it has in hand in good order.

        Raises:
            KeyboardInterrupt: none has anything in hand.
        """
        self._stopped = True
        for lane in self._lanes:
            lane.queue.clear()
            if lane.turn is None:
                self._end(lane)
            else:
                lane.child.interrupt()  # the lane heeds it: it has told its owner
        if not self._alive():
            raise KeyboardInterrupt

    def _lose(self, lane: Lane, why: Exception) -> Iterator[Result]:
        """A lane has died, or does not listen: what waits for it is left to the others."""
        self._why = f"the process that searched on {lane.device} ended early: {str(why) or 'it did not answer'}"
        log.warning("%s", self._why)
        turn, lane.turn = lane.turn, None
        self._end(lane)
        if turn is not None:
            yield self._failed(turn, lane)

    def _failed(self, i: int, lane: Lane | None = None) -> Result:
        """The ``i``-th workload's result where the process ended that should have searched it (``lane``'s, if it had
        begun): what an earlier search came to, or nothing.
        """
        workload, key = self._turns.workloads[i], self._context.key(self._turns.workloads[i])
        device = lane.device if lane else self._context.device
        nothing = Result(key.workload, workload.label, workload.kind, device, key.policy)
        found = next(self._turns.known(self._context, self._clock, i), nothing)
        return replace(found, begun=lane is not None, error=self._why, stop="", interrupted=self._stopped)

    def _end(self, lane: Lane) -> None:
        if not lane.over:
            lane.over = True
            lane.child.kill()
            with contextlib.suppress(UserError):  # who finds them later finds that their owner is dead
                self._context.store.release_all(lane.owner)


def shared(context: Context, turns: Turns, clock: Clock, device: str, processes: int) -> dict[str, Any]:
    """A lane's first frame; see :mod:`autotune.tuner.devices.lane`.

    Args:
        device: what its process calls it.
        processes: that compile for it.
    """
    return {
        "domains": tasks.DOMAINS,
        "url": context.store.url,
        "device": device,
        "policy": context.policy.to_json(),
        "processes": processes,
        "workloads": [workload.to_json() for workload in turns.workloads],
        "granted": [clock.granted(i) for i in range(len(turns.workloads))],
        "options": turns.options.to_json(),
        "run": context.run,
    }


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
