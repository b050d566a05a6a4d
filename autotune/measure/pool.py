"""Pools of replaceable processes that compile candidates or baselines, concurrently with measurements.

Such a process is ``python -m autotune.measure.pool``, and runs a :class:`Builder`. Inductor takes a second or more for
a region's baselines, in which the worker could measure a dozen candidates. A :class:`BaselinePool` compiles the same
code without running it, and the worker then loads it from Inductor's disk cache.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from autotune import numerics
from autotune import task as tasks
from autotune.device import usable_processors
from autotune.domain import domain_of, open_task
from autotune.measure.child import Child, ChildDied, ChildSilent, Link, artifact_from_wire, artifact_to_wire, serve
from autotune.measure.outcome import Blame, blame, one_line
from autotune.task import Artifact, Config, config_key
from autotune.workload import Workload

_STARTUP_S = 180.0
_MOST = 16
BASELINE_PROCESSES = 3
"""Maximum number of processes of a :class:`BaselinePool`: each may take half a gigabyte of a GPU's memory."""
WAIT_S = 30.0
"""Seconds for which a comparison waits for baselines; if there is time left, the worker then compiles them itself."""
NICE = 5
"""Compile processes of a GPU's search keep every processor busy for minutes. Measuring has priority. So has a program
on a CPU that compiles at the same time as its regions' baselines."""


@dataclass(frozen=True)
class Built:
    """The result of a build: an artifact, or the reason for its absence in one line.

    ``fault`` is set if the candidate is not to blame: the disk is full, or the compile process does not start or was
    killed.
    """

    artifact: Artifact | None
    reason: str = ""
    seconds: float = 0.0
    fault: Blame = Blame.CANDIDATE


