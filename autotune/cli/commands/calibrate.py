"""``autotune calibrate``: measure the parameters of the cost models on a device."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.cli.options import add_db, add_device, add_json, command_of, domains_with, every_domain
from autotune.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        command="calibrate",
        help="measure a device for the cost models",
        description="Measure the bandwidths, launch times and arithmetic rates of a device for the cost models, in "
        "under a minute, and store them for later searches.",
    )
    able = ", ".join(domains_with("calibrate"))
    parser.add_argument("domain", metavar="DOMAIN", choices=list(every_domain()), help=able)
    add_device(parser)
    add_db(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns 0, or 1 if nothing could be measured."""
    own = command_of(args.domain, "calibrate")
    if own is None:
        takes = ", ".join(domains_with("calibrate"))
        raise UserError(f"{args.domain} has no cost model to calibrate; `autotune calibrate` takes {takes}")
    return own(args)
