"""Arguments that several commands share, look-up of the named domains, and argparse types."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from autotune.domain import Command, Domain, domain_of
from autotune.errors import UserError, quoted_command, safe_line
from autotune.task import domains

N = TypeVar("N", int, float)

JSON_HELP = "print one JSON object on stdout and nothing else"
DB_HELP = "database URL or SQLite file (default: $AUTOTUNE_DB, else a file in the user data directory)"
DEFAULT = "fusion"
"""The domain of a command without one."""


def every_domain() -> dict[str, Domain]:
    """The domains by name, the default one first, without those that cannot be imported."""
    found = {}
    for name in sorted(domains(), key=lambda name: (name != DEFAULT, name)):
        try:
            found[name] = domain_of(name)
        except (ImportError, UserError):
            continue
    return found


def command_of(name: str | None, command: str) -> Command | None:
    """A domain's own ``command`` (None names the default domain); None for the general command.

    Raises:
        UserError: the domain's module cannot be imported.
    """
    name = name or DEFAULT
    try:
        return domain_of(name).command(command)
    except ImportError as error:
        raise UserError(f"cannot import the domain {name!r}: {safe_line(error)}") from error


def domains_with(command: str) -> list[str]:
    """The domains with their own version of a command."""
    return [name for name, domain in every_domain().items() if domain.command(command) is not None]


def named_domain(parser: argparse.ArgumentParser, words: Sequence[str], names: Sequence[str]) -> str | None:
    """The domain that a command line names: the first word that is a domain's name and not an option's value."""
    before = ""
    for word in words:
        option = parser._option_string_actions.get(before)
        is_value = before.startswith("-") and "=" not in before and (option is None or option.nargs != 0)
        if word in names and not is_value:
            return word
        before = word
    return names[0] if len(names) == 1 else None


def _checked(kind: Callable[[str], N], allowed: Callable[[N], bool], what: str) -> Callable[[str], N]:
    """An argparse type: a number of ``kind`` that is allowed; ``what`` is its description in the error."""

    def convert(text: str) -> N:
        with contextlib.suppress(ValueError):
            if allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return convert


positive_int = _checked(int, lambda n: n >= 1, "a whole number of 1 or more")
natural_int = _checked(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 2**32 - 1")
seconds = _checked(float, lambda s: 0 < s < math.inf, "a number of seconds above 0")
share = _checked(float, lambda x: 0 <= x < 1, "a share from 0 to 1, such as 0.03")


def modes(text: str) -> list[str]:
    """argparse type: names separated by commas, which :func:`check_modes` checks when torch may be imported."""
    return text.split(",")


def check_modes(names: Sequence[str]) -> None:
    """Check that ``torch.compile`` has these modes.

    Raises:
        UserError: an unknown mode.
    """
    from torch._inductor import list_mode_options

    known = list_mode_options()
    for mode in names:
        if mode not in known:
            raise UserError(f"torch.compile has no mode {mode!r}; its modes are {', '.join(known)}")


def add_target(parser: argparse.ArgumentParser, *, required: bool = True, names: Sequence[str] = ()) -> None:
    """Add the positional ``DOMAIN TARGET`` and ``--inputs``; ``names`` are the allowed domains, empty for all."""
    names = list(names) or sorted(domains())
    nargs = None if required else "?"
    parser.add_argument("domain", metavar="DOMAIN", nargs=nargs, choices=names, help=", ".join(names))
    about = (
        "a built-in workload (`autotune workloads` lists them), package.module:callable, or a quoted call that returns"
        " the callable, such as \"package.module:make('bert', layers=4)\""
    )
    parser.add_argument("target", metavar="TARGET", nargs=nargs, help=about)
    about = "package.module:callable that returns the example inputs of your own TARGET (c3: of --compute)"
    parser.add_argument("--inputs", metavar="SPEC", help=about)


def command_line(command: str, args: argparse.Namespace) -> str:
    """A command on the target of ``args`` with its options, for the user to paste.

    The URL of a database server, which may contain a password, becomes a placeholder.
    """
    from autotune.store.connection.urls import for_command

    words = ["autotune", command, args.domain or DEFAULT, args.target]
    words += ["--inputs", args.inputs] if args.inputs else []
    words += ["--train"] if args.train else []
    for name in ("precision", "matmul_precision"):
        if value := getattr(args, name, None):
            words += [f"--{name.replace('_', '-')}", value]
    device = args.device.partition(",")[0]
    words += ["--device", device] if device != "auto" else []
    words += ["--db", for_command(args.db)] if args.db else []
    return quoted_command(*words)


def add_device(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add ``--device``, with ``more`` in its help."""
    about = f"device to use (default: %(default)s){more}"
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:N", help=about)


def add_db(parser: argparse.ArgumentParser) -> None:
    """Add ``--db``."""
    parser.add_argument("--db", metavar="URL", help=DB_HELP)


def add_replica(parser: argparse.ArgumentParser) -> None:
    """Add ``--db-read``."""
    about = (
        "read from this copy of the database, such as a standby server, and write misses to the database itself"
        " (default: $AUTOTUNE_DB_READ if --db is not given, else none)"
    )
    parser.add_argument("--db-read", metavar="URL", help=about)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
