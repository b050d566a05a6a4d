"""``autotune show``: what is in the database."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from autotune.cli.options import add_db, add_json


def add_parser(subparsers: Any) -> None:
    """Add ``show`` to the command line."""
    parser = subparsers.add_parser("show", help="list what the database holds", description="List what was tuned.")
    add_db(parser)
    add_json(parser)
    parser.set_defaults(run=show)


def show(args: argparse.Namespace) -> int:
    """Print one line for each workload and device, newest first, and what was missed."""
    from autotune.store import Store

    with Store.open(args.db, migrate=False, readonly=True) as store:
        rows, misses, name = store.overview(), store.misses(), store.name
        labels = {w.fingerprint: w.label for w in store.find_workloads()} if misses else {}
    if args.json:
        missed = [
            {"workload": m.workload, "label": labels.get(m.workload, ""), "device": m.device, "count": m.count,
             "reason": m.reason} for m in misses
        ]  # fmt: skip
        print(json.dumps({"database": name, "tuned": [r.to_json() for r in rows], "missed": missed}))
        return 0
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Piped, there is no edge of a terminal to wrap at.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if not rows:
        console.print(f"Nothing is tuned yet in {name}.", markup=False, highlight=False, soft_wrap=True)
    else:
        table = Table(
            title=escape(name), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        table.add_column("workload", overflow="fold", min_width=12)
        table.add_column("id", no_wrap=True)
        table.add_column("device", overflow="fold", min_width=8)
        for column in ("tried", "failed", "best us", "baselines us", "speedup"):
            table.add_column(column, justify="right", no_wrap=True)
        for r in rows:
            failed = sum(r.failed.values())
            best = "-" if r.best_us is None else f"{r.best_us:.2f}"
            table.add_row(
                escape(r.label or r.kind),
                r.workload[:8],
                escape(r.device_name or r.device[:8]),
                str(r.measured),
                str(failed) if failed else "-",
                best if r.winner in (None, "autotune") else f"{best} ({escape(r.winner)})",
                "\n".join(f"{escape(n)} {us:.2f}" for n, us in sorted(r.baselines.items())) or "-",
                "-" if r.speedup is None else f"{r.speedup:.2f}x",
            )
        console.print(table)
    if misses:
        what = "workload was" if len(misses) == 1 else "workloads were"
        console.print(f"{len(misses)} {what} met at deploy time without a schedule: `autotune search --missed`.")
    return 0
