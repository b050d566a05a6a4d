"""``autotune run``: run a script that uses ``torch.compile`` with stored kernels and a search in its first step."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from autotune.cli.options import add_db, seconds
from autotune.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="run an unchanged script with autotune in place of Inductor",
        description="Run an unchanged Python script. Each call of torch.compile without a backend or with Inductor, in"
        " the script or in a library such as transformers' Trainer, uses autotune's backend. So do Python processes"
        " that the script starts. With --search, the script's first step also searches the workloads that the database"
        " lacks. On several ranks, run `AUTOTUNE_SEARCH=S torchrun -m autotune.in_program SCRIPT`.",
    )
    about = "seconds that searches may add to the script (default: $AUTOTUNE_SEARCH, else no search)"
    parser.add_argument("--search", type=seconds, metavar="S", help=about)
    add_db(parser)
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is a module's name, as in `python -m`")
    about = "the script and its arguments, after the options of this command"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the script's, whose exit code is the command's.

    Raises:
        UserError: no script is named.
    """
    script = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not script:
        raise UserError("name a script: autotune run SCRIPT")
    own = {"AUTOTUNE_SEARCH": None if args.search is None else str(args.search), "AUTOTUNE_DB": args.db}
    env = {**os.environ, **{name: value for name, value in own.items() if value is not None}}
    sys.stdout.flush()
    sys.stderr.flush()
    words = [sys.executable, "-m", "autotune.in_program", *(["-m"] if args.module else []), *script]
    os.execve(sys.executable, words, env)
