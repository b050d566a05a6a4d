"""Arguments that several commands share, and the checks that need nothing but the text."""

from __future__ import annotations

import argparse
import math

from autotune.task import DOMAINS

JSON_HELP = "print one JSON object on stdout, and nothing else there"
DB_HELP = "database URL or SQLite file (default: $AUTOTUNE_DB, else a file in the user data directory)"


def positive_int(text: str) -> int:
    """argparse type: an integer of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def natural_int(text: str) -> int:
    """argparse type: an integer of 0 or more, as samplers take for a seed (below 2**32)."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return value


def seconds(text: str) -> float:
    """argparse type: a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def add_target(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The positional ``DOMAIN TARGET`` and ``--inputs``."""
    nargs = None if required else "?"
    parser.add_argument(
        "domain", metavar="DOMAIN", nargs=nargs, choices=sorted(DOMAINS), help=", ".join(sorted(DOMAINS))
    )
    about = "a built-in workload (`autotune workloads` lists them) or package.module:callable"
    parser.add_argument("target", metavar="TARGET", nargs=nargs, help=about)
    about = "package.module:callable that returns the example inputs of a TARGET of your own"
    parser.add_argument("--inputs", metavar="SPEC", help=about)


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument(
        "--device", default="auto", metavar="auto|cpu|cuda:N", help="where it runs (default: %(default)s)"
    )


def add_db(parser: argparse.ArgumentParser) -> None:
    """``--db``."""
    parser.add_argument("--db", metavar="URL", help=DB_HELP)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
