"""Formatting of numbers and text for messages."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

NARROW = 80
"""Width of a table that fits into an issue, in columns."""


def plural(n: int, what: str) -> str:
    """Such as ``1 kernel`` and ``2 kernels``."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def microseconds(us: float | None, unit: str = "us") -> str:
    """A time with three significant digits in a suitable unit; an en dash for None.

    Args:
        unit: the text for microseconds.
    """
    if us is None:
        return "–"
    for larger, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= scale:
            return f"{us / scale:.3g} {larger}"
    return f"{us:.3g} {unit}"


def size(n: float) -> str:
    """Bytes with three significant digits."""
    if n < 1000:
        return f"{n:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        if n < 1000:
            return f"{n:.3g} {unit}"
    return f"{n:.0f} GiB"


def figure_text(unit: Callable[[float], tuple[float, str]] | None, cost: float | None, us: str = "us") -> str:
    """A time, or the figure that replaces it, in the unit of :func:`autotune.domain.figure_of`."""
    if unit is None or cost is None:
        return microseconds(cost, us)
    value, name = unit(cost)
    return f"{value:.4g} {name}"


def closest(name: str, names: Iterable[str]) -> str:
    """A "did you mean" hint with the most similar name; "" if none is similar."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {found[0]!r}?" if found else ""


def wrapped_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of at most :data:`NARROW` columns, whose last column wraps; numbers are in the middle columns.

    Args:
        head, rows: four cells each.
    """
    most = NARROW // 2 - 4
    names, counts, moved = (min(max(len(row[k]) for row in (head, *rows)), most) for k in range(3))
    for name, count, much, reason in (head, *rows):
        name = name if len(name) <= most else name[: most - 3] + "..."
        begin = f"{name:{names}}  {count:>{counts}}  {much:>{moved}}  "
        lines = textwrap.wrap(reason, NARROW, initial_indent=begin, subsequent_indent=" " * len(begin))
        yield from lines or [begin.rstrip()]
