"""Support for torchrun: the process of RANK 0 searches, and each other process is an agent that owns a rank's process.

``torchrun --nproc-per-node 4 -m autotune search c3 ...`` starts four equal processes. Those above RANK 0 call
:func:`serve_agent`. Each connects to RANK 0, starts a process on request, forwards frames between the two, and kills it
when the connection closes; then it connects again. The lifetime of a connection is thus that of a process. When RANK 0
has exited, connections fail, and the agents exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil

from autotune.errors import UserError
from autotune.measure.child import Child, ChildDied, ChildSilent, Reader, pack, ready

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_KEY = "autotune/domains/c3/measuring/agents"
_CONNECT_S = 60.0
_POLL_S = 2.0


def under_torchrun() -> bool:
    """True if torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def serve_agent() -> bool:
    """Own a rank's process for the search in RANK 0 until the search ends; in RANK 0, only accept agents.

    Returns:
        True if this process was an agent and has no further work; False in RANK 0 and without torchrun.

    Raises:
        UserError: torchrun spans several hosts.
    """
    if not under_torchrun():
        return False
    if int(os.environ["RANK"]) == 0:
        torchrun_agents()
        return False
    _one_host()
    address = _await_address(_store())
    while address:
        port, _, token = address.partition(" ")
        try:
            connection = socket.create_connection(("127.0.0.1", int(port)), timeout=_CONNECT_S)
        except OSError:
            break
        with connection:
            _own(connection, {"rank": int(os.environ["RANK"]), "token": token})
    return True


@cache
def torchrun_agents() -> Agents | None:
    """The agents of this process's torchrun; None without torchrun.

    Raises:
        UserError: this process must be an agent itself, or torchrun spans several hosts.
    """
    if not under_torchrun():
        return None
    if int(os.environ["RANK"]):
        raise UserError(
            "under torchrun, rank 0 searches: "
            "call autotune.domains.c3.measuring.agents.serve_agent() on the other ranks"
        )
    _one_host()
    return Agents(int(os.environ["WORLD_SIZE"]), _store())


class RemoteChild:
    """A process owned by an agent, with the methods of :class:`autotune.measure.child.Child`."""

    def __init__(self, connection: socket.socket, module: str, env: Mapping[str, str]) -> None:
        self._connection = connection
        self._reader = Reader()
        self._died = ""
        self.pid = 0
        connection.settimeout(_CONNECT_S)
        try:
            connection.sendall(pack({"module": module, "env": dict(env)}))
            while self.pid == 0 and (frame := self._read()) is not None:
                self.pid = int(frame[0]["pid"])
        except OSError:
            self._died = "its agent under torchrun is gone"

    @property
    def alive(self) -> bool:
        return not self._died

    def send(self, message: Mapping[str, Any], blob: bytes = b"", timeout: float = 60.0) -> None:
        """See :meth:`Child.send`."""
        self._connection.settimeout(timeout)
        try:
            self._connection.sendall(pack(message, blob))
        except TimeoutError:
            raise ChildSilent from None
        except OSError:
            raise ChildDied(self._epitaph()) from None

    def fileno(self) -> int:
        """See :meth:`Child.fileno`."""
        return self._connection.fileno()

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        """See :meth:`Child.poll`."""
        frame = self._reader.next()
        if frame is None and ready([self._connection], 0.0):
            frame = self._read()
        if frame is not None and "died" in frame[0]:
            self._died = str(frame[0]["died"])
        if self._died:
            raise ChildDied(self._died)
        return frame

    def terminate(self) -> None:
        """Make the agent kill the process and its descendants, without waiting."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Kill the process; the agent is available again when the process has ended."""
        self.terminate()
        self._connection.close()
        self._died = self._died or "killed"

    def _read(self) -> tuple[dict[str, Any], bytes] | None:
        """Read once, waiting for data; returns a frame if one is complete."""
        try:
            data = self._connection.recv(1 << 20)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not data:
            self._died = self._died or "its agent under torchrun is gone"
            return None
        self._reader.feed(data)
        return self._reader.next()

    def _epitaph(self) -> str:
        """The cause of death, if the agent sent it in time."""
        with contextlib.suppress(ChildDied, ValueError):
            while self.poll() is not None:
                pass
        return self._died or "its agent under torchrun is gone"


