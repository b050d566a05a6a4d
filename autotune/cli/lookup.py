"""``autotune lookup``: what the database holds for a target."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autotune.cli.options import add_db, add_device, add_json, add_precision, add_scenario, add_target
from autotune.cli.output import TUNABLE, machine_output
from autotune.domains.c3.cli.scenario import refuse_scenario
from autotune.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "lookup",
        help="tell what is stored for a target",
        description="Tell what is stored for each region of a target and how well it fits: exact, other_rows (tuned "
        "for another number of rows) or none. For a c3 scenario: its strategy, and whether that was tuned for it "
        "(exact), for one of nearly its size (nearest), chosen by the devices' calibration (heuristic), or is the "
        "default. Nothing is measured and nothing is written.",
    )
    add_target(parser, required=False)
    add_scenario(parser)
    add_device(parser)
    add_db(parser)
    parser.add_argument("--strict", action="store_true", help="match driver and package versions exactly")
    add_precision(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look up; returns 0 whatever the match."""
    if args.domain == "c3":
        from autotune.domains.c3.cli import lookup as c3_lookup

        return c3_lookup.run(args)
    refuse_scenario(args)
    if not args.domain or not args.target:
        raise UserError(f"the following arguments are required: {'TARGET' if args.domain else 'DOMAIN, TARGET'}")
    with machine_output(args.json) as emit:
        from autotune.cli.report import print_table, total
        from autotune.device import resolve_device
        from autotune.domains.fusion.program_spec import resolve
        from autotune.ir.precision import asking
        from autotune.runtime.lookup import lookup

        device = resolve_device(args.device)
        fn, (inputs, kwargs), label = resolve(args.target, args.inputs, device)
        with asking(args.precision):
            found = lookup(fn, inputs, kwargs=kwargs, db=args.db, device=device, strict=args.strict, label=label)
        regions = []
        for matched, region in zip(found, found.to_json()["workloads"], strict=True):
            if matched.workload is not None:
                latency = region["latency_us"]
                best = None if latency is None else {"config": region["config"], "latency_us": latency}
                others = matched.schedule.others if matched.schedule else None
                regions.append({**region, "best": best, "deployed_us": latency, "others_busy": others})
        answer = total(label, device, regions)
        emit(answer)
        if not args.json:
            if regions:
                print_table(answer)
            else:
                print(f"{label} has no memory-intensive region that this version can tune: {TUNABLE}")
            if found.unsupported:
                reasons = sorted({region.reason for region in found if region.workload is None})
                print(f"{found.unsupported} more cannot be tuned: {'; '.join(reasons)}", file=sys.stderr)
    return 0
