"""``autotune db prune``: remove what is not needed any more."""

from __future__ import annotations

import argparse
import json
import re
import time
from datetime import datetime
from typing import Any

from autotune.cli.options import add_db, add_json
from autotune.errors import UserError

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


def add_parser(commands: Any) -> None:
    """Add ``prune`` to the commands of ``autotune db``."""
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
