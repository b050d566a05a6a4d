"""Ray interface: the cluster's nodes, actors and tasks. No other module of autotune imports Ray."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune import task as tasks
from autotune.errors import UserError, first_line, safe_line
from autotune.measure.child import ChildDied
from autotune.measure.outcome import Blame
from autotune.measure.pool import Built
from autotune.task import Config
from autotune.tuner.cluster import actor
from autotune.workload import Workload

_CONNECT_S = 5.0
_HEALTH_S = 45.0
"""Time limit in seconds for a cluster's answer; Ray's own attempts take minutes."""
_RECEIVE_S = 10.0
_ASK_S = 1.0  # between queries for a waiting lane's resources
_QUEUE_S = 120.0
"""Seconds that a build may wait for a processor, in addition to its own limit. After that, its lane builds it."""
_WARN_S = 60.0
_RETRIES = 2
"""Retries of a build or a call after the death of its node."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A node of the cluster, with all its Ray resources, used or free."""

    id: str
    host: str
    address: str
    cpus: float
    gpus: int


class Engine:
    """A connection to a cluster; close it at the end.

    Raises:
        UserError: Ray is not installed, or no cluster answers at the address.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError:
            install = "pip install 'autotune-torch[ray]'"
            raise UserError(f"--ray needs Ray, which is not installed: run `{install}`") from None
        self._ray: Any = ray
        self._own = not ray.is_initialized()
        if self._own:
            _check(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # a wrong token, another version of Ray or Python
                raise UserError(f"--ray {address}: {safe_line(first_line(error), 300)}") from None
        self.address = address
        self._search = secrets.token_hex(16)

    def close(self) -> None:
        """Disconnect from the cluster; remaining actors end."""
        if self._own:
            self._ray.shutdown()
        actor.drop_shared(self._search)

    @property
    def host(self) -> str:
        """The address of this process's node."""
        return str(self._ray.util.get_node_ip_address())

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        found = []
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
                found.append(Node(node["NodeID"], host, address, has.get("CPU", 0.0), int(has.get("GPU", 0))))
        return found

    def share(self, value: Mapping[str, Any]) -> Any:
        """Store a value once for many lanes; for :meth:`Remote.begin`. Ray may write the value to a disk."""
        return self._ray.put(dict(value))

    def start(self, node: Node, gpus: int, cpus: float) -> Remote:
        """Start a lane's actor on a node, once its ``gpus`` GPUs and ``cpus`` processors are free together."""
        return Remote(self._ray, node, gpus, cpus, self._search)

    def ready(self, remotes: Sequence[Remote], wait_s: float) -> list[Remote]:
        """Return the actors that have frames or have died; waits ``wait_s`` seconds at most for the first one."""
        pending = {remote.pending: remote for remote in remotes if remote.pending is not None}
        if any(remote.waiting for remote in remotes):
            wait_s = 0.0
        elif not pending:
            time.sleep(wait_s)
        if pending:
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=wait_s)
            if done:
                done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
            for ref in done:
                pending[ref].take()
        return [remote for remote in remotes if remote.waiting]

    def call(
        self, function: Any, args: Any, device: str, url: str, more: tuple[Any, ...], nodes: Sequence[Node], gpus: int
    ) -> Any:
        """Call ``function(args, device, store, *more)`` on the first of ``nodes``, or on any; print its stderr here.

        Raises:
            UserError: the function raised it, or the node cannot import the function.
        """
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(nodes[0].id, soft=False) if nodes else "DEFAULT"
        once = ray.remote(max_calls=1)(actor.call)  # its process then exits and frees the GPU memory
        remote = once.options(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES, scheduling_strategy=where)
        ref = remote.remote(function, args, device, url, more, tasks.domains())
        try:
            answer = self._answer(ref, gpus)
        except ray.exceptions.RayError as error:
            raise UserError(f"--ray {self.address}: {why(error)}") from None
        except BaseException:
            with contextlib.suppress(Exception):
                ray.cancel(ref, force=True)
            raise
        sys.stderr.write(answer["said"])
        if "mistake" in answer:
            raise UserError(answer["mistake"])
        return answer["value"]

    def _answer(self, ref: Any, gpus: int) -> dict[str, Any]:
        """Return the answer of a call that needs ``gpus`` GPUs; warns once after :data:`_WARN_S` seconds.

        Raises:
            UserError: no node has that many GPUs any more, so the call would wait forever.
        """
        begin, said = time.monotonic(), False
        while not self._ray.wait([ref], timeout=1.0)[0]:
            if not any(node.gpus >= gpus for node in self.nodes()):
                raise UserError(f"no node of the cluster at {self.address} has {gpus} GPUs any more")
            if not said and time.monotonic() - begin > _WARN_S:
                said = True
                log.warning("work that needs a device, such as capture, runs on the cluster, or waits for a node")
        answer: dict[str, Any] = self._ray.get(ref)
        return answer


