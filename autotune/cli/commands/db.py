"""``autotune db``: create, inspect and move the database; forget failures, and remove unneeded data.

``autotune export`` and ``autotune import`` write and import snapshots; ``autotune db`` has them too.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, add_json
from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.task import FAILURES, Status, module_of
from autotune.words import plural
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Schedule, Store

_AGE = re.compile(r"(\d{1,6})([hdw])")
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def moment(text: str) -> float:
    """argparse type: seconds since the epoch.

    The text is a date such as 2026-01-31 (or with a time, in ISO 8601), or an age such as 12h, 30d or 8w.
    """
    if found := _AGE.fullmatch(text):
        return time.time() - int(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a date such as 2026-01-31 or an age such as 30d"
        ) from None


def add_parser(subparsers: Any) -> None:
    """Add ``db`` and its commands to the command line."""
    parser = subparsers.add_parser(
        "db",
        help="create, inspect, merge and clean databases",
        description="Create, inspect, merge and clean databases.",
    )
    commands = parser.add_subparsers(title="commands", dest="db_command", metavar="COMMAND", required=True)
    for name, run, text in (
        ("upgrade", upgrade, "create the tables, or migrate them to this version"),
        ("current", current, "print the revision of the tables"),
        ("stats", stats, "print sizes, counts and speedups"),
        ("verify", verify, "print a line for each damaged row; exit code 1 if there are any"),
        ("merge", merge, "add the contents of another database; the better measurement or schedule stays"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_db(command)
        add_json(command)
        if name == "merge":
            command.add_argument("other", metavar="URL", help="the other database: a URL or an SQLite file")
        command.set_defaults(run=run)
    add_export(commands)
    add_import(commands)
    _add_removal(commands)


def _add_removal(commands: Any) -> None:
    parser = commands.add_parser(
        "forget",
        help="delete stored failures, so that the next search tries their candidates again",
        description="Delete stored failures, so that the next search tries their candidates again. Measurements and "
        "schedules stay. Use it after failures of the machine, such as a full disk or too little memory.",
    )
    add_db(parser)
    add_json(parser)
    about = "only failures of this kind: %(choices)s; may be repeated (default: all)"
    kinds = list(map(str, FAILURES))
    parser.add_argument("--status", action="append", choices=kinds, metavar="KIND", help=about)
    about = "only failures of this workload: its id or the beginning of it, or a part of its name in `autotune show`"
    parser.add_argument("--workload", default="", metavar="W", help=about)
    about = "only failures whose reason contains TEXT, such as 'No space left on device'"
    parser.add_argument("--reason", default="", metavar="TEXT", help=about)
    parser.set_defaults(run=forget)
    parser = commands.add_parser(
        "prune",
        help="delete old runs, failures, candidates and misses",
        description="Count old data, and delete it with --yes, together with configurations and code without "
        "references. Schedules and their own measurements stay.",
    )
    add_db(parser)
    add_json(parser)
    parser.add_argument("--runs", action="store_true", help="finished runs whose command ran again later")
    for name, about in (
        ("failures", "failures measured before WHEN; searches may try their candidates again"),
        ("candidates", "measurements before WHEN of candidates that did not win"),
        ("misses", "misses whose last look-up was before WHEN"),
    ):
        help = f"{about} (a date such as 2026-01-31, or an age such as 30d)"
        parser.add_argument(f"--{name}", type=moment, metavar="WHEN", help=help)
    parser.add_argument("--yes", action="store_true", help="delete the data")
    parser.set_defaults(run=prune)


def upgrade(args: argparse.Namespace) -> int:
    from autotune.store.connection import migrate
    from autotune.store.connection.urls import parse_url, show_url

    before = migrate.current(args.db)
    after = migrate.upgrade(args.db)
    name = show_url(parse_url(args.db))
    _print(
        args,
        {"database": name, "before": before, "revision": after},
        f"{name}: already at revision {after}" if before == after else f"{name}: {before or 'empty'} -> {after}",
    )
    return 0


def current(args: argparse.Namespace) -> int:
    from autotune.store.connection import migrate
    from autotune.store.connection.urls import parse_url, show_url, upgrade_command

    revision, head = migrate.current(args.db), migrate.head()
    name = show_url(parse_url(args.db))
    note = (
        ""
        if revision == head
        else f" (this version of autotune needs {head}: run `{upgrade_command(parse_url(args.db))}`)"
    )
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
        f"workloads     {found['rows']['autotune_workloads']}, {found['rows']['autotune_misses']} missed",
        f"measurements  {found['rows']['autotune_measurements']}"
        + "".join(f", {n} {status}" for status, n in sorted(found["measurements"].items())),
        f"schedules     {found['rows']['autotune_schedules']}, {found['rows']['autotune_blobs']} compiled kernels",
        f"runs          {found['rows']['autotune_runs']}, {found['claims']} candidates being measured",
    ]
    if found["speedup_geomean"]:
        lines.append(
            f"speedup       {found['speedup_geomean']:.2f}x in the geometric mean over the best baseline, "
            f"{found['speedup_best']:.2f}x at best"
        )
    if found["busy"]:
        lines.append(
            f"busy          {plural(found['busy'], 'schedule')}, disturbed by other processes during the comparison, "
            "not counted as speedups: search again"
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
    _print(args, {"database": name, "damaged": found}, f"{name}: {plural(count, 'damaged row')}")
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


def forget(args: argparse.Namespace) -> int:
    """Forget; returns 0."""
    from autotune.store import Store
    from autotune.store.upkeep import forget_failures

    statuses = [Status(status) for status in args.status or FAILURES]
    with Store.open(args.db, migrate=False) as store:
        found = forget_failures(store, statuses, workload=args.workload, reason=args.reason)
        count, workloads = sum(found.values()), len({key.workload for key in found})
        name = store.name
    data = {"database": name, "forgotten": count, "workloads": workloads}
    text = f"{name}: deleted {count} failures of {workloads} workloads; the next search tries their candidates again"
    _print(args, data, text if count else f"{name}: no such failure is stored")
    return 0


def prune(args: argparse.Namespace) -> int:
    """Prune; returns 0."""
    from autotune.store import Store
    from autotune.store.upkeep import Limits
    from autotune.store.upkeep import prune as remove

    limits = Limits(args.runs, args.failures, args.candidates, args.misses)
    if limits == Limits() and not args.yes:
        raise UserError("name what to delete: --runs, --failures, --candidates or --misses")
    with Store.open(args.db, migrate=False, readonly=not args.yes) as store:
        counts, name = remove(store, limits, dry=not args.yes), store.name
    rows = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    text = f"deleted {rows}" if args.yes else f"would delete {rows}; add --yes to delete"
    text = f"{name}: {text if rows else 'nothing to delete'}"
    _print(args, {"database": name, "removed": bool(args.yes), **counts}, text)
    return 0


def _print(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    print(json.dumps(data) if args.json else text)


SHOWN = 20
"""Maximum number of conflicts printed; ``--json`` lists all."""


def add_export(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write a snapshot: one read-only file for deployment or import",
        description="Write a snapshot: one read-only file with the schedules, their kernels and the verdicts on steps. "
        "Deployment needs nothing else. autotune.load(FILE) or AUTOTUNE_DB=FILE deploys from it, and "
        "`autotune import FILE` adds it to another database.",
    )
    parser.add_argument("file", metavar="FILE", help="the snapshot to write, such as schedules.atdb")
    about = (
        "only schedules of this device: its name in `autotune show` or a part of it (H200), cpu or cuda for all devices"
        " of a kind, or cuda:N for a device of this machine"
    )
    parser.add_argument("--device", metavar="D", help=about)
    parser.add_argument("--domain", metavar="DOMAIN", help="only schedules of this domain, such as fusion")
    about = "only the schedules that a look-up would use, for each device and software"
    parser.add_argument("--only-best", action="store_true", help=about)
    about = (
        "include the programs of workloads, and the targets and commands of verdicts, for a move to another database"
        " of your own"
    )
    parser.add_argument("--programs", action="store_true", help=about)
    about = (
        "sign the snapshot with this private key (Ed25519, PEM); `openssl genpkey -algorithm ed25519 -out KEYFILE`"
        " makes one"
    )
    parser.add_argument("--sign", metavar="KEYFILE", help=about)
    add_db(parser)
    add_json(parser)
    parser.set_defaults(run=export)


def export(args: argparse.Namespace) -> int:
    """Export; returns 0."""
    from autotune.store import Store
    from autotune.store.snapshot_writer import export_snapshot

    if args.domain is not None:
        module_of(args.domain)  # raises UserError for an unknown domain
    with Store.open(args.db, migrate=False, readonly=True) as store:
        wanted = _wanted(args.device, store) if args.device else lambda device: True
        found = export_snapshot(
            store,
            args.file,
            device=wanted,
            domain=args.domain,
            only_best=args.only_best,
            programs=args.programs,
            key=args.sign,
            refuse=_refuse,
        )
    answer = {
        "file": args.file,
        "schedules": found.schedules,
        "verdicts": found.verdicts,
        "bytes": found.bytes,
        "digest": found.checksum,
        "signed": args.sign is not None,
        "left_out": list(found.left_out),
    }
    if args.json:
        print(json.dumps(answer))
        return 0
    size = f"{found.bytes / 2**20:.1f} MiB{', signed' if args.sign else ''}"
    print(f"{args.file}: {plural(found.schedules, 'schedule')}, {size}, digest {found.checksum}")
    for line in found.left_out:
        print(f"left out: {line}")
    return 0


def _wanted(text: str, store: Store) -> Callable[[DeviceIdentity], bool]:
    from autotune.device import identify

    if text in ("cpu", "cuda"):
        return lambda device: device.kind == text
    if text == "auto" or text.startswith("cuda:"):
        name = identify(text).fingerprint
        return lambda device: device.fingerprint == name
    stored = store.get_devices(s.key.device for s in store.schedules()).values()

    def fits(device: DeviceIdentity) -> bool:
        return text.lower() in device.label.lower() or device.fingerprint.startswith(text.lower())

    if not any(map(fits, stored)):
        there = "; ".join(sorted(device.label for device in stored)) or "none"
        raise UserError(f"--device {text}: the database has no schedules of such a device, only of: {there}")
    return fits


def _refuse(schedule: Schedule, workload: Workload, device: DeviceIdentity) -> str:
    """The reason why a schedule would not be deployed on the device it was tuned on; "" for none."""
    if workload.kind != "fusion":
        return ""
    from autotune.runtime.fitting import unfit

    return unfit(schedule, workload, device)


def add_import(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "import",
        help="add a snapshot to the database",
        description="Add the contents of a snapshot (`autotune export`) to the database, or nothing if the file is "
        "damaged. If both have a schedule for the same workload, device, software and measurement policy, the faster "
        "one stays, and the latency of the other is stored as a measurement. Programs will run the snapshot's code: "
        "import a snapshot only from someone whose programs you would run.",
    )
    parser.add_argument("file", metavar="FILE", help="the snapshot to add")
    about = "public key (PEM) that must verify the snapshot's signature (default: $AUTOTUNE_KEY, else none)"
    parser.add_argument("--key", metavar="KEYFILE", help=about)
    add_db(parser)
    add_json(parser)
    parser.set_defaults(run=import_)


def import_(args: argparse.Namespace) -> int:
    """Import; returns 0."""
    from autotune.store import Store
    from autotune.store.connection.urls import parse_url, show_url
    from autotune.store.merge import checked
    from autotune.store.opening import pinned_key

    # Check the file first: an invalid one must not create a database.
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
