"""``autotune record``: measure every candidate of a workload's space, for searches to be replayed."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, add_device, natural_int
from autotune.errors import UserError, printable, told

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.workload import Workload


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "record",
        help="measure every candidate of a workload's space, for `autotune replay`",
        description="Measure every candidate of the search space of workloads that the database holds (`autotune show`"
        " lists them), and write what became of each into a file for each workload. Measurements are stored as a "
        "search's are: the same command goes on where it was interrupted.",
    )
    about = "a workload's id as `autotune show` prints it, or its whole label"
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="+", help=about)
    about = "a narrowed copy of search_spaces/DOMAIN.toml: every candidate in it is measured"
    parser.add_argument("--space", metavar="FILE", help=about)
    parser.add_argument("--out", metavar="FOLDER", default=".", help="where the files go (default: here)")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the order and of random inputs")
    add_device(parser)
    add_db(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record; returns 0, 1 where something was left unmeasured, or 130 if it was interrupted."""
    from autotune.device import resolve_device
    from autotune.outputs import check_output
    from autotune.store import Store
    from autotune.task import policy_for
    from autotune.tuner.context import Context
    from autotune.tuner.replay.record import record
    from autotune.tuner.replay.recording import SUFFIX
    from autotune.tuner.session import Lease

    device, folder, whole = resolve_device(args.device), Path(args.out), True
    Store.open(args.db, migrate=False, readonly=True).close()  # one that is not there has no workload, and is not made
    with Store.open(args.db) as store:
        workloads = [_found(store, name) for name in args.workloads]
        check_output(folder / f"x{SUFFIX}", f"--out {folder}", make=True)
        for workload in workloads:
            context = Context(store, device, policy_for(workload, device), space_file=args.space, seed=args.seed)
            try:
                with context.interrupt, Lease(store, context.owner):
                    made = record(context, workload)
            finally:
                context.close()
            if context.interrupt.requested:
                raise KeyboardInterrupt
            if isinstance(made, str):
                print(f"autotune: NOT RECORDED: {printable(workload.label)}: {made}", file=sys.stderr)
                whole = False
                continue
            path = folder / f"{_file_name(workload)}{SUFFIX}"
            made.save(path)
            print(f"{path}: {len(made.rows)} candidates, {made.optimum_us:.1f} us the best of them")
    return 0 if whole else 1


def _found(store: Store, name: str) -> Workload:
    """The workload of an id or a label."""
    from autotune.task import domain_hook

    near = store.find_workloads(name)
    found = [w for w in near if w.label == name or (len(name) > 3 and w.fingerprint.startswith(name))]
    if not found:
        raise UserError(f"{store.name} has no workload {name!r}: `autotune show` lists them, a search adds its own")
    if len(found) > 1:
        raise UserError(f"{name!r} is several workloads: name one by its id, {found[0].fingerprint[:12]} say")
    damage = domain_hook(found[0].kind, "damage")
    if damage and (why := damage(found[0])):
        raise UserError(f"{found[0].fingerprint[:12]} may not be measured: {told(why, 500)}")
    return found[0]


def _file_name(workload: Workload) -> str:
    """The label as a file's name; labels come from databases, and may hold anything."""
    words = re.sub(r"[^A-Za-z0-9.]+", "_", workload.label).strip("._")[:80]
    return f"{words or workload.kind}-{workload.fingerprint[:8]}"
