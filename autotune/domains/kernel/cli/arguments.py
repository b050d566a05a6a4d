"""Options of the domain, for the commands that every domain shares."""

from __future__ import annotations

import argparse

from autotune.errors import UserError


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add ``--shapes`` to ``search`` and ``lookup``; ``lookup`` takes ``--space``, too."""
    if command not in ("search", "lookup"):
        return
    about = (
        "kernel: a file of what the inputs factory is called with, one for each key: tables [[shapes]] of TOML, or a"
        " JSON object a line (default: shapes= of the declaration)"
    )
    parser.add_argument("--shapes", metavar="FILE", help=about)
    if command == "lookup":
        parser.add_argument("--space", metavar="FILE", help="kernel: a TOML file that declares TARGET")


def refuse(command: str, args: argparse.Namespace) -> None:
    """Raise UserError where the options are given and another domain is meant."""
    if getattr(args, "shapes", None):
        raise UserError("--shapes is of kernel: leave it out")
    if command == "lookup" and getattr(args, "space", None):
        raise UserError("--space of lookup is of kernel: leave it out")