class Agents:
    """The side of RANK 0: accepts connections of agents, and gives them processes to own.

    Attributes:
        ranks: number of processes that torchrun started, including this one.
    """

    def __init__(self, ranks: int, store: Store) -> None:
        self.ranks = ranks
        self._token = secrets.token_hex(16)
        self._idle: dict[int, socket.socket] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
        store.set(_KEY, f"{self._listener.getsockname()[1]} {self._token}")
        atexit.register(self._listener.close)

    def child(self, rank: int, module: str, env: Mapping[str, str]) -> RemoteChild:
        """Start ``python -m module`` through the agent of RANK ``rank``.

        Raises:
            ChildDied: that agent does not exist any more.
        """
        deadline = time.monotonic() + _CONNECT_S
        while rank not in self._idle:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise ChildDied(f"no process of RANK {rank} has come within {_CONNECT_S:.0f} s") from None
            hello = _hello(connection)
            if hello.get("token") == self._token:
                self._idle[int(hello["rank"])] = connection
            else:
                connection.close()
        return RemoteChild(self._idle.pop(rank), module, env)


def _hello(connection: socket.socket) -> dict[str, Any]:
    """The first frame of an agent; empty if the peer is no agent."""
    reader = Reader()
    connection.settimeout(_CONNECT_S)
    with contextlib.suppress(OSError, ValueError):
        while data := connection.recv(1 << 16):
            reader.feed(data)
            frame = reader.next()
            if frame is not None:
                return frame[0]
    return {}


def _own(connection: socket.socket, hello: Mapping[str, Any]) -> None:
    """An agent's side of one connection: start the requested process, and forward frames until either end closes."""
    reader = Reader()
    child: Child | None = None
    try:
        connection.settimeout(None)
        connection.sendall(pack(hello))
        while True:
            ends: list[socket.socket | Child] = [connection, child] if child else [connection]
            ready(ends)
            while child is not None and (frame := child.poll()) is not None:
                connection.sendall(pack(*frame))
            if ready([connection], 0.0):
                data = connection.recv(1 << 20)
                if not data:
                    return
                reader.feed(data)
            while (order := reader.next()) is not None:
                if child is None:
                    child = Child(order[0]["module"], order[0]["env"])
                    connection.sendall(pack({"pid": child.pid}))
                else:
                    child.send(*order)
    except ChildDied as death:
        _report_death(connection, str(death))
    except ChildSilent:
        _report_death(connection, "took no more frames")
    except OSError:
        return
    finally:
        if child is not None:
            child.kill()


def _report_death(connection: socket.socket, how: str) -> None:
    """Send the cause of a process's death, and wait until RANK 0 has read it."""
    with contextlib.suppress(OSError):
        connection.sendall(pack({"died": how}))
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_CONNECT_S)
        while connection.recv(1 << 16):
            pass


def _store() -> Store:
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))
    found: Store = store
    return found


def _await_address(store: Store) -> str:
    """The address that RANK 0 stored; "" if RANK 0 ended without storing one (it had nothing to measure)."""
    first = _rank_zero()
    while first is None or (first.is_running() and first.status() != psutil.STATUS_ZOMBIE):
        with contextlib.suppress(Exception):
            store.wait([_KEY], timedelta(seconds=_POLL_S))
            return str(store.get(_KEY).decode())
    return ""


def _rank_zero() -> psutil.Process | None:
    """The process of RANK 0, another child of this process's parent, torchrun."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == "0":
                    return process
    return None


def _one_host() -> None:
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]:
        raise UserError("C3 needs all ranks on one host: start torchrun with --nnodes 1")
