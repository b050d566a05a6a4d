"""``autotune db forget`` and ``autotune db prune``: failures that are tried again, and what is not needed any more."""

from __future__ import annotations

import argparse
import json
import re
import time
from datetime import datetime
from typing import Any

from autotune.cli.options import add_db, add_json
from autotune.errors import UserError
from autotune.task import Status

_STATUSES = ("compile_error", "launch_error", "wrong_result", "timeout", "crashed")
_AGE = re.compile(r"(\d{1,6})([hdw])")
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def moment(text: str) -> float:
    """argparse type: a date as 2026-01-31 (or with a time, in ISO 8601), or an age as 12h, 30d or 8w; in seconds since
    the epoch."""
    if found := _AGE.fullmatch(text):
        return time.time() - int(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no date as 2026-01-31 and no age as 30d") from None


def add_parsers(commands: Any) -> None:
    """Add ``forget`` and ``prune`` to the commands of ``autotune db``."""
    parser = commands.add_parser(
        "forget",
        help="forget stored failures, so that the next search tries these candidates again",
        description="Forget stored failures, so that the next search tries these candidates again. What was measured, "
        "and what is deployed, stays. For failures that were the machine's: a full disk, lack of memory.",
    )
    add_db(parser)
    add_json(parser)
    about = "failures of this kind only; may be given several times (default: all)"
    parser.add_argument("--status", action="append", choices=_STATUSES, help=about)
    about = "of this workload only: its id, the beginning of it, or a part of its name, as `autotune show` lists them"
    parser.add_argument("--workload", default="", metavar="W", help=about)
    about = "those only whose stored reason has this in it, as 'No space left on device'"
    parser.add_argument("--reason", default="", metavar="TEXT", help=about)
    parser.set_defaults(run=forget)
    parser = commands.add_parser(
        "prune",
        help="remove old runs, failures, candidates and misses; tells what would go, and with --yes removes it",
        description="Remove what is not needed any more. Tells what would go, and with --yes removes it, together with "
        "configurations and code that nothing refers to any more. Schedules and their own measurements stay.",
    )
    add_db(parser)
    add_json(parser)
    parser.add_argument("--runs", action="store_true", help="runs that ended, and whose command was run again later")
    for name, about in (
        ("failures", "measurements of failures from before WHEN; searches may try these candidates again"),
        ("candidates", "measurements from before WHEN of candidates that lost: what is deployed was decided"),
        ("misses", "what deployments missed last before WHEN"),
    ):
        help = f"{about} (a date as 2026-01-31, or an age as 30d)"
        parser.add_argument(f"--{name}", type=moment, metavar="WHEN", help=help)
    parser.add_argument("--yes", action="store_true", help="remove it")
    parser.set_defaults(run=prune)


def forget(args: argparse.Namespace) -> int:
    """Forget; returns 0."""
    from autotune.store import Store
    from autotune.store.upkeep import forget_failures

    statuses = [Status(status) for status in args.status or _STATUSES]
    with Store.open(args.db, migrate=False) as store:
        found = forget_failures(store, statuses, workload=args.workload, reason=args.reason)
        count, workloads = sum(found.values()), len({key.workload for key in found})
        name = store.name
    data = {"database": name, "forgotten": count, "workloads": workloads}
    text = f"{name}: {count} failures of {workloads} workloads forgotten: the next search tries them again"
    print(json.dumps(data) if args.json else text if count else f"{name}: no such failure is stored")
    return 0


def prune(args: argparse.Namespace) -> int:
    """Prune; returns 0."""
    from autotune.store import Store
    from autotune.store.upkeep import Limits
    from autotune.store.upkeep import prune as remove

    limits = Limits(args.runs, args.failures, args.candidates, args.misses)
    if limits == Limits() and not args.yes:
        raise UserError("nothing is named to go: give --runs, --failures, --candidates or --misses")
    with Store.open(args.db, migrate=False, readonly=not args.yes) as store:
        counts, name = remove(store, limits, dry=not args.yes), store.name
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing"
    text = f"{name}: {told} removed" if args.yes else f"{name}: {told} would go; --yes removes it"
    print(json.dumps({"database": name, "removed": bool(args.yes), **counts}) if args.json else text)
    return 0
