"""A lane on a node of a cluster, which Ray makes an actor of, and builds of candidates. Nothing here knows Ray.

The lane works in one thread of its own, from its first frame to its end: the processes it starts die with the thread
that started them. Calls of the driver put frames in and take frames out.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune import task as tasks
from autotune.domain import place
from autotune.errors import UserError, first_line, told
from autotune.measure.outcome import Blame
from autotune.measure.pool import Built, CompilePool
from autotune.task import Config
from autotune.tuner.devices.lane import Lane, Sender
from autotune.workload import Workload

_MANY = 200  # frames that are handed out at once
_GATHER_S = 0.3  # one driver reads a thousand lanes
Remote = Callable[[Workload, str, Config], Built | None]
"""Builds a candidate somewhere; None where nobody did."""


class Actor:
    """What the driver calls.

    Args:
        remote: makes who builds candidates on other nodes, of the seconds for a build and variables of its environment.
    """

    def __init__(self, remote: Any) -> None:
        free_threads()
        self._in: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._out = Outbox()
        self._lane = ClusterLane(remote)
        threading.Thread(target=self._run, name="autotune-lane", daemon=True).start()

    def send(self, message: dict[str, Any], common: Mapping[str, Any] | None = None) -> None:
        """Hand the lane a frame.

        Args:
            common: more of it, which other lanes get too.
        """
        self._in.put({**(common or {}), **message})

    def receive(self, wait_s: float) -> list[dict[str, Any]]:
        """The lane's frames since; waits for one, so many seconds at most."""
        return self._out.take(wait_s)

    def interrupt(self) -> None:
        """Have the lane end its turn in good order."""
        self._lane.interrupt()

    def _run(self) -> None:
        while True:
            message = self._in.get()
            try:
                self._lane.handle(self._out, message, b"")
            except BaseException as error:
                self._out.send({"died": told(first_line(error), 500)})
                return


