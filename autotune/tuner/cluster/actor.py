"""A lane on a node of a cluster, run as a Ray actor, and builds of candidates. This module does not import Ray.

The lane runs in one thread from its first frame to its end, since its child processes die with the thread that started
them. The driver's calls enqueue and dequeue frames.
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
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune import task as tasks
from autotune.device import package_version
from autotune.domain import identity_of
from autotune.errors import UserError, first_line, safe_line
from autotune.measure.outcome import Blame
from autotune.measure.pool import Built, CompilePool
from autotune.task import Config
from autotune.tuner.lane import Lane, Sender
from autotune.workload import Workload

_MANY = 200  # frames returned by one call
_GATHER_S = 0.3  # batches progress, since one driver may read a thousand lanes
Remote = Callable[[Workload, str, Config], Built | None]
"""Builds a candidate on another node; returns None if none built it."""


class Actor:
    """The actor's interface for the driver.

    Args:
        remote: creates a ``Remote`` from the seconds for a build and its environment variables.
    """

    def __init__(self, remote: Any) -> None:
        free_threads()
        self._in: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._out = Outbox()
        self._lane = ClusterLane(remote)
        threading.Thread(target=self._run, name="autotune-lane", daemon=True).start()

    def send(self, message: dict[str, Any], common: Mapping[str, Any] | None = None) -> None:
        """Send the lane a frame.

        Args:
            common: entries of the frame that all lanes share.
        """
        self._in.put({**(common or {}), **message})

    def receive(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the lane's new frames; waits ``wait_s`` seconds at most for the first one."""
        return self._out.take(wait_s)

    def interrupt(self) -> None:
        """End the lane's turn in an orderly way."""
        self._lane.interrupt()

    def _run(self) -> None:
        while True:
            message = self._in.get()
            try:
                self._lane.handle(self._out, message, b"")
            except BaseException as error:
                self._out.send({"died": safe_line(first_line(error), 500)})
                return


class Outbox:
    """Queue of frames for the driver. Of consecutive progress frames, only the latest is delivered."""

    def __init__(self) -> None:
        self._frames: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        self._frames.put(dict(message))

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """Return all queued frames; waits for the first. If it is a progress frame, waits ``_GATHER_S`` for more."""
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
    """A lane that reports its device, and on a GPU compiles candidates on other nodes."""

    def __init__(self, remote: Any) -> None:
        super().__init__()
        self._make_remote = remote

    def interrupt(self) -> None:
        """End the turn; the driver ends a lane that has not begun."""
        if (context := getattr(self, "_context", None)) is not None:
            context.interrupt.requested = True

    def begin(self, link: Sender, message: dict[str, Any]) -> dict[str, Any]:
        """Return the first answer with the fingerprints of device and software, which identify the kind of device.

        Args:
            message: as for any lane, plus the ``version`` of the driver's autotune and the text of the user's ``space``
                file, which is on the driver's host.
        """
        version, space = message.pop("version"), message.pop("space")
        if version != __version__:
            raise UserError(
                f"the node has autotune {__version__}, and the search {version}: install one version on every node"
            )
        if space is not None:
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="autotune-space-")))
            file = folder / Path(message["options"]["space_file"]).name
            file.write_text(space)
            message["options"] = {**message["options"], "space_file": str(file)}
        os.environ.update(AUTOTUNE_DB=message["url"], AUTOTUNE_DB_READ="")  # measured code may deploy from it
        from autotune.device import environment

        answer = super().begin(link, message)
        context = self._context
        keys = [context.key(workload) for workload in self._workloads]
        software = environment(context.device)
        return {
            **answer,
            "places": {key.workload: [key.device, key.environment] for key in keys},
            "label": identity_of(self._workloads[0], context.device).label,
            "software": ", ".join(f"{k} {v}" for k, v in software.to_json().items() if v and k not in ("kind", "isa")),
        }

    def _pool(self, device: str, processes: int, timeout_s: float) -> CompilePool:
        """Return the lane's compile pool. On a CPU, candidates are compiled on the node that measures them."""
        if device == "cpu" or self._make_remote is None:
            return super()._pool(device, 0, timeout_s)
        from autotune.device import describe_cuda

        arch, units = describe_cuda(device)
        remote: Remote = self._make_remote(timeout_s, {"AUTOTUNE_CUDA_TARGET": f"{arch}:{units}"})
        return ClusterPool(remote, processes, timeout_s)


def free_threads() -> None:
    """Restore OpenMP's thread count, which Ray limits in its workers, so that measurements run as without Ray.

    Ray sets ``OMP_NUM_THREADS`` if the node was started without it.
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
    """Call ``function(args, device, store, *more)`` on a node: the part of a command that needs the device.

    Args:
        domains: the driver's registered domains and their modules.

    Returns:
        ``value``, or ``mistake`` with the text of a user error; ``said`` with the stderr output.
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
    """Return the versions that determine the compiled code of a candidate; "" for a missing package.

    CPU and GPU builds of torch compile to the same code, so the local version after ``+`` is dropped.
    """
    packages = ("torch", "numba", "numba-cuda")
    return {"autotune": __version__, **{name: package_version(name).partition("+")[0] for name in packages}}


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
        search: secret identifier of the search; its builds on this node share a folder.

    Returns:
        None if this node has other versions, which would produce a different kernel.
    """
    if compilers() != wanted:
        return None
    tasks.DOMAINS[workload.kind] = module
    return _pool(timeout_s, search).submit(workload, device, config).result()


@functools.lru_cache(maxsize=4)
def _pool(timeout_s: float, search: str) -> CompilePool:
    """Return a pool of one process, kept for this worker's next task, since it has imported the compilers."""
    return CompilePool(1, timeout_s=timeout_s, shared=shared_folder(search))


def _folder(search: str) -> Path:
    return Path(tempfile.gettempdir(), f"autotune-build-{search}")


def drop_shared(search: str) -> None:
    """Remove this node's folder of a search that has ended; Ray kills the processes that would remove it."""
    shutil.rmtree(_folder(search), ignore_errors=True)


@functools.cache
def shared_folder(search: str) -> Path | None:
    """Return this node's folder that all builds of a search share, or None if it cannot be created safely.

    The last of the build processes to exit removes the folder, unless it is killed.
    """
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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process holds no lock
        except OSError:
            return
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


class ClusterPool(CompilePool):
    """A compile pool that builds on other nodes, and locally if they fail for other reasons than the candidate.

    Args:
        remote: builds a candidate; called from several threads.
        processes: number of concurrent builds.
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
