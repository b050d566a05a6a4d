"""``autotune watch``: a running search as it goes, from the database alone."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, seconds
from autotune.cli.output import console, microseconds
from autotune.cli.progress import clock
from autotune.errors import UserError, pasted_again, told
from autotune.words import plural

if TYPE_CHECKING:
    from rich.console import Group

    from autotune.store import Activity, Store

_SHOWN = 12
"""Workloads of a run that are shown, the latest."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "watch",
        help="show a running search as it goes, also one on another host",
        description="Show what running searches do, from what they store: workloads begun, candidates measured, the"
        " best so far, failures, and candidates a minute. Where none runs, the newest run is shown. Ends with Ctrl-C.",
    )
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each look, a line each")
    add_db(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch; returns 0, when it is interrupted too."""
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
    """What runs, again and again. A server that is away for a while is waited for."""
    yield store.activity()  # a database that cannot be read at all is an error
    while not once:
        time.sleep(interval)
        try:
            yield store.activity()
        except UserError as error:
            print(f"autotune: {told(error)}; trying again", file=sys.stderr, flush=True)


def _print(name: str, looks: Iterator[Sequence[Activity]]) -> None:
    """As text, whenever something has changed."""
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
    """Runs as tables, under a line each."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [] if runs else [Text(f"No search has run in {name}.")]
    for run in runs:
        parts.append(Text(line(run)))
        parts.append(Text(f"  {pasted_again(run.command)}", style="dim"))
        if not run.workloads:
            continue
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
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
    """A run in one line."""
    took = clock((run.finished or time.time()) - run.started)
    rate = f", {run.rate:.1f} a minute" if run.state == "running" else ""
    failed = f", {run.failed} failed" if run.failed else ""
    begun = plural(len(run.workloads), "workload")
    host = f" on {run.host}" if run.host else ""
    return f"{run.state}{host}, {took}: {begun} begun, {plural(run.measured, 'candidate')} measured{failed}{rate}"
