"""Assignment of workloads to several devices, each of which has a *lane*.

The workloads are assigned beforehand, the costliest first, so that a lane can prepare its next workload and divide its
time. An idle lane steals half of another's queue. Lanes whose workloads share a part search it together: claims in the
database prevent a candidate from being measured twice.

Lanes are always killed from outside, with all processes that they started, and the parent releases their claims. Their
measurements are in the database. Lanes are processes of this host (:mod:`autotune.tuner.dealing`) or actors of
a cluster (:mod:`autotune.tuner.cluster`). Both use the protocol of :mod:`autotune.tuner.lane`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, Self

from autotune import task as tasks
from autotune.errors import UserError
from autotune.measure.child import Child, ChildDied, ChildSilent, ready
from autotune.measure.pool import compile_threads, default_processes
from autotune.tuner.context import Context
from autotune.tuner.options import SearchOptions
from autotune.tuner.prefetch import WORKLOADS
from autotune.tuner.result import Progress, Result
from autotune.tuner.study import FAULT, recalled
from autotune.tuner.turns import Clock, Turns

_SEND_S = 180.0  # a lane reads once it has imported what it needs
_START_S = 300.0  # until a lane can be given a turn
_SILENT_S = 1800.0  # between two messages of a lane that has a turn: a candidate, a phase
_FAULTS = 2  # in a row: the device is broken, not a workload
MODULE = "autotune.tuner.lane"
_POLL_S = 0.2  # between checks for an interrupt

log = logging.getLogger(__name__)


class Process(Protocol):
    """Process or actor that runs a lane, such as :class:`autotune.measure.child.Child`."""

    def send(self, message: Mapping[str, Any], blob: bytes = b"", timeout: float = 60.0) -> None:
        """Send one frame; raises ChildDied or ChildSilent."""

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame if it has arrived; raises ChildDied after the process's last frame."""

    def interrupt(self) -> None:
        """Request an orderly end of the current turn."""

    def terminate(self) -> None:
        """End the process at once, without waiting."""

    def kill(self) -> None:
        """End the process at once. Never fails, and may be called again."""


class Lane:
    """A device, the process that searches on it, and its queue of workload numbers.

    Args:
        device: its name in progress output and warnings.
    """

    def __init__(self, device: str, turns: Turns, child: Process) -> None:
        self.device = device
        self.queue: list[int] = []
        self.turn: int | None = None
        self.clock = turns.clock()
        self.owner = ""
        """Owner of its claims; empty until the lane is ready for a turn."""
        self.last: Progress | None = None
        """Latest progress of its turn."""
        self.faults = 0
        """Workloads in a row on which the machine failed."""
        self.heard = time.monotonic()
        self.over = False
        self.child = child

    @property
    def hangs(self) -> bool:
        """True if the time limit for its next message has passed."""
        return time.monotonic() - self.heard > (_SILENT_S if self.owner else _START_S)


