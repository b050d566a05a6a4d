"""How a running search looks: a bar with the best so far and the time left on a terminal, plain lines otherwise.

Both go to stderr; stdout is for the result.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from autotune.cli.output import microseconds

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from autotune.tuner.result import Progress as State

PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines, so that a log of an hour's search can be read."""


def share_done(state: State) -> float:
    """Share of the budget that is used, 0 to 1: by candidates or by time, whichever is further."""
    shares = [0.0, state.measured / state.trials if state.trials > 0 else 0.0]
    if state.left_s is not None and state.elapsed_s > 0:
        shares.append(state.elapsed_s / (state.elapsed_s + state.left_s))
    return 1.0 if state.phase == "done" else min(max(shares), 1.0)


def seconds_left(state: State) -> float | None:
    """Seconds left at the rate so far and at most what the time budget leaves; None while neither is known.

    A search that gains nothing more ends before.
    """
    left = [] if state.left_s is None else [state.left_s]
    if state.measured and state.trials > 0:
        left.append(max(state.trials - state.measured, 0) * state.elapsed_s / state.measured)
    return min(left) if left else None


def describe(state: State) -> str:
    """A moment of one workload's search as a plain line."""
    failed = f", {state.failed} failed" if state.failed else ""
    known = f", {state.reused} known" if state.reused else ""
    left = seconds_left(state)
    rest = f", at most {clock(left)} left" if state.phase == "search" and left is not None else ""
    count = f"{state.measured} of {state.trials} measured{known}{failed}"
    part = " of a part" if state.part else ""
    return f"{state.workload}: {state.phase}{part}, {count}, best {microseconds(state.best_us)}{rest}"


def clock(seconds: float) -> str:
    """Seconds as ``m:ss``."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


class _Shown:
    """What is shown of one device's search: its workload's number and bar, and the latest moment."""

    def __init__(self, number: int, task: TaskID | None, last: State) -> None:
        self.number, self.task, self.last = number, task, last
        self.printed: State | None = None
        self.when = 0.0


class ProgressDisplay:
    """Shows moments as they come. A context manager; ``show`` is cheap and may be called for every candidate.

    Args:
        of: how many workloads will be searched, one after the other on each device.
        stream: where to; stderr by default.
    """

    def __init__(self, of: int, stream: TextIO | None = None) -> None:
        self._of = of
        self._stream = stream or sys.stderr
        self._bar: RichProgress | None = None
        self._number = 0
        self._devices: dict[str, _Shown] = {}

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}"),
                TextColumn("best [bold]{task.fields[best]}[/bold]"),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        for shown in self._devices.values():
            self._finish_line(shown)

    def show(self, state: State) -> None:
        """Show where the search is now."""
        shown = self._devices.get(state.device)
        phase = shown.last.phase if shown else ""
        if shown is None or shown.last.workload != state.workload or state.elapsed_s < shown.last.elapsed_s:
            if shown is not None:
                self._finish_line(shown)
            self._number += 1
            task = None if self._bar is None else self._bar.add_task("", total=1.0, count="", best="", left="")
            shown = self._devices[state.device] = _Shown(self._number, task, state)
        shown.last = state
        if self._bar is not None and shown.task is not None:
            self._update(self._bar, shown.task, shown)
        elif shown.printed is None or phase != state.phase or time.monotonic() - shown.when >= PLAIN_EVERY_S:
            self._print(shown)

    def _which(self, shown: _Shown) -> str:
        """The workload's number, and where it is searched, as far as there are several: ``[cuda:1 3/16] ``."""
        words = ([shown.last.device] if shown.last.device else []) + ([f"{shown.number}/{self._of}"] * (self._of > 1))
        return f"[{' '.join(words)}] " if words else ""

    def _finish_line(self, shown: _Shown) -> None:
        """Tell how a workload ended, unless that was the last line of its device."""
        if self._bar is None and shown.last != shown.printed:
            self._print(shown)

    def _print(self, shown: _Shown) -> None:
        print(self._which(shown) + describe(shown.last), file=self._stream, flush=True)
        shown.printed, shown.when = shown.last, time.monotonic()

    def _update(self, bar: RichProgress, task: TaskID, shown: _Shown) -> None:
        state = shown.last
        left = seconds_left(state)
        bar.update(
            task,
            description=self._which(shown) + state.workload,
            completed=share_done(state),
            count=f"{state.measured}/{state.trials}",
            best=microseconds(state.best_us),
            left=f"{clock(left)} left" if state.phase == "search" and left is not None else state.phase,
        )
