"""``autotune bench``: run a suite against the peers that are there, and write down what came out."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.cli import domains
from autotune.cli.options import add_db, add_device, add_json, natural_int, positive_int, seconds


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="run a benchmark suite against eager, Inductor and XLA",
        description="Search every case of a suite, then time what is deployed beside eager, Inductor (by default and "
        "with the options that help it) and XLA, in one process, in turn. The suite c3 compares, for each scenario, "
        "naive overlap, the best issue order, SM partition and copy-engine strategy, and the tuned one with the ideal. "
        "The JSON file and a Markdown table beside it (for c3 pictures too) are written anew after every case.",
    )
    suites = domains.names("bench")
    parser.add_argument("suite", metavar="SUITE", choices=suites, help=", ".join(suites))
    add_device(parser)
    parser.add_argument("--size", choices=["gpu", "cpu"], help="of fusion's inputs (default: as the device)")
    parser.add_argument("--out", metavar="FILE", help="the JSON file (default: bench-SUITE.json)")
    about = (
        "cases to run, or kinds: forward, backward, mixed; of c3 collectives, classes, COLLECTIVE.CLASS (default: all)"
    )
    parser.add_argument("--cases", metavar="A,B,...", type=_names, default=[], help=about)
    about = "what to measure besides autotune: eager, inductor, inductor-best, xla, names of option sets (default: all)"
    parser.add_argument("--peers", metavar="A,B,...", type=_names, help=about)
    about = "searches that lack a part, to be measured beside the full one"
    parser.add_argument("--ablation", metavar="A,B,...", type=_names, default=[], help=about)
    parser.add_argument("--trials", type=positive_int, metavar="N", help="candidates to measure for each region")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="seconds to search for each case")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the sampler (default: 0)")
    add_db(parser)
    about = "cases to prepare and measure side by side, on a GPU; they take turns on the device (default: 1)"
    parser.add_argument("--jobs", type=positive_int, metavar="N", help=about)
    parser.add_argument("--resume", action="store_true", help="keep the cases that FILE has and run the others")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--no-search", action="store_true", help="measure with what the database holds")
    parts.add_argument("--search-only", action="store_true", help="fill the database and measure nothing")
    parser.add_argument("--list", action="store_true", help="list the cases and run nothing")
    domains.add_arguments("bench", parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("no name is given")
    return names


def run(args: argparse.Namespace) -> int:
    """Run the suite; returns 0, or 1 if a case could not be measured."""
    code: int = domains.own("bench", args, args.suite).run(args)
    return code
