"""Clocks of tests: a test sets the time that passes, so that no result depends on the load of the host.

Three kinds of time decide the course of a search. Samples are read from :class:`Clock`, which each contender moves by
the time of a formula; a bench of tests installs it in its worker process (:func:`timed`). A search's budget is read
from such a clock too (:func:`paced`). :class:`Patience` watches the deadlines of processes. For it no time passes until
a process reports that it is :func:`stuck`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STUCK = "AUTOTUNE_TESTS_STUCK"
"""Environment variable: the folder in which processes note that they are stuck."""

_SAMPLES = ("autotune.measure.timer", "autotune.measure.rotate", "autotune.domains.c3.measuring.timing")
_BUDGETS = ("autotune.tuner.context", "autotune.tuner.turns")
_DEADLINES = ("autotune.measure.child", "autotune.measure.worker", "autotune.measure.pool",
              "autotune.domains.kernel.task")  # fmt: skip
_HOUR_S = 3600.0

Change = Callable[[Any, str, Any], object]
"""How attributes of modules are set: ``setattr``, or pytest's."""


class Clock:
    """In place of ``time`` where samples are taken or seconds are spent.

    Args:
        look_us: microseconds that go by with every look at it.
    """

    def __init__(self, look_us: float = 0.0) -> None:
        self.ns, self._look_us = 0, look_us

    def busy(self, us: float) -> None:
        """Let so many microseconds go by."""
        self.ns += round(us * 1e3)

    def sleep(self, seconds: float) -> None:
        self.busy(seconds * 1e6)

    def perf_counter_ns(self) -> int:
        self.busy(self._look_us)
        return self.ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9

    monotonic = perf_counter


def _set(modules: tuple[str, ...], clock: object, change: Change) -> None:
    for name in modules:
        change(importlib.import_module(name), "time", clock)


def read_samples(clock: Clock, change: Change = setattr) -> None:
    """Have samples of this process taken by ``clock``."""
    _set(_SAMPLES, clock, change)


_WORKERS = ("autotune.measure.server", "autotune.domains.c3.measuring.rank_server")


@functools.cache
def timed() -> Clock:
    """The clock that samples of this process are taken by, where it is a worker; for benches, which say what they take.

    Other processes have their samples taken as ever.
    """
    clock = Clock()
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and program.name in _WORKERS:
        read_samples(clock)
    return clock


def paced(seconds: float, change: Change) -> Clock:
    """The clock of searches in this process, each measured candidate of which takes so many seconds."""
    from autotune.measure.worker import Worker

    clock, measure = Clock(), Worker.measure

    def measured(self: Worker, *given: Any, **named: Any) -> Any:
        clock.busy(seconds * 1e6)
        return measure(self, *given, **named)

    change(Worker, "measure", measured)
    _set(_BUDGETS, clock, change)
    return clock


def stuck() -> None:
    """Note that this process does not get any further."""
    if folder := os.environ.get(STUCK):
        Path(folder, str(os.getpid())).touch()


class Patience:
    """In place of ``time`` where the deadlines of processes are watched.

    An hour goes by for the thread that waits for a process when that is stuck, and a microsecond with every look. A
    thread looks for frames between two looks at the time: what a process sent before it got stuck is read first.

    Attributes:
        settled: returns whether the hour of a stuck process may pass now.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, threading.local()
        self.settled: Callable[[], bool] = lambda: True

    @contextlib.contextmanager
    def endless(self) -> Iterator[None]:
        """Let a stuck process be waited for."""
        before, self.settled = self.settled, lambda: False
        try:
            yield
        finally:
            self.settled = before

    def is_stuck(self, pid: int) -> bool:
        return (self._folder / str(pid)).exists()

    def awaited(self, *pids: int) -> None:
        """Name the processes that this thread waits for from now on."""
        self._own.pids, self._own.seen = pids, set()

    def monotonic(self) -> float:
        now: float = getattr(self._own, "now", 0.0) + 1e-6
        for pid in getattr(self._own, "pids", ()):
            if pid in self._own.seen and self.settled():
                (self._folder / str(pid)).unlink()
                self._own.seen.remove(pid)
                now += _HOUR_S
            elif self.is_stuck(pid):
                self._own.seen.add(pid)
        self._own.now = now
        return now


def watch_deadlines(patience: Patience, change: Change) -> None:
    """Have deadlines of workers, compilers and probes watched by ``patience``."""
    from autotune.measure import child

    receive = child.Child.receive

    def received(self: child.Child, deadline: float) -> Any:
        patience.awaited(self.pid)
        try:
            return receive(self, deadline)
        finally:
            patience.awaited()

    change(child.Child, "receive", received)
    change(child, "_LOOK_S", 0.02)
    _set(_DEADLINES, patience, change)
