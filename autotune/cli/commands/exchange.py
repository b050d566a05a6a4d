"""``autotune export`` and ``autotune import``, also in ``autotune db``: write and import snapshots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, add_json
from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.task import module_of
from autotune.words import plural
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Schedule, Store


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
    from autotune.store.snapshots.writer import export_snapshot

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
    """A predicate for the devices of ``--device``."""
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
