"""``autotune db forget``: have failed candidates tried again."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autotune.cli.options import add_db, add_json
from autotune.task import Status

_STATUSES = ("compile_error", "launch_error", "wrong_result", "timeout", "crashed")


def add_parser(commands: Any) -> None:
    """Add ``forget`` to the commands of ``autotune db``."""
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