class Dealing:
    """The lanes of a run and their queues. A context manager that ends all lanes on exit.

    Args:
        lanes: the initial lanes.
        todo: numbers of the workloads to search, in the order of their turns.
    """

    def __init__(self, context: Context, turns: Turns, lanes: Sequence[Lane], todo: Sequence[int]) -> None:
        self._context, self._turns = context, turns
        self._clock = turns.clock()
        self._begun = self._stopped = False
        self._tried: set[int] = set()
        """Turns that have failed on a device."""
        self._why = ""
        self._lanes = list(lanes)
        for i in todo:
            least = min(self._lanes, key=self._weight)
            least.queue.append(i)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for lane in self._lanes:
            if not lane.over:
                lane.child.terminate()
        for lane in self._lanes:
            self._end(lane)

    @property
    def _late(self) -> bool:
        """True if no further workload is begun."""
        return self._clock.up and self._begun and not self._turns.options.every

    def _alive(self) -> list[Lane]:
        return [lane for lane in self._lanes if not lane.over]

    def _left(self) -> list[int]:
        return sorted(i for lane in self._lanes for i in lane.queue)

    def _weight(self, lane: Lane) -> float:
        return sum(self._turns.shares[i] for i in lane.queue)

    def _hear(self, lane: Lane) -> Iterator[Result]:
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
                yield from self._lose(lane, mistake)  # its database failed, or the other lanes report the mistake too
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
                        other.queue.clear()  # failed on two devices, or on the only one: a host fault
                    yield replace(result, interrupted=result.interrupted or self._stopped)
            else:
                lane.owner = message["owner"]
            yield from self._next(lane)

    def _next(self, lane: Lane) -> Iterator[Result]:
        """Give a lane its next turn, or end it. A lane with a broken device leaves its queue to the others."""
        if lane.faults >= _FAULTS and len(self._alive()) > 1:
            log.warning(
                "%s failed on %d workloads in a row: the search continues on the other devices", lane.device, _FAULTS
            )
            self._end(lane)
            return
        if not lane.queue:
            rich = max(self._lanes, key=self._weight)
            lane.queue = rich.queue[::-2][::-1]  # every other one: both keep costly and cheap ones
            rich.queue = [i for i in rich.queue if i not in lane.queue]
        if not lane.queue or self._late:
            self._end(lane)
            return
        lane.turn, lane.last, self._begun = lane.queue.pop(0), None, True
        budget = lane.clock.budget(lane.turn, self._options(lane.turn), lane.queue)
        then = lane.queue[: WORKLOADS - 1]
        yield from self._send(lane, {"turn": lane.turn, "then": then, "budget": asdict(budget)})

    def _options(self, turn: int) -> SearchOptions:
        return self._turns.options

    def _again(self, lane: Lane, turn: int | None) -> bool:
        """Queue a failed turn on another device that has no faults; return False if there is no retry."""
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
        """Handle a user interrupt: every lane ends its current turn in an orderly way.

        Raises:
            KeyboardInterrupt: no lane has a turn.
        """
        self._stopped = True
        for lane in self._lanes:
            lane.queue.clear()
            if lane.turn is None:
                self._end(lane)
            else:
                lane.child.interrupt()  # a lane that has sent its owner handles SIGINT
        if not self._alive():
            raise KeyboardInterrupt

    def _lose(self, lane: Lane, why: Exception) -> Iterator[Result]:
        """End a lane that has died or does not respond; the other lanes take over its queue."""
        self._why = f"the process that searched on {lane.device} ended early: {str(why) or 'it did not answer'}"
        log.warning("%s", self._why)
        turn, lane.turn = lane.turn, None
        self._end(lane)
        if turn is not None:
            yield self._failed(turn, lane)

    def _failed(self, i: int, lane: Lane | None = None) -> Result:
        """Return the ``i``-th workload's result after its process is lost: an earlier search's, or an empty one.

        Args:
            lane: the lost lane, if it had begun the workload.
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
            with contextlib.suppress(UserError):  # a later search detects the dead owner
                self._context.store.release_all(lane.owner)


def shared(context: Context, turns: Turns, clock: Clock, device: str, processes: int) -> dict[str, Any]:
    """Return a lane's first frame; see :mod:`autotune.tuner.lane`.

    Args:
        device: its name in the lane's process.
        processes: number of compile processes.
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
    """Search on several devices; yield results as they arrive. If nothing is left to do, no lane is started.

    Close the iterator when done with it: that ends the lanes and their processes.

    Args:
        context: of the run, for one of the devices; each lane has its own.
        devices: devices of one kind.

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
    """The lanes of this host's devices, one process for each.

    Args:
        todo: numbers of the workloads to search, in the order of their turns.
    """

    def __init__(self, context: Context, devices: Sequence[str], turns: Turns, todo: Sequence[int]) -> None:
        environment = compile_threads(len(devices))
        self._children = [Child(MODULE, environment) for _ in devices]
        lanes = [Lane(device, turns, child) for device, child in zip(devices, self._children, strict=True)]
        super().__init__(context, turns, lanes, todo)

    def results(self) -> Iterator[Result]:
        """Search; yield results as they arrive.

        Raises:
            UserError: a lane reported a user error.
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
        """Return the lanes with new messages, after :data:`_POLL_S` at most."""
        alive = {child: lane for child, lane in zip(self._children, self._lanes, strict=True) if not lane.over}
        return [alive[child] for child in ready(alive, _POLL_S)]
