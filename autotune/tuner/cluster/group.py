"""Search on one kind of device in a cluster, with lanes that join and leave, and a queue of workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autotune.tuner.cluster.engine import Node, Remote
from autotune.tuner.context import Context
from autotune.tuner.dealing import Dealing, Lane, log
from autotune.tuner.options import SearchOptions
from autotune.tuner.result import Result
from autotune.tuner.turns import Turns

_LOSSES = 3
"""Lost lanes after which the workload counts as the cause."""


class NodeLane(Lane):
    """A lane on a node."""

    def __init__(self, node: Node, turns: Turns, remote: Remote) -> None:
        super().__init__(node.host, turns, remote)
        self.node, self.remote = node, remote


class Group(Dealing):
    """The search on one kind of device.

    A lost lane loses only the candidates in progress. Its workload continues on another lane with the stored
    measurements.

    Args:
        label: of the device.
        first: the lane that reported the device.
        todo: numbers of workloads, in order.
        lost: called with each lost lane.
    """

    def __init__(
        self,
        label: str,
        context: Context,
        turns: Turns,
        first: NodeLane,
        todo: Sequence[int],
        lost: Callable[[Lane], None],
    ) -> None:
        super().__init__(context, turns, [first], todo)
        first.clock = self._clock
        self.label, self.nodes = label, {first.node.id: first.node}
        self._lost = lost
        self._losses: Counter[int] = Counter()
        self._measured: Counter[int] = Counter()
        """Candidates measured by lost lanes, by workload."""

    @property
    def device(self) -> str:
        """Fingerprint of the device."""
        return next(iter(self._context.stored_keys.values()))[0]

    @property
    def busy(self) -> bool:
        return any(lane.turn is not None for lane in self._lanes)

    @property
    def alive(self) -> bool:
        return bool(self._alive())

    @property
    def wanted(self) -> int:
        """Number of lanes that could be added: waiting workloads that will still be begun."""
        return 0 if self._late or self._stopped else len(self._left())

    def join(self, lane: NodeLane) -> Iterator[Result]:
        """Add a lane of this kind, if it is new, and give it a turn."""
        if lane not in self._lanes:
            lane.clock = self._clock.beside()
            self._lanes.append(lane)
            self.nodes[lane.node.id] = lane.node
        yield from self._labelled(self._next(lane))

    def hear(self, lane: Lane) -> Iterator[Result]:
        """Process a lane's new messages."""
        yield from self._labelled(self._hear(lane))

    def give_up(self, lane: Lane, why: Exception) -> Iterator[Result]:
        """Drop a lane that has been silent for too long."""
        yield from self._labelled(self._lose(lane, why))

    def rest(self) -> Iterator[Result]:
        """Yield results for the workloads not begun before the time was up or the last lane ended."""
        for i in self._left():
            yield from self._labelled(
                self._turns.known(self._context, self._clock, i) if self._late else iter([self._failed(i)])
            )

    def _labelled(self, results: Iterator[Result]) -> Iterator[Result]:
        return (replace(result, device=self.label) for result in results)

    def _options(self, turn: int) -> SearchOptions:
        options = self._turns.options
        left = None if options.trials is None else max(1, options.trials - self._measured[turn])
        return replace(options, trials=left)

    def _again(self, lane: Lane, turn: int | None) -> bool:
        """Retry on another device as on one host; if every other one has faults, this lane tries again."""
        if super()._again(lane, turn):
            return True
        if turn is None or turn in self._tried or self._stopped:
            return False
        self._tried.add(turn)
        lane.queue.append(turn)
        return True

    def _lose(self, lane: Lane, why: Exception) -> Iterator[Result]:
        self._why = f"the search on {lane.device} ended early: {str(why) or 'it did not answer'}"
        turn, lane.turn = lane.turn, None
        self._lost(lane)
        self._end(lane)
        if turn is None:
            log.warning("%s", self._why)
            return
        self._losses[turn] += 1
        self._measured[turn] += lane.last.measured if lane.last else 0
        if self._losses[turn] >= _LOSSES or self._stopped:
            log.warning("%s", self._why)
            yield self._failed(turn, lane)
            return
        lane.queue.insert(0, turn)
        label = self._turns.workloads[turn].label
        log.warning("%s; %s continues on another device with all measurements", self._why, label)
