"""``autotune calibrate``: measure what the cost models need to know of a device, and how well they do."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.cli import domains
from autotune.cli.options import add_db, add_device, add_json
from autotune.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure a device for the cost models",
        description="Measure what the cost models need to know of a device (bandwidths, launches, rates; under a "
        "minute) and store it: the searches that follow use it. With --report nothing is measured, and the models' "
        "order is compared with everything the database has measured on the device.",
    )
    able = ", ".join(domains.names("calibrate"))
    parser.add_argument("domain", metavar="DOMAIN", choices=domains.names(), help=able)
    add_device(parser)
    domains.add_arguments("calibrate", parser)
    add_db(parser)
    parser.add_argument("--report", action="store_true", help="rank correlation of the models with the measurements")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate or report; returns 0, or 1 if nothing could be measured."""
    if args.domain not in (able := domains.names("calibrate")):
        raise UserError(f"{args.domain} has no cost model to calibrate; `autotune calibrate` takes {', '.join(able)}")
    code: int = domains.own("calibrate", args, args.domain).run(args)
    return code
