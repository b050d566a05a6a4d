"""Steps that ran stored kernels, counted and added to the database: ``AUTOTUNE_SAVINGS=1``.

One region of each graph counts its calls. A thread writes the counts every few minutes, and the process writes them
once more at its end. A step never waits for the database. Replays of CUDA graphs run no Python and are not counted.

:func:`saved` adds up the GPU hours that the kernels have saved. A verdict has the times of a step with and without
stored kernels: such savings are measured. Without a verdict, each region is assumed to save as much in its step as
alone: such savings are assumed.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.space import is_number

if TYPE_CHECKING:
    from autotune.store.records import Saving, Verdict

log = logging.getLogger("autotune")

VARIABLE = "AUTOTUNE_SAVINGS"
EVERY_S = 300.0
"""Seconds between two writes."""
_DAY_S = 86400.0


@dataclass
class _Count:
    """The calls of one graph in this process.

    Attributes:
        tick: called at each call; ``next`` of a counter is atomic, and takes 30 ns.
        read: ticks already read, including those caused by reading.
        weeks: calls by week.
    """

    tick: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    read: int = 0
    weeks: dict[str, int] = field(default_factory=dict)

    def gather(self, week: str) -> None:
        """Add the calls since the last time to a week."""
        calls = self.tick() - self.read
        self.read += calls + 1
        if calls:
            self.weeks[week] = self.weeks.get(week, 0) + calls


class Savings:
    """The counts of this process.

    Args:
        put: stores counts by device and returns True on success; never raises.
    """

    def __init__(self, put: Callable[[Mapping[str, Sequence[Saving]]], bool]) -> None:
        self._put, self._lock = put, threading.RLock()
        self._counts: dict[tuple[str, str, str, float], _Count] = {}
        self._written: dict[tuple[str, str, str, float], dict[str, int]] = {}
        self._process = uuid.uuid4().hex
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        _every.add(self)

    def counted(
        self, run: Callable[..., None], device: str, *, graph: str, mode: str, alone_us: float
    ) -> Callable[..., None]:
        """Wrap ``run`` to count its calls as steps of a graph, if counting is enabled.

        Args:
            device: "cpu" or "cuda:N".
            alone_us: microseconds that the graph's kernels save in a call, each timed alone.
        """
        if not wanted():
            return run
        with self._lock:
            tick = self._counts.setdefault((graph, device, mode, alone_us), _Count()).tick
            self._start()

        def call(*tensors: Any) -> None:
            tick()
            run(*tensors)

        return call

    def write(self) -> bool:
        """Store new counts; True if none are left to store."""
        from autotune.store.records import Saving

        with self._lock:
            week, program = monday(time.time()), program_name()
            rows: dict[str, list[Saving]] = {}
            for (graph, device, mode, alone_us), count in self._counts.items():
                count.gather(week)
                known = self._written.get((graph, device, mode, alone_us), {})
                rows.setdefault(device, []).extend(
                    Saving(self._process, graph, "", "", mode, when, program, steps, alone_us)
                    for when, steps in count.weeks.items()
                    if known.get(when) != steps
                )
            if not any(rows.values()):
                return True
            done = self._put({device: found for device, found in rows.items() if found})
            if done:
                self._written = {key: dict(count.weeks) for key, count in self._counts.items()}
            return done

    def end(self) -> None:
        """Write the remaining counts, and stop."""
        if self._counts and not self._ended.is_set():
            self._ended.set()
            self.write()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autotune-savings", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.write()

    def _forked(self) -> None:
        """Start counting as a new process, which writes at its end: counts before the fork belong to the parent."""
        self._lock, self._process, self._thread = threading.RLock(), uuid.uuid4().hex, None
        self._ended = threading.Event()
        for count in self._counts.values():
            count.gather("")
            count.weeks.clear()
        self._written = {}


def wanted() -> bool:
    """True if $AUTOTUNE_SAVINGS enables counting."""
    return os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "false")


def program_name() -> str:
    """The program's name from $AUTOTUNE_SAVINGS, else the script's."""
    given = os.environ.get(VARIABLE, "").strip()
    if given.lower() not in ("", "0", "1", "false", "true"):
        return given
    script = Path(sys.argv[0] if sys.argv else "")
    return (script.parent.name if script.name == "__main__.py" else script.name) or "python"


def monday(seconds: float) -> str:
    """The Monday of a time's week in UTC, such as "2026-11-23".

    Args:
        seconds: since the epoch.
    """
    day = time.gmtime(seconds).tm_wday
    return time.strftime("%Y-%m-%d", time.gmtime(seconds - day * _DAY_S))


_every: weakref.WeakSet[Savings] = weakref.WeakSet()


def _end() -> None:
    for savings in list(_every):
        savings.end()


def _forked() -> None:
    for savings in list(_every):
        savings._forked()


atexit.register(_end)
os.register_at_fork(after_in_child=_forked)


_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Saved:
    """Savings of a program on one kind of device in one week.

    Attributes:
        device: fingerprint.
        week: its Monday in UTC, as "2026-11-23".
        steps: steps whose graphs have verdicts, and calls of other graphs.
        measured_h, assumed_h: hours of the device.
    """

    program: str
    device: str
    week: str
    steps: int
    measured_h: float
    assumed_h: float

    @property
    def hours(self) -> float:
        """Sum of measured and assumed hours."""
        return self.measured_h + self.assumed_h

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the fields."""
        return asdict(self)


def saved(counted: Iterable[Saving], verdicts: Sequence[Verdict]) -> list[Saved]:
    """Add up counts of all processes, by program, device and week.

    A step may have several graphs with one verdict. Each process has run as many steps as the least of their counts.
    """
    steps = {(v.graph, v.device, v.environment, v.mode): _step(v) for v in verdicts}
    least: dict[tuple[_Key, str, str], tuple[int, float]] = {}
    found: dict[_Key, list[float]] = {}
    for one in counted:
        key = (one.program, one.device, one.week)
        total = found.setdefault(key, [0, 0.0, 0.0])
        step = steps.get((one.graph, one.device, one.environment, one.mode))
        if step is None:
            total[0] += one.steps
            total[2] += one.steps * one.alone_us
            continue
        name, won_us = step
        before = least.get((key, one.process, name))
        least[key, one.process, name] = (one.steps if before is None else min(before[0], one.steps), won_us)
    for (key, _, _), (count, won_us) in least.items():
        found[key][0] += count
        found[key][1] += count * won_us
    made = [Saved(*key, int(n), measured / 3.6e9, assumed / 3.6e9) for key, (n, measured, assumed) in found.items()]
    return sorted(made, key=lambda s: (s.week, s.hours), reverse=True)


def _step(verdict: Verdict) -> tuple[str, float] | None:
    """Return the shared name of a step's graphs, and the microseconds saved per step; None if not timed."""
    record = verdict.record
    theirs, ours = record.get("compile_us"), record.get("autotune_us")
    if not is_number(theirs):
        return None
    name = json.dumps([verdict.device, verdict.environment, verdict.mode, dict(record)], sort_keys=True, default=str)
    return name, theirs - ours if is_number(ours) else 0.0
