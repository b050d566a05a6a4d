"""``autotune lookup``: the stored schedules of a target."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, add_device, add_json, add_replica, add_target, command_of
from autotune.cli.output import machine_output
from autotune.domain import domain_of, identity_of
from autotune.errors import UserError, printable
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import Level, Outcome, Rung, on_other_devices, on_this_device, text
from autotune.store import attached

if TYPE_CHECKING:
    from autotune.runtime.lookup import LookupResult, RegionMatch


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "lookup",
        command="lookup",
        help="show the stored schedules of a target",
        description="Show the schedule that each region of a target would run, and its match: exact (tuned for the "
        "region on this device), heuristic (predicted and timed once on this device, without a search), other_rows "
        "(tuned for another number of rows), other_device (tuned on another device of this architecture, which "
        "AUTOTUNE_OTHER_DEVICE=warn allows), packaged (included in autotune for this device) or none. For a c3 "
        "scenario, show its strategy: tuned for the scenario (exact), tuned for a scenario of similar size (nearest), "
        "or chosen by a rule (default). TARGET may also be the id of a stored region, which `autotune show` prints; "
        "no program is traced then. This command measures and writes nothing.",
    )
    add_target(parser, required=False)
    add_device(parser)
    add_db(parser)
    add_replica(parser)
    parser.add_argument("--strict", action="store_true", help="require the same driver and package versions")
    about = "show each rung of the look-up's ladder: what it found, and the fields that do not match"
    parser.add_argument("--explain", action="store_true", help=about)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look up; returns 0 for every match level."""
    if (own := command_of(args.domain, "lookup")) is not None:
        return own(args)
    check_target(args)
    with machine_output(args.json) as emit:
        from autotune.cli.output import print_table
        from autotune.device import environment, resolve_device
        from autotune.runtime.lookup import LookupResult, RegionMatch

        device = resolve_device(args.device)
        rules = deployment().settings
        how: Any = "strict" if args.strict else rules.environment
        counted = domain_of(args.domain).workloads_of(args.target, args.inputs)
        found = []
        with attached(args.db, args.db_read) as store:
            for workload, count in counted:
                where, env = identity_of(workload, device), environment(device)
                name = where.fingerprint
                schedule = None if store is None else store.get_schedule(workload.fingerprint, name, env, match=how)
                level, why = (Level.EXACT, "") if schedule else (Level.NONE, "not tuned on this device")
                ladder: tuple[Rung, ...] = ()
                if args.explain and schedule is not None:
                    ladder = (Rung("exact", Outcome.TAKEN, "tuned for it on this device"),)
                elif args.explain and store is not None:
                    elsewhere = on_other_devices(workload, store, where, False, "refuse")
                    ladder = (on_this_device(workload, store, where, env, why), elsewhere)
                tuned = workload if schedule else None
                found.append(RegionMatch(workload, level, schedule, tuned, why, count, ladder))
        answer = answer_of(args.target, device, LookupResult(tuple(found), device))
        emit(answer)
        if not args.json:
            print_table(answer)
            print_ladders(found)
    return 0


def print_ladders(found: Iterable[RegionMatch]) -> None:
    """Print the ladder of each region that has one, once for all regions with the same."""
    labels: dict[tuple[Rung, ...], list[str]] = {}
    for region in found:
        if region.ladder and region.workload is not None:
            labels.setdefault(region.ladder, []).append(region.workload.label or region.workload.fingerprint[:12])
    for ladder, names in labels.items():
        print(*("", *map(printable, text(", ".join(names), ladder).splitlines())), sep="\n")


def check_target(args: argparse.Namespace) -> None:
    """Raise UserError if the target is missing."""
    if not args.domain or not args.target:
        raise UserError(f"the following arguments are required: {'TARGET' if args.domain else 'DOMAIN, TARGET'}")


def answer_of(label: str, device: str, found: LookupResult) -> dict[str, Any]:
    """The JSON object of a target's stored schedules."""
    from autotune.cli.output import total

    regions = []
    for matched, region in zip(found, found.to_json()["workloads"], strict=True):
        if matched.workload is not None:
            latency = region["latency_us"]
            best = None if latency is None else {"config": region["config"], "latency_us": latency}
            others = matched.schedule.others if matched.schedule else None
            regions.append({**region, "best": best, "deployed_us": latency, "others_busy": others})
    return total(label, device, regions)
