"""``autotune db``: create, inspect and move the database."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autotune.cli.commands import db_removal, export, import_
from autotune.cli.options import add_db, add_json


def add_parser(subparsers: Any) -> None:
    """Add ``db`` and its commands to the command line."""
    parser = subparsers.add_parser(
        "db", help="create, inspect and move the database", description="Create, inspect and move the database."
    )
    commands = parser.add_subparsers(dest="db_command", metavar="COMMAND", required=True)
    for name, run, text in (
        ("upgrade", upgrade, "create the tables or bring them to this version"),
        ("current", current, "print the revision of the tables"),
        ("stats", stats, "print sizes, counts and speedups"),
        ("verify", verify, "look for damaged rows: print a line for each; exit code 1 where there are any"),
        ("merge", merge, "take over what another database holds; the better of two measurements or schedules stays"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_db(command)
        add_json(command)
        if name == "merge":
            command.add_argument("other", metavar="URL", help="the other database: a URL or an SQLite file")
        command.set_defaults(run=run)
    export.add_parser(commands)
    import_.add_parser(commands)
    db_removal.add_parsers(commands)


def upgrade(args: argparse.Namespace) -> int:
    from autotune.store.connection import migrate
    from autotune.store.connection.urls import parse_url, show_url

    before = migrate.current(args.db)
    after = migrate.upgrade(args.db)
    name = show_url(parse_url(args.db))
    _print(
        args,
        {"database": name, "before": before, "revision": after},
        f"{name}: at revision {after} already" if before == after else f"{name}: {before or 'empty'} -> {after}",
    )
    return 0


def current(args: argparse.Namespace) -> int:
    from autotune.store.connection import migrate
    from autotune.store.connection.urls import parse_url, show_url

    revision, head = migrate.current(args.db), migrate.head()
    name = show_url(parse_url(args.db))
    note = "" if revision == head else f" (this version of autotune wants {head}: run `autotune db upgrade`)"
    _print(
        args,
        {"database": name, "revision": revision, "head": head},
        f"{name}: {revision or 'no autotune tables'}{note}",
    )
    return 0


def stats(args: argparse.Namespace) -> int:
    from autotune.store import Store

    with Store.open(args.db, migrate=False, readonly=True) as store:
        found = store.stats()
    lines = [
        f"database      {found['database']} (revision {found['revision']}, {found['bytes'] / 2**20:.1f} MiB)",
        f"workloads     {found['rows']['autotune_workloads']}, {found['rows']['autotune_misses']} missed and waiting",
        f"measurements  {found['rows']['autotune_measurements']}"
        + "".join(f", {n} {status}" for status, n in sorted(found["measurements"].items())),
        f"schedules     {found['rows']['autotune_schedules']}, {found['rows']['autotune_blobs']} kernels of code",
        f"runs          {found['rows']['autotune_runs']}, {found['claims']} candidates being measured",
    ]
    if found["speedup_geomean"]:
        lines.append(
            f"speedup       {found['speedup_geomean']:.2f}x in the geometric mean over the best baseline, "
            f"{found['speedup_best']:.2f}x at best"
        )
    if found["busy"]:
        lines.append(
            f"busy          {found['busy']} compared while other processes kept the machine busy, not counted as "
            "speedups: search them again"
        )
    _print(args, found, "\n".join(lines))
    return 0


def verify(args: argparse.Namespace) -> int:
    from autotune.store import Store
    from autotune.store.upkeep import damage

    count, found = 0, []
    with Store.open(args.db, migrate=False, readonly=True) as store:
        for line in damage(store):
            count += 1
            if args.json:
                found.append(line)
            else:
                print(line, flush=True)
        name = store.name
    told = f"{count} damaged rows" if count != 1 else "1 damaged row"
    _print(args, {"database": name, "damaged": found}, f"{name}: {told if count else 'no damaged row'}")
    return 1 if count else 0


def merge(args: argparse.Namespace) -> int:
    from autotune.store import Store
    from autotune.store.connection.urls import parse_url, show_url
    from autotune.store.merge import merge

    with Store.open(args.other, migrate=False, readonly=True) as other:
        found = Store.fill(args.db, lambda store: merge(store, other))
        here, there = show_url(parse_url(args.db)), other.name
    data = {"database": here, "other": there, "rows": found.rows, "conflicts": found.conflicts,
            "left_out": found.left_out}  # fmt: skip
    taken = ", ".join(f"{count} {table}" for table, count in found.rows.items() if count)
    lines = [
        *(f"conflict: {line}" for line in found.conflicts),
        *(f"left out: {line}" for line in found.left_out),
        f"{there} into {here}: {taken or 'nothing new'}; {len(found.conflicts)} conflicts",
    ]
    _print(args, data, "\n".join(lines))
    return 0


def _print(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    print(json.dumps(data) if args.json else text)
