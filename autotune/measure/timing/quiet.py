"""How much other processes disturb a measurement on the CPU: waiting for a quiet moment, and owning up to the rest."""

from __future__ import annotations

import os
import time

import psutil

_WINDOW_S = 0.05
BUSY = 0.25
"""Processors that others may keep busy in a moment that counts as quiet."""


class Meter:
    """Counts the processors that other processes keep busy, from its making on."""

    def __init__(self) -> None:
        self._wall, self._mine, self._all = _clocks()

    def others(self) -> float:
        """Processors that others kept busy on average since the meter was made; 0 or more."""
        wall, mine, every = _clocks()
        return max(0.0, (every - self._all) - (mine - self._mine)) / max(wall - self._wall, 1e-9)


def wait_for_quiet(limit_s: float) -> None:
    """Return when others leave the processors alone, at the latest after ``limit_s`` seconds.

    A thread that shares its core is held up for whole time slices, and a parallel loop waits for its slowest thread:
    what takes 0.3 ms alone takes 8 ms then.
    """
    end = time.monotonic() + limit_s
    while True:
        meter = Meter()
        time.sleep(_WINDOW_S)
        if meter.others() <= BUSY or time.monotonic() >= end:
            return


def _clocks() -> tuple[float, float, float]:
    """Seconds: wall clock, processor time of this process, processor time of everybody."""
    mine = os.times()
    return time.monotonic(), mine.user + mine.system, processor_time()


def processor_time() -> float:
    """Processor time of everybody since the machine was started, in seconds."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # "guest" is part of "user", and "steal" is others' too: it is taken from us just the same.
    return float(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))
