"""Errors that cross module boundaries.

A :class:`UserError` is the user's to mend: the CLI prints its one line and exits with code 2. Everything else in this
module is an outcome of a candidate or of a region that the search records and survives.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave; ``str(error)`` is one line saying what is wrong and how to mend it."""


class Unsupported(Exception):
    """A region, group or operator that this version cannot express; the caller falls back and records the reason."""


class BuildError(Exception):
    """A candidate that cannot be built (does not compile, spills hopelessly, needs more memory than the device has)."""
