"""Progress of a running search: the search's own display, and ``autotune watch``, which only reads the database.

On a terminal a search shows a bar with the best latency so far and the time left; without one, plain lines. Both go to
stderr; stdout is for the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

from autotune.cli.options import add_db, seconds
from autotune.cli.output import console, microseconds, ruled_table
from autotune.errors import UserError, requoted_command, safe_line
from autotune.tuner.result import Progress as State
from autotune.words import plural

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from autotune.store import Activity, Store

PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines, to keep the log of a long search short."""
_SHOWN = 12
"""Number of a run's latest workloads in the table."""


def share_done(state: State) -> float:
    """Used share of the budget, 0 to 1: the larger of the shares of candidates and of time."""
    shares = [0.0, state.measured / state.trials if state.trials > 0 else 0.0]
    if state.left_s is not None and state.elapsed_s > 0:
        shares.append(state.elapsed_s / (state.elapsed_s + state.left_s))
    return 1.0 if state.phase == "done" else min(max(shares), 1.0)


def seconds_left(state: State) -> float | None:
    """Seconds left at the rate so far, limited by the time budget; None while neither is known.

    A search may end earlier, if it makes no more progress.
    """
    left = [] if state.left_s is None else [state.left_s]
    if state.measured and state.trials > 0:
        left.append(max(state.trials - state.measured, 0) * state.elapsed_s / state.measured)
    return min(left) if left else None


def describe(state: State) -> str:
    """The state of one workload's search as a plain line."""
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
    """Display of one device's search: its workload's number and bar, and the latest state."""

    def __init__(self, number: int, task: TaskID | None, last: State) -> None:
        self.number, self.task, self.last = number, task, last
        self.printed: State | None = None
        self.when = 0.0


class ProgressDisplay:
    """Context manager that displays the states of a search. ``show`` is cheap enough to call for every candidate.

    Args:
        of: number of workloads to search, in turn on each device.
        stream: output stream; stderr by default.
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

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        for shown in self._devices.values():
            self._finish_line(shown)

    def show(self, state: State) -> None:
        """Show the search's state."""
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
        """The workload's device and number, such as ``[cuda:1 3/16] ``; a single device or workload is left out."""
        words = ([shown.last.device] if shown.last.device else []) + ([f"{shown.number}/{self._of}"] * (self._of > 1))
        return f"[{' '.join(words)}] " if words else ""

    def _finish_line(self, shown: _Shown) -> None:
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


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "watch",
        help="show the progress of running searches, also on other hosts",
        description="Show the progress of running searches from the database: workloads begun, candidates measured,"
        " the best time so far, failures, and candidates per minute. If no search is running, show the latest one."
        " Stop with Ctrl-C.",
    )
    parser.add_argument("--once", action="store_true", help="print the progress once and exit")
    about = "seconds between updates (default: 2)"
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="S", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object per update, each on one line")
    add_db(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch; returns 0, also if interrupted."""
    from autotune.store import Store

    with Store.open(args.db, migrate=False, readonly=True) as store:
        try:
            looks = _looks(store, args.interval, once=args.once)
            if args.json:
                for runs in looks:
                    print(json.dumps({"database": store.name, "runs": [r.to_json() for r in runs]}), flush=True)
            elif args.once or not sys.stdout.isatty():
                _print(store.name, looks)
            else:
                _live(store.name, looks)
        except KeyboardInterrupt:
            pass
    return 0


def _looks(store: Store, interval: float, *, once: bool) -> Iterator[Sequence[Activity]]:
    yield store.activity()  # an error in the first read is raised
    while not once:
        time.sleep(interval)
        try:
            yield store.activity()
        except UserError as error:
            print(f"autotune: {safe_line(error)}; trying again", file=sys.stderr, flush=True)


def _print(name: str, looks: Iterator[Sequence[Activity]]) -> None:
    before: object = None
    for runs in looks:
        now = [(r.run, r.state, r.measured, len(r.workloads)) for r in runs]
        if now != before:
            console().print(shown(name, runs))
            before = now


def _live(name: str, looks: Iterator[Sequence[Activity]]) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        for runs in looks:
            live.update(shown(name, runs), refresh=True)


def shown(name: str, runs: Sequence[Activity]) -> Group:
    """Runs as tables, each below a summary line."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    parts: list[Any] = [] if runs else [Text(f"No search has run in {name}.")]
    for run in runs:
        parts.append(Text(line(run)))
        parts.append(Text(f"  {requoted_command(run.command)}", style="dim"))
        if not run.workloads:
            continue
        table = ruled_table()
        table.add_column("workload", overflow="fold", min_width=12)
        table.add_column("device", overflow="fold", min_width=8)
        for column in ("measured", "failed", "best", "last"):
            table.add_column(column, justify="right", no_wrap=True)
        for w in run.workloads[-_SHOWN:]:
            ago = f"{clock(max(0.0, time.time() - w.last))} ago"
            cells = (str(w.measured), str(w.failed or "–"), microseconds(w.best_us), ago)
            table.add_row(escape(w.label or w.kind or w.workload[:12]), escape(w.device), *cells)
        parts.append(table)
        if len(run.workloads) > _SHOWN:
            parts.append(Text(f"  and {plural(len(run.workloads) - _SHOWN, 'workload')} before them"))
    return Group(*parts)


def line(run: Activity) -> str:
    """Summary line of a run."""
    took = clock((run.finished or time.time()) - run.started)
    rate = f", {run.rate:.1f} a minute" if run.state == "running" else ""
    failed = f", {run.failed} failed" if run.failed else ""
    begun = plural(len(run.workloads), "workload")
    host = f" on {run.host}" if run.host else ""
    return f"{run.state}{host}, {took}: {begun} begun, {plural(run.measured, 'candidate')} measured{failed}{rate}"
