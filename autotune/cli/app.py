"""The command ``autotune``: argument parsing, and the printing of a command's errors.

A command is a module with ``add_parser(subparsers)``, which sets ``run``, a function from the parsed arguments to the
exit code. Exit codes: 0 done, 1 the work failed (nothing could be measured), 2 a user error, 130 interrupted. These
modules import heavy packages (torch, SQLAlchemy, rich) inside ``run``, so that ``--help`` prints at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from autotune import __version__
from autotune.cli.commands import background, browser, calibrate, compare, db, lookup, plan, run, search, show, watch
from autotune.cli.options import DEFAULT, every_domain, named_domain
from autotune.errors import UserError, safe_line

COMMANDS = (
    search.add_parser,
    lookup.add_parser,
    compare.add_parser,
    plan.add_parser,
    run.add_parser,
    show.add_parser,
    watch.add_parser,
    background.add_parser,
    browser.add_parser,
    show.add_workloads,
    calibrate.add_parser,
    db.add_export,
    db.add_import,
    db.add_parser,
)


TERMS = """\
terms:
  target      a program (package.module:callable) or a built-in workload
  workload    what one search optimizes: a region of a program, a c3 scenario,
              a matrix product, or your own kernel with a key
  region      operators of a program that are tuned together
  candidate   a configuration that a search measures
  schedule    the stored result of a workload's search: its best configuration
              with compiled kernels, or the faster baseline
  step        one call of a program, in training with its backward pass; a
              step of a running program includes its optimizer
  verdict     the stored result of timing a step: the regions of the step that
              run stored kernels, and those left to Inductor
  miss        a workload that a program needed and the database lacked"""
"""The words of all messages, in the order in which a user meets them."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations and with one-line errors; a command's own parser reports surplus words."""

    def __init__(self, *args: Any, command: str = "", **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self._command, self._named = command, self.prog
        """This command's name, if it takes a domain; and the command whose ``--help`` errors refer to."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which would report a command's unknown arguments from the top-level parser."""
        if self._command:
            self._add_own(args or [])
        known, surplus = super().parse_known_args(args, namespace)
        if len(surplus) == 1 and surplus[0][:1] != "-" and getattr(known, "target", "") is None:
            known.target = surplus.pop()  # before Python 3.14 argparse takes no optional word behind an option
        if surplus:
            self.error(f"unrecognized arguments: {' '.join(surplus)}")
        return known, surplus

    def _add_own(self, words: Sequence[str]) -> None:
        """Add the options of the named or the default domain. ``--help`` without a domain shows no domain's options."""
        command, self._command = self._command, ""
        names = next(action.choices for action in self._actions if action.dest == "domain")
        name = named_domain(self, words, list(names or ()))
        if name is None and {"-h", "--help"}.intersection(words):
            self.epilog = f"`autotune {command} DOMAIN --help` also shows the options of that domain."
        elif (domain := every_domain().get(name or DEFAULT)) is not None:
            domain.add_arguments(command, self)
            self._named += f" {name}" if name else ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {safe_line(message)} (see {self._named} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = Parser(
        prog="autotune",
        description=(
            "Search fast kernels for a program, store them in an SQL database, and use them\nin every later process."
        ),
        epilog=f"{TERMS}\n\nStart with: autotune search fusion layer_norm",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"autotune {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_parser in COMMANDS:
        add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] = build_parser) -> int:
    """Run one command and return its exit code; argparse's own errors and ``--help`` raise SystemExit.

    Args:
        parser: builds the parser, for programs with their own commands.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name may not be valid in the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    args = None
    try:
        args = parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"autotune: {safe_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        stored = "all measurements are stored: run the same command again to continue"
        print(f"autotune: interrupted; {stored if args else 'nothing was begun'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _give_up_stdout()  # the reader (`| head`) has exited
        return 0
    except OSError as error:
        if error.errno not in _FULL or not _stdout_fails():
            raise
        _give_up_stdout()
        print(f"autotune: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _stdout_fails() -> bool:
    """Return True if stdout cannot be written, rather than some other file."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _give_up_stdout() -> None:
    """Redirect stdout to /dev/null: Python flushes it once more at exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
