"""``autotune import``, or ``autotune db import``: add a snapshot to the database."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autotune.cli.options import add_db, add_json
from autotune.words import plural

SHOWN = 20
"""Conflicts that are printed; ``--json`` lists all."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "import",
        help="add a snapshot to the database",
        description="Add what a snapshot (autotune export) holds to the database: all of it, or nothing where the file "
        "is damaged. Where both have a schedule for the same workload, device, software and way of measuring, the "
        "faster stays, and the other's latency is kept as a measurement. Their code will run here: import only what "
        "comes from someone whose programs you would run.",
    )
    parser.add_argument("file", metavar="FILE", help="the snapshot")
    about = "public key (PEM) that a snapshot must be signed with (default: $AUTOTUNE_KEY, else none)"
    parser.add_argument("--key", metavar="KEYFILE", help=about)
    add_db(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import; returns 0."""
    from autotune.store import Store
    from autotune.store.connection.urls import parse_url, show_url
    from autotune.store.merge import checked
    from autotune.store.opening import pinned_key

    # The file first: one that is refused makes no database.
    incoming = checked(args.file, key=pinned_key(args.key))
    found, name = Store.fill(args.db, incoming.into), show_url(parse_url(args.db))
    if args.json:
        counts = {"schedules": incoming.schedules, "stored": found.rows["schedules"]}
        print(json.dumps({"file": args.file, "database": name, **counts, "conflicts": found.conflicts}))
        return 0
    print(f"{args.file}: {plural(incoming.schedules, 'schedule')}, {found.rows['schedules']} stored in {name}")
    for line in found.conflicts[:SHOWN]:
        print(f"conflict: {line}")
    if len(found.conflicts) > SHOWN:
        print(f"and {len(found.conflicts) - SHOWN} more conflicts: --json lists them")
    return 0
