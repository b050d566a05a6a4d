"""``autotune workloads``: the built-in targets."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.cli.options import add_json, every_domain
from autotune.cli.output import console, machine_output


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "workloads", help="list the built-in targets", description="List the built-in targets."
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print names and descriptions."""
    with machine_output(args.json) as emit:
        rows = [
            {"domain": kind, "name": name, "about": about}
            for kind, domain in every_domain().items()
            for name, about in domain.targets().items()
        ]
        emit({"workloads": rows})
        if not args.json:
            _table(rows)
    return 0


def _table(rows: list[dict[str, str]]) -> None:
    from rich.table import Table

    table = Table("domain", "name", "computes", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["domain"], row["name"], row["about"])
    console().print(table)