class Remote:
    """A lane's actor, with the interface of :class:`autotune.tuner.dealing.Process`.

    A placement group of one bundle reserves its resources. A bundle is on one node, so a lane with several GPUs gets
    all of them on one node or waits.
    """

    def __init__(self, ray: Any, node: Node, gpus: int, cpus: float, search: str) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self.node = ray, node
        bundle = {name: amount for name, amount in (("GPU", gpus), ("CPU", cpus)) if amount}
        here = [{"ray.io/node-id": node.id}]
        self._group = placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=here)
        within = PlacementGroupSchedulingStrategy(self._group, placement_group_capture_child_tasks=False)
        made = ray.remote(actor.Actor).options(
            num_gpus=gpus, num_cpus=cpus, max_concurrency=4, max_restarts=0, scheduling_strategy=within
        )
        self._actor = made.remote(functools.partial(remote_builds, search=search))
        self._frames: deque[dict[str, Any]] = deque()
        self._dead = ""
        self._placed, self._asked = False, -1e9
        self.pending: Any = self._actor.receive.remote(_RECEIVE_S)

    @property
    def placed(self) -> bool:
        """True if its resources are reserved, so that it starts."""
        if not self._placed and time.monotonic() - self._asked > _ASK_S:
            from ray.util.placement_group import placement_group_table

            self._asked = time.monotonic()
            self._placed = placement_group_table(self._group).get("state") == "CREATED"
        return self._placed

    @property
    def waiting(self) -> bool:
        """True if :meth:`poll` would return a frame or raise."""
        return bool(self._frames or self._dead)

    def take(self) -> None:
        """Store the frames of the finished ``receive`` call, and start the next call."""
        try:
            self._frames.extend(self._ray.get(self.pending))
        except self._ray.exceptions.RayError as error:
            self._dead, self.pending = why(error), None
        else:
            self.pending = self._actor.receive.remote(_RECEIVE_S)

    def begin(self, message: Mapping[str, Any], common: Any) -> None:
        """Send the first frame; ``common`` is a result of :meth:`Engine.share`."""
        self._actor.send.remote(dict(message), common)

    def send(self, message: Mapping[str, Any], blob: bytes = b"", timeout: float = 60.0) -> None:
        self._actor.send.remote(dict(message))

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        if self._frames:
            frame = self._frames.popleft()
            if "died" in frame:
                raise ChildDied(frame["died"], Blame.MACHINE)
            return frame, b""
        if self._dead:
            raise ChildDied(self._dead, Blame.LACK)
        return None

    def interrupt(self) -> None:
        self._actor.interrupt.remote()

    def kill(self) -> None:
        from ray.util.placement_group import remove_placement_group

        self.pending = None
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)

    terminate = kill


def remote_builds(timeout_s: float, environment: Mapping[str, str], search: str) -> actor.Remote:
    """Return a function that builds candidates as tasks on any processor of this process's cluster.

    Args:
        environment: variables of the tasks' workers.
        search: see :func:`autotune.tuner.cluster.actor.build`.
    """
    import ray

    options = {"num_cpus": 1, "max_retries": _RETRIES, "runtime_env": {"env_vars": dict(environment)}}
    task: Any = ray.remote(actor.build).options(**options)

    def remote(workload: Workload, device: str, config: Config) -> Built | None:
        module, wanted = tasks.module_of(workload.kind), dict(actor.compilers())
        ref = task.remote(workload, module, device, dict(config), timeout_s, wanted, search)
        try:
            found: Built | None = ray.get(ref, timeout=_QUEUE_S + timeout_s)
        except ray.exceptions.RayError:
            with contextlib.suppress(Exception):
                ray.cancel(ref)
            return None
        return found

    return remote


def why(error: BaseException) -> str:
    """Return Ray's reason for a death or a failure in one line."""
    text = str(error)
    if "ModuleNotFoundError" in text or "ImportError" in text:
        lines = [line for line in text.splitlines() if "ModuleNotFoundError" in line or "ImportError" in line]
        return (
            f"a node cannot import what it needs: {safe_line(lines[-1].strip(), 200)}; install the same on every node"
        )
    if isinstance(cause := getattr(error, "cause", None), Exception):
        return f"on a node: {safe_line(first_line(cause), 300)}"
    names = {
        "node": "its node has gone",
        "Unavailable": "its node does not answer",
        "OutOfMemory": "Ray ended it, for lack of memory on its node",
    }
    for name, said in names.items():
        if name in type(error).__name__ or f"The {name} " in text or "node died" in text.lower():
            return said
    return f"its process has ended ({type(error).__name__})"


def _check(address: str) -> None:
    """Check within seconds that a cluster answers.

    Raises:
        UserError: no cluster answers.
    """
    hint = (
        "give HOST:PORT of a cluster's head (`ray start --head` prints it), or auto on one of its nodes; where"
        " Ray wants a token, this host needs it too"
    )
    if "://" in address:
        raise UserError(f"--ray {address}: the search runs on a node of the cluster, or as `ray job submit`; {hint}")
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or not port.isdecimal():
            raise UserError(f"--ray {address}: not an address; {hint}")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"--ray {address}: nothing answers there ({safe_line(error, 100)}); {hint}") from None
    # Run in a child process: Ray's attempts take minutes, print messages, and end the process that makes them.
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "health-check"]
    command += [] if address == "auto" else ["--address", address]
    try:
        alive = subprocess.run(command, timeout=_HEALTH_S, check=False, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        alive = False
    if not alive:
        raise UserError(f"--ray {address}: no Ray cluster answers there; {hint}")