class Outbox:
    """Frames that wait for the driver; of progress in a row the latest is handed out alone."""

    def __init__(self) -> None:
        self._frames: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        self._frames.put(dict(message))

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """All that wait; the first is waited for. Where it is progress, more is waited for, a moment."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + wait_s
        while len(found) < _MANY:
            try:
                frame = self._frames.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if not found:
                end = time.monotonic() + _GATHER_S
            if found and "progress" in frame and "progress" in found[-1]:
                found[-1] = frame
            else:
                found.append(frame)
            if "progress" not in frame:
                end = 0.0
        return found


class ClusterLane(Lane):
    """A lane that tells what device it has, and has candidates compiled on other nodes where it has a GPU."""

    def __init__(self, remote: Any) -> None:
        super().__init__()
        self._make_remote = remote

    def interrupt(self) -> None:
        """End the turn; what has not begun yet is ended by its driver."""
        if (context := getattr(self, "_context", None)) is not None:
            context.interrupt.requested = True

    def begin(self, link: Sender, message: dict[str, Any]) -> dict[str, Any]:
        """Answers the places of the workloads too, which say what kind of device this is.

        Args:
            message: as for any lane, and the ``version`` of the driver's autotune, and the text of the user's
                ``space``, whose file is on the driver's host.
        """
        version, space = message.pop("version"), message.pop("space")
        if version != __version__:
            raise UserError(f"it has autotune {__version__}, the search {version}: install one version on every node")
        if space is not None:
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="autotune-space-")))
            file = folder / Path(message["options"]["space_file"]).name
            file.write_text(space)
            message["options"] = {**message["options"], "space_file": str(file)}
        os.environ.update(AUTOTUNE_DB=message["url"], AUTOTUNE_DB_READ="")  # what is measured may deploy from it
        from autotune.device import environment

        answer = super().begin(link, message)
        context = self._context
        keys = [context.key(workload) for workload in self._workloads]
        software = environment(context.device)
        return {
            **answer,
            "places": {key.workload: [key.device, key.environment] for key in keys},
            "label": place(self._workloads[0], context.device).label,
            "software": ", ".join(f"{k} {v}" for k, v in software.to_json().items() if v and k not in ("kind", "isa")),
        }

    def _pool(self, device: str, processes: int, timeout_s: float) -> CompilePool:
        """On a CPU what is compiled is for this very CPU, and is compiled where it is measured."""
        if device == "cpu" or self._make_remote is None:
            return super()._pool(device, 0, timeout_s)
        from autotune.device import describe_cuda

        arch, units = describe_cuda(device)
        remote: Remote = self._make_remote(timeout_s, {"AUTOTUNE_CUDA_TARGET": f"{arch}:{units}"})
        return ClusterPool(remote, processes, timeout_s)


def free_threads() -> None:
    """Give OpenMP back the threads that Ray takes from its workers: what is measured uses what it would without Ray.

    Ray sets ``OMP_NUM_THREADS`` where the node was started without it.
    """
    import psutil

    try:
        nodes = psutil.Process(os.getppid()).environ()
    except psutil.Error:
        nodes = {}
    if "OMP_NUM_THREADS" in nodes:
        os.environ["OMP_NUM_THREADS"] = nodes["OMP_NUM_THREADS"]
    else:
        os.environ.pop("OMP_NUM_THREADS", None)


def call(
    function: Any, args: Any, device: str, url: str, more: tuple[Any, ...], domains: Mapping[str, str]
) -> dict[str, Any]:
    """Call ``function(args, device, store, *more)`` on a node: a part of a command that needs the device.

    Args:
        domains: those the driver knows, and their modules.

    Returns:
        ``value``, or ``mistake`` of the user; what it printed on stderr is ``said``.
    """
    import contextlib
    import io

    from autotune.store.store import Store

    free_threads()
    tasks.DOMAINS.update(domains)
    said = io.StringIO()
    answer: dict[str, Any] = {}
    with contextlib.redirect_stderr(said):
        try:
            with Store.open(url, awaited=True) as store:
                answer["value"] = function(args, device, store, *more)
        except UserError as mistake:
            answer["mistake"] = f"{mistake} (on {socket.gethostname()})"
    return {**answer, "said": said.getvalue()}


@functools.cache
def compilers() -> Mapping[str, str]:
    """The versions that decide what a candidate is compiled to; "" for a package that is not there.

    A build of torch for CPUs compiles to the same as one for GPUs: what is after the ``+`` does not count.
    """
    found = {"autotune": __version__}
    for package in ("torch", "numba", "numba-cuda"):
        try:
            found[package] = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def build(
    workload: Workload,
    module: str,
    device: str,
    config: Config,
    timeout_s: float,
    wanted: Mapping[str, str],
    search: str,
) -> Built | None:
    """Build a candidate on this node, in a process that may crash or hang; see :class:`CompilePool`.

    Args:
        module: of the workload's domain.
        wanted: :func:`compilers` of the node that measures.
        search: a secret of the search; its builds on this node share what they have in common.

    Returns:
        None where this node has others, and would make another kernel.
    """
    if compilers() != wanted:
        return None
    tasks.DOMAINS[workload.kind] = module
    return _pool(timeout_s, search).submit(workload, device, config).result()


@functools.lru_cache(maxsize=4)
def _pool(timeout_s: float, search: str) -> CompilePool:
    """One process, kept for the next task that this worker is given: it has imported what compiles."""
    return CompilePool(1, timeout_s=timeout_s, shared=shared_folder(search))


def _folder(search: str) -> Path:
    return Path(tempfile.gettempdir(), f"autotune-build-{search}")


def drop_shared(search: str) -> None:
    """Remove this node's folder of a search that has ended: Ray kills those who would."""
    shutil.rmtree(_folder(search), ignore_errors=True)


@functools.cache
def shared_folder(search: str) -> Path | None:
    """The folder of this node that all who build for a search share; the last of them to end removes it, unless it is
    killed. None where there is none to be had."""
    import fcntl

    folder = _folder(search)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return None
        lock = os.open(folder / "users", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        return None

    def leave() -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process holds none
        except OSError:
            return
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


class ClusterPool(CompilePool):
    """Builds on other nodes, and here what they cannot.

    Args:
        remote: who builds; called from several threads.
        processes: how many builds are asked for at once.
    """

    def __init__(self, remote: Remote, processes: int, timeout_s: float) -> None:
        super().__init__(processes, timeout_s)
        self._remote = remote

    def _build(
        self, number: int, workload: Workload, device: str, config: Config, opened: tuple[Workload, str] | None
    ) -> Built:
        built = self._remote(workload, device, config)
        if built is None or (built.artifact is None and built.fault not in (Blame.CANDIDATE, Blame.USER)):
            built = super()._build(number, workload, device, config, None)
        return built
