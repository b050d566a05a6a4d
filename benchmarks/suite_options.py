"""Options that suites share: those of regions and of C3, and those of whole programs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from autotune.cli.options import add_db, add_device, add_json, natural_int, positive_int, seconds
from autotune.errors import UserError
from autotune.files import check_output


def add_options(parser: argparse.ArgumentParser, suite: str) -> None:
    """Add what every suite takes."""
    add_device(parser)
    parser.add_argument("--out", metavar="FILE", default=f"bench-{suite}.json", help="the JSON file")
    parser.add_argument("--cases", metavar="A,B,...", type=names, default=[], help="cases or kinds (default: all)")
    parser.add_argument("--trials", type=positive_int, metavar="N", help="candidates to measure for each region")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="seconds to search for each case")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the sampler (default: 0)")
    add_db(parser)
    parser.add_argument("--resume", action="store_true", help="keep the cases that FILE has and run the others")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--no-search", action="store_true", help="measure with what the database holds")
    parts.add_argument("--search-only", action="store_true", help="fill the database and measure nothing")
    parser.add_argument("--list", action="store_true", help="list the cases and run nothing")
    add_json(parser)


def program_parser(
    prog: str, about: str | None, what: str, *, rounds: int, timeout_s: float
) -> argparse.ArgumentParser:
    """A parser with the options of suites of whole programs.

    Args:
        prog: the module of the command.
        about: of the command.
        what: one of its cases, such as "model".
        rounds: default of ``--rounds``.
        timeout_s: default of ``--timeout``.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=f"python -m {prog}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help=f"show the {what}s and end")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: the first GPU, else the CPU)")
    parser.add_argument("--tiny", action="store_true", help="small versions, to try the benchmark itself on a CPU")
    parser.add_argument("--rounds", type=positive_int, default=rounds, help="of timing in turn (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=seconds, default=timeout_s, metavar="S", help=f"for a {what} (default: %(default)g)"
    )
    parser.add_argument("--beside", type=positive_int, default=1, metavar="N", help=f"{what}s at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="result file; what is in it is kept")
    return parser


def names(text: str) -> list[str]:
    """argparse type: words by comma."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("no name is given")
    return found


def result_file(args: argparse.Namespace) -> Path:
    """``--out``. Raises UserError before anything is measured where it cannot be written."""
    out = Path(args.out)
    if out.suffix != ".json":
        raise UserError(f"--out {out}: name a file that ends in .json; the table goes beside it as .md")
    if args.list or args.search_only:
        return out
    check_output(out, f"--out {out}", make=True)  # before the measuring, which takes minutes
    table = out.with_suffix(".md")
    check_output(table, f"--out {out}: the table beside it, {table.name}")
    return out


def command(module: str, args: argparse.Namespace, options: Sequence[str], flags: Sequence[str]) -> str:
    """The command to note in a result file, without the database's URL, which may hold a password."""
    words = ["python", "-m", module]
    for name in options:
        value = getattr(args, name)
        if value is not None and value != []:
            words += [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]
    words += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    return shlex.join(words)
