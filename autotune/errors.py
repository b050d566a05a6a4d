"""Errors that cross module boundaries.

A :class:`UserError` is the user's to mend: the CLI prints its one line and exits with code 2. Everything else in this
module is an outcome of a candidate or of a region that the search records and survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """A mistake in what the user gave; ``str(error)`` is one line saying what is wrong and how to mend it."""


def first_line(error: BaseException) -> str:
    """An exception of the user's program as one line: its type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class Unsupported(Exception):
    """A region, group or operator that this version cannot express; the caller falls back and records the reason."""


class Unreachable(Unsupported):
    """No load can follow an index that several operators made together; whichever of them asked last is to blame."""


class Repeated(Unsupported):
    """A region would compute matrix products several times over, since they are read in several ways.

    ``nodes`` are these products.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        super().__init__("a product computed several times over")
        self.nodes = tuple(nodes)


class BuildError(Exception):
    """A candidate that cannot be built (does not compile, spills hopelessly, needs more memory than the device has)."""