def default_processes(pools: int = 1) -> int:
    """Return one less than this process's usable processors, divided among ``pools``; each gets 1 to 16."""
    return max(1, min(_MOST, (usable_processors() - 1) // pools))


def compile_threads(jobs: int) -> dict[str, str]:
    """Return environment variables that limit Inductor's compilers to one of ``jobs`` shares of the processors."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    return {name: os.environ.get(name) or str(max(1, usable_processors() // jobs))}


_NOW, _IDLE = 1, 2
_Subject = tuple[str, str, str]
"""Fingerprint of a workload, device, key of a configuration."""


class _Job(NamedTuple):
    """Job in queue order: submitted builds before prefetched ones."""

    urgency: int
    number: int
    subject: tuple[Workload, str, Config] | None
    """None ends the thread that receives the job."""
    future: Future[Built] | None


class CompilePool:
    """Builds candidates in processes that are started when first needed.

    A build that crashes its process, or misses its deadline, fails alone, and the process is replaced. Prefetched
    builds (:meth:`prefetch`) are kept until they are submitted or forgotten. A context manager.

    Args:
        processes: their number; see :func:`default_processes`.
        timeout_s: for one build, without the start-up of the process.
        shared: folder for data shared by builds, also those of other pools (:data:`autotune.task.SHARED_BUILDS`); None
            for the one that this process's environment names, or else a new one.
    """

    _baselines = False

    def __init__(self, processes: int | None = None, timeout_s: float = 120.0, shared: Path | None = None) -> None:
        self.processes = processes or default_processes()
        self._timeout_s = timeout_s
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._prefetched: dict[_Subject, Future[Built]] = {}
        self._asked: WeakValueDictionary[_Subject, Future[Built]] = WeakValueDictionary()
        self._threads: list[threading.Thread] = []
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._closed = False
        given = str(shared or os.environ.get(tasks.SHARED_BUILDS, ""))
        self._own = None if given else tempfile.TemporaryDirectory(prefix="autotune-build-", ignore_cleanup_errors=True)
        self._shared = given if self._own is None else self._own.name

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, workload: Workload, device: str, config: Config) -> Future[Built]:
        """Build ``config``. The future never raises: failures are :class:`Built` with a reason.

        A finished or running prefetched build is returned; a queued one is built now.
        """
        subject = (workload.fingerprint, device, config_key(config))
        with self._lock:
            future = self._prefetched.pop(subject, None)
            if future is None or future.cancel() or (future.done() and future.result().fault):
                future = self._put(_NOW, workload, device, config)
            self._asked[subject] = future
            return future

    def prefetch(self, workload: Workload, device: str, config: Config) -> None:
        """Build ``config`` when the pool is idle, and keep it for :meth:`submit`.

        Does nothing if a submitted build of the same candidate is still referenced.
        """
        subject = (workload.fingerprint, device, config_key(config))
        with self._lock:
            if subject in self._prefetched or subject in self._asked or self._closed:
                return
            self._prefetched[subject] = self._put(_IDLE, workload, device, config)

    def keep(self, workload: Workload, device: str, config: Config, future: Future[Built]) -> None:
        """Return an unused result of :meth:`submit` to the pool, for the next :meth:`submit` of the same candidate.

        A build that has not begun is dropped.
        """
        with self._lock:
            if not future.cancel() and not self._closed:
                self._prefetched[workload.fingerprint, device, config_key(config)] = future

    def forget(self, workloads: Collection[str]) -> None:
        """Drop the prefetched, queued and kept builds of the workloads with these fingerprints."""
        with self._lock:
            dropped = [self._prefetched.pop(subject) for subject in list(self._prefetched) if subject[0] in workloads]
        for future in dropped:
            future.cancel()

    def start(self) -> None:
        """Start all processes before their first jobs."""
        with self._lock:
            while len(self._threads) < self.processes:
                self._add(spawn=True)

    def _put(self, urgency: int, workload: Workload, device: str, config: Config) -> Future[Built]:
        """Queue a build; the caller has the lock."""
        future: Future[Built] = Future()
        self._jobs.put(_Job(urgency, next(self._numbers), (workload, device, config), future))
        if len(self._threads) < self.processes:
            self._add()
        return future

    def _add(self, spawn: bool = False) -> None:
        """Add a thread, which starts its process for its first job, or at once; the caller has the lock."""
        number = len(self._threads)
        name = f"autotune-build-{number}"
        thread = threading.Thread(target=self._run, args=(number, spawn), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stop at once; builds in progress are dropped, and their futures cancelled or failed."""
        self._closed = True
        with self._lock:
            for child in self._children.values():
                child.terminate()  # its thread detects the end of the pipe, and closes it
        for _ in self._threads:
            self._jobs.put(_Job(0, next(self._numbers), None, None))
        for thread in self._threads:
            thread.join(timeout=30)
        while not self._jobs.empty():
            if (future := self._jobs.get().future) is not None:
                future.cancel()
        if self._own is not None:
            self._own.cleanup()

    def _run(self, number: int, spawn: bool) -> None:
        opened: tuple[Workload, str] | None = None
        if spawn:
            with contextlib.suppress(ChildDied, OSError):  # the first job starts it again, and reports a failure
                self._child(number)
        while True:
            _, _, subject, future = self._jobs.get()
            if subject is None or future is None:
                break
            workload, device, config = subject
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            built = self._build(number, workload, device, config, opened)
            opened = None if built.artifact is None and number not in self._children else (workload, device)
            future.set_result(built)
        self._drop(number)

    def _build(
        self, number: int, workload: Workload, device: str, config: Config, opened: tuple[Workload, str] | None
    ) -> Built:
        """Build in process ``number``, whose task is that of ``opened``; drop the process if it crashes or hangs."""
        begin, fault = time.monotonic(), Blame.MACHINE
        try:
            child = self._child(number)
            if opened != (workload, device) or child.started >= begin:
                self._open(child, workload, device)
            begin, fault = time.monotonic(), Blame.CANDIDATE
            child.send({"config": dict(config)})
            answer, code = child.receive(begin + self._timeout_s)
            seconds = time.monotonic() - begin
            if answer["ok"]:
                return Built(artifact_from_wire(answer["artifact"], code), seconds=seconds)
            return Built(None, answer["reason"], seconds, Blame(answer["fault"]))
        except ChildSilent:
            reason = f"no answer after {time.monotonic() - begin:.0f} s of compiling"
        except ChildDied as death:
            reason, fault = f"the compiling process {death}", fault or death.fault
        except (ValueError, OSError) as problem:
            reason = str(problem)
        self._drop(number)
        fault = Blame.MACHINE if self._closed else fault
        return Built(None, reason, time.monotonic() - begin, fault)

    def _open(self, child: Child, workload: Workload, device: str) -> None:
        child.send(
            {
                "workload": workload.to_json(),
                "domain": tasks.module_of(workload.kind),
                "device": device,
                "numerics": numerics.read(),
                "baselines": self._baselines,
            }
        )
        answer, _ = child.receive(time.monotonic() + _STARTUP_S)
        if not answer["ok"]:
            raise ValueError(f"cannot open the workload: {answer['reason']}")

    def _child(self, number: int) -> Child:
        with self._lock:
            if self._closed:
                raise ChildDied("was stopped")
            child = self._children.get(number)
            if child is None or not child.alive:
                environment = {tasks.SHARED_BUILDS: self._shared}
                child = self._children[number] = Child(__name__, environment)
            return child

    def _drop(self, number: int) -> None:
        with self._lock:
            child = self._children.pop(number, None)
            if child is not None:
                child.kill()


class BaselinePool(CompilePool):
    """Compiles the baselines of workloads; a job has no configuration, and its artifact no kernels.

    A context manager.

    Args:
        processes: their number; None for a few, by the processors of the host.
        timeout_s: for one workload.
    """

    _baselines = True

    def __init__(self, processes: int | None = None, timeout_s: float = 300.0) -> None:
        super().__init__(processes or max(1, min(BASELINE_PROCESSES, default_processes() // 4)), timeout_s)

    def begin(self, workload: Workload, device: str) -> None:
        """Compile a workload's baselines when a process is free."""
        self.prefetch(workload, device, {})

    def wait(self, workload: Workload, device: str, seconds: float = math.inf) -> Built | None:
        """Wait for a workload's baselines; return None if they take longer than ``seconds`` or :data:`WAIT_S`."""
        future = self.submit(workload, device, {})
        try:
            return future.result(min(seconds, WAIT_S))
        except TimeoutError:
            return None
        finally:
            self.keep(workload, device, {}, future)


class Builder:
    """Process of a pool. It keeps the task of the last workload, since jobs of one search are consecutive."""

    def __init__(self) -> None:
        self._make: Callable[[Config], Artifact] | None = None
        self._nice = False

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        try:
            if "workload" in message:
                self._open(message)
                link.send({"ok": True})
                return
            assert self._make is not None
            head, code = artifact_to_wire(self._make(message["config"]))
        except Exception as error:
            fault, culprit = blame(error)
            text, name = one_line(culprit) or type(culprit).__name__, type(culprit).__name__
            reason = text if name == "BuildError" or fault is Blame.USER else f"{name}: {text}"
            link.send({"ok": False, "reason": reason, "fault": str(fault)})
            return
        link.send({"ok": True, "artifact": head}, code)

    def _open(self, message: dict[str, Any]) -> None:
        workload, device = Workload.from_json(message["workload"]), message["device"]
        tasks.DOMAINS[workload.kind] = message["domain"]
        # On a CPU the search waits for each build, and a nice process gets a third of another one's share.
        if not self._nice and (device != "cpu" or message["baselines"]):
            os.nice(NICE)
            self._nice = True
        if not message["baselines"]:
            self._make = open_task(workload, device).build
            return

        def compile_baselines(config: Config) -> Artifact:
            domain_of(workload.kind).compile_baselines(workload, device)
            return Artifact("", ())

        numerics.restore(message["numerics"])
        self._make = compile_baselines


if __name__ == "__main__":
    serve(Builder().handle)
