"""Search on a cluster: nodes with devices, the lanes on them, and their results."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune import task as tasks
from autotune.domain import domain_of
from autotune.errors import UserError
from autotune.measure.child import ChildDied, ChildSilent
from autotune.store.store import Store
from autotune.tuner.cluster.engine import Engine, Node
from autotune.tuner.cluster.group import Group, NodeLane
from autotune.tuner.context import Context
from autotune.tuner.dealing import Lane, shared
from autotune.tuner.result import Result
from autotune.tuner.turns import Turns, order
from autotune.workload import digest

_POLL_S = 0.2  # between checks for an interrupt
_LOOK_S = 2.0  # between queries of the nodes
_TRIES = 3  # lanes lost in a row without a result, after which a node is excluded
_AWAIT_S = 60.0  # for a new node, after all nodes with the device have left
_WARN_S = 15.0  # of waiting before a warning
_MOST, _LEAST = 16, 2  # concurrent builds of a lane

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """A kind of device found during a search.

    Attributes:
        device: its fingerprint; for workloads of several devices, the fingerprint of these together.
    """

    label: str
    device: str
    nodes: Sequence[Node]


class Cluster:
    """The devices of a cluster that a command searches on.

    Args:
        engine: the connection; its owner closes it.
        device: "auto", "cpu" or "cuda": the device of each node to measure on.

    Raises:
        UserError: no node has such a device, or ``device`` names a single device of a host.
    """

    def __init__(self, engine: Engine, device: str) -> None:
        self._engine = engine
        name, nodes = device.strip().lower(), engine.nodes()
        if name not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {device}: with --ray, use auto, cpu or cuda (all GPUs of the cluster)")
        gpus = any(node.gpus for node in nodes)
        if name == "cuda" and not gpus:
            raise UserError(
                f"no node of the cluster at {engine.address} has a GPU: start one with `ray start --address"
                f" {engine.address}` on a GPU host, or give --device cpu"
            )
        self.device = "cpu" if name == "cpu" or not gpus else "cuda:0"
        """Name of each lane's device, or of its first device, within the lane."""
        if not any(self._slots(node, 1) for node in nodes):
            raise UserError(
                f"no node of the cluster at {engine.address} gives Ray a processor: start nodes with --num-cpus 1"
            )
        self.kinds: list[Kind] = []
        """Kinds of devices found by the last search."""

    @property
    def address(self) -> str:
        return self._engine.address

    def nodes(self) -> list[Node]:
        """Return the nodes that have the device."""
        return [node for node in self._engine.nodes() if self._slots(node, 1)]

    def _slots(self, node: Node, devices: int) -> int:
        """Return the number of lanes with ``devices`` devices each that fit on a node; one lane per node on CPUs."""
        return int(node.cpus >= 1) if self.device == "cpu" else node.gpus // devices

    def most_devices(self) -> int:
        """Return the largest number of GPUs of one node; 0 on CPUs."""
        return 0 if self.device == "cpu" else max((node.gpus for node in self._engine.nodes()), default=0)

    def call(self, function: Any, args: Any, store: Store, *more: Any, kind: Kind | None = None, gpus: int = 1) -> Any:
        """Call ``function(args, device, store, *more)`` on a node that has the device, or on one of ``kind``.

        Its stderr output is printed here. The function must be importable from a module, and its arguments must be
        serializable.

        Raises:
            UserError: the function raised it on the node, or no node of ``kind`` is left.
        """
        check_reachable(store, self._engine.nodes(), self._engine.host)
        alive = {node.id for node in self._engine.nodes()}
        nodes = [node for node in kind.nodes if node.id in alive] if kind else []
        if kind and not nodes:
            raise UserError(f"no node with {kind.label} is left in the cluster")
        gpus = 0 if self.device == "cpu" else gpus
        return self._engine.call(function, args, self.device, store.url, more, nodes, gpus)

    def search(self, context: Context, turns: Turns) -> Generator[Result, None, None]:
        """Search on every device of the cluster, including nodes that join later; yield results as they arrive.

        Each kind of device searches all workloads. Workloads are searched in groups by their number of devices, in
        ascending order.

        Raises:
            UserError: as :func:`autotune.tuner.study.tune`; the database is a file and a node is another host.
            KeyboardInterrupt: the user interrupted before any workload was begun.
        """
        check_reachable(context.store, self._engine.nodes(), self._engine.host)
        counts = [domain_of(workload.kind).devices(workload) for workload in turns.workloads]
        self.kinds = []
        for count in sorted(set(counts)):
            chosen = [i for i, c in enumerate(counts) if c == count]
            part, options = turns.chosen(chosen), turns.options
            if options.timeout is not None:
                seconds = options.timeout * sum(part.shares) / sum(turns.shares)
                part = replace(part, options=replace(options, timeout=seconds))
            with contextlib.closing(Run(self, self._engine, context, part, count)) as run:
                try:
                    yield from run.results()
                finally:
                    self.kinds += run.kinds()
            if context.interrupt.requested:
                return


def check_reachable(store: Store, nodes: Sequence[Node], host: str) -> None:
    """Check that nodes can reach the database.

    Raises:
        UserError: the database is a file, and a node is another host.
    """
    other = next((node for node in nodes if node.address != host), None)
    if store.url.startswith("sqlite") and other is not None:
        raise UserError(
            f"--db {store.name} is a file of this host, and {other.host} is another host: a search on several hosts"
            " needs PostgreSQL (--db postgresql://USER@HOST/NAME)"
        )


class Run:
    """Search of workloads with equal numbers of devices: starts lanes on free nodes and processes their messages."""

    def __init__(self, cluster: Cluster, engine: Engine, context: Context, turns: Turns, devices: int) -> None:
        self._cluster, self._engine, self._context, self._devices = cluster, engine, context, devices
        slots = sum(cluster._slots(node, devices) for node in engine.nodes())
        self._turns = replace(turns, devices=max(1, min(slots, len(turns.workloads))))
        self._times = Counter(workload.fingerprint for workload in turns.workloads)
        numbers = {workload.fingerprint: i for i, workload in reversed(list(enumerate(turns.workloads)))}
        self._todo = sorted(numbers.values())
        self._space = Path(context.options.space_file).read_text() if context.options.space_file else None
        self._groups: dict[str, Group] = {}
        self._lanes: defaultdict[str, list[NodeLane]] = defaultdict(list)
        """Lanes by node. ``_kind_of`` has an entry for a node once one of its lanes has begun."""
        self._kind_of: dict[str, str] = {}
        self._faults: Counter[str] = Counter()
        self._stopped = False
        self._why = ""
        self._common: Any = None
        self._looked = self._quiet = -1e9
        self._heard_of_any = time.monotonic()
        self._said = False

    def kinds(self) -> list[Kind]:
        """Return the kinds of devices found so far."""
        return [Kind(group.label, group.device, list(group.nodes.values())) for group in self._groups.values()]

    def close(self) -> None:
        """End all lanes."""
        lanes = [lane for own in self._lanes.values() for lane in own if not lane.over]
        for lane in lanes:
            lane.child.terminate()
        for lane in lanes:
            self._end(lane)

    def results(self) -> Iterator[Result]:
        """Search; yield results as they arrive."""
        for result in self._results():
            yield from [result] * self._times[result.workload]

    def _results(self) -> Iterator[Result]:
        while not self._over():
            if self._context.interrupt.requested and not self._stopped:
                self._stop()
            self._recruit()
            alive = {lane.remote: lane for lane in self._alive()}
            for remote in self._engine.ready(list(alive), _POLL_S):
                if not alive[remote].over:
                    yield from self._hear(alive[remote])
            for lane in self._alive():
                if not lane.owner and not lane.remote.placed:
                    lane.heard = time.monotonic()
                elif lane.hangs:
                    yield from self._lose(lane, ChildSilent("it was not heard of any more"))
            self._warn_of_waiting()
        for group in self._groups.values():
            yield from group.rest()

    def _alive(self) -> list[NodeLane]:
        return [lane for own in self._lanes.values() for lane in own if not lane.over]

    def _over(self) -> bool:
        """True if no lane, and no node that could help, is left to wait for.

        Raises:
            UserError: no node could begin.
        """
        if self._stopped:
            return not any(group.busy for group in self._groups.values())
        starting = any(not lane.owner and lane.remote.placed for lane in self._alive())
        if starting or any(group.busy for group in self._groups.values()):
            self._heard_of_any = time.monotonic()
            return False
        if not self._groups:
            if self._why and not self._alive() and not self._open_nodes():
                raise UserError(self._why)
            return False
        wanting = {kind for kind, group in self._groups.items() if group.wanted}
        if any(self._kind_of.get(node.id, kind) == kind for node in self._open_nodes() for kind in wanting):
            self._heard_of_any = time.monotonic()
        return not wanting or time.monotonic() - self._heard_of_any > _AWAIT_S

    def _open_nodes(self) -> list[Node]:
        fit = [node for node in self._engine.nodes() if self._cluster._slots(node, self._devices)]
        return [node for node in fit if self._faults[node.id] < _TRIES]

    def _recruit(self) -> None:
        if self._stopped or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        nodes = self._open_nodes()
        for node in list(nodes):
            try:
                check_reachable(self._context.store, [node], self._engine.host)
            except UserError as error:  # the node joined later
                self._leave_out(node, str(error))
                nodes.remove(node)
        for node in nodes:
            self._lanes[node.id] = own = [lane for lane in self._lanes[node.id] if not lane.over]
            free = self._cluster._slots(node, self._devices) - len(own)
            for _ in range(min(free, self._wanted(node, len(nodes)))):
                self._start(node, nodes)

    def _wanted(self, node: Node, nodes: int) -> int:
        """Return the number of lanes to add on a node. One lane is started on each new node to identify its device."""
        kind = self._kind_of.get(node.id)
        if kind is None:
            return max(1, -(-len(self._todo) // nodes)) - len(self._lanes[node.id])
        same = [lane for id, own in self._lanes.items() if self._kind_of.get(id) == kind for lane in own]
        return self._groups[kind].wanted - sum(not lane.over and not lane.owner for lane in same)

    def _start(self, node: Node, nodes: Sequence[Node]) -> None:
        gpus = 0 if self._cluster.device == "cpu" else self._devices
        slots = max(1, self._cluster._slots(node, self._devices))
        cpus = 1.0 if not gpus or node.cpus >= 2 * slots else 0.0  # compile processes use the rest
        lane = NodeLane(node, self._turns, self._engine.start(node, gpus, cpus))
        taken = [other.device for other in self._alive()]
        lane.device = next(name for n in itertools.count() if (name := f"{node.host}/{n}") not in taken)
        lane.remote.begin(*self._first(nodes))
        self._lanes[node.id].append(lane)

    def _first(self, nodes: Sequence[Node]) -> tuple[dict[str, Any], Any]:
        """Return a lane's first frame: its own part, which includes all secrets, and the part shared by all lanes."""
        message = shared(self._context, self._turns, self._turns.clock(), self._cluster.device, self._processes(nodes))
        kinds = {workload.kind for workload in self._turns.workloads}
        message["domains"] = {**message["domains"], **{kind: tasks.module_of(kind) for kind in kinds}}
        large = {name: message.pop(name) for name in ("workloads", "granted", "options")}
        if self._common is None:
            self._common = self._engine.share(large)
        return {**message, "version": __version__, "space": self._space}, self._common

    def _processes(self, nodes: Sequence[Node]) -> int:
        """Return the number of concurrent builds of a lane: its share of the processors."""
        slots = sum(self._cluster._slots(node, self._devices) for node in nodes)
        return max(_LEAST, min(_MOST, int(sum(node.cpus for node in nodes) / max(1, slots))))

    def _hear(self, lane: NodeLane) -> Iterator[Result]:
        if lane.owner:
            for result in self._groups[self._kind_of[lane.node.id]].hear(lane):
                self._faults[lane.node.id] = 0
                yield result
            return
        try:
            frame = lane.child.poll()
        except ChildDied as why:
            yield from self._lose(lane, why)
            return
        if frame is None:
            return
        message, _ = frame
        if "mistake" in message:
            self._end(lane)
            self._leave_out(lane.node, message["mistake"])
        elif "owner" in message:
            yield from self._begun(lane, message)

    def _begun(self, lane: NodeLane, message: dict[str, Any]) -> Iterator[Result]:
        lane.owner, lane.heard = message["owner"], time.monotonic()
        stored = {workload: (device, software) for workload, (device, software) in message["places"].items()}
        kind = digest({"places": {workload: list(place) for workload, place in stored.items()}})
        self._kind_of[lane.node.id] = kind
        if kind not in self._groups:
            label = message["label"]
            if any(group.label == label for group in self._groups.values()):
                label = f"{label}, {message['software']}"
            if self._groups:
                log.warning("%s has another device or software, %s: it gets a separate search", lane.node.host, label)
            context = replace(self._context, stored_keys=stored)
            inorder = [i for i in order(context, self._turns) if i in self._todo]
            self._groups[kind] = Group(label, context, self._turns, lane, inorder, self._lost)
        self._looked = -1e9  # the node may have room for more lanes
        yield from self._groups[kind].join(lane)

    def _lose(self, lane: NodeLane, why: Exception) -> Iterator[Result]:
        if lane.owner:
            yield from self._groups[self._kind_of[lane.node.id]].give_up(lane, why)
            return
        self._end(lane)
        self._lost(lane)
        self._why = f"the search on {lane.node.host} did not begin: {why}"
        log.warning("%s", self._why)

    def _lost(self, lane: Lane) -> None:
        assert isinstance(lane, NodeLane)
        self._faults[lane.node.id] += 1
        if self._faults[lane.node.id] == _TRIES:
            log.warning("%s lost %d searches in a row: the search continues on the other nodes", lane.node.host, _TRIES)

    def _leave_out(self, node: Node, why: str) -> None:
        """Exclude a node for an error that a retry would not fix."""
        said = f"{node.host} is not used: {why}"
        if self._faults[node.id] < _TRIES and said != self._why:
            log.warning("%s", said)
        self._faults[node.id], self._why = _TRIES, said

    def _end(self, lane: NodeLane) -> None:
        lane.over = True
        lane.child.kill()
        if lane.owner:
            with contextlib.suppress(UserError):
                self._context.store.release_all(lane.owner)

    def _stop(self) -> None:
        """Handle a user interrupt.

        Raises:
            KeyboardInterrupt: no lane has a turn.
        """
        self._stopped = True
        for lane in self._alive():
            if not lane.owner:
                self._end(lane)
        for group in self._groups.values():
            with contextlib.suppress(KeyboardInterrupt):
                group._stop()
        if not any(group.busy for group in self._groups.values()):
            raise KeyboardInterrupt

    def _warn_of_waiting(self) -> None:
        """Warn once if every lane is waiting for a device."""
        waits = [lane for lane in self._alive() if not lane.remote.placed]
        if self._said or not waits or len(waits) < len(self._alive()):
            self._quiet = time.monotonic()
        elif time.monotonic() - self._quiet > _WARN_S:
            self._said = True
            log.warning("other programs use all devices of the cluster: waiting for one (stop with Ctrl-C)")
