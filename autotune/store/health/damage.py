"""Stored data that cannot be used: reading goes on without it, and says so."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

LATEST = 253_370_764_800.0
"""The year 9999, in seconds since the epoch: later times have no date."""
LEAST_COST, MOST_COST = 1e-30, 1e30
"""Limits of a latency, or of what is tuned for in its place: products and ratios of two stay finite."""

_MOST = sys.float_info.max
_HUGE = re.compile(r"[0-9]{300}")


class Damaged(Exception):
    """Stored data that cannot be used, mostly by its checksum; ``str`` says what and how it was found out."""


class Unreadable:
    """In the place of a column's value: what is stored there is no JSON. A row that holds it is damaged."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"Unreadable({self.why!r})"


def from_json_text(text: Any) -> Any:
    """A JSON column's value; :class:`Unreadable` in its place where it is no JSON, so that the other rows are read.

    What no writer stores counts as no JSON: NaN, infinities, integers beyond every float.
    """
    try:
        if isinstance(text, (bytes, bytearray, memoryview)):
            text = bytes(text).decode()
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if _HUGE.search(text):
            json.loads(text, parse_int=_finite)
        return value
    except (ValueError, TypeError, RecursionError, OverflowError) as e:
        return Unreadable(" ".join(str(e).split())[:100])


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


BROKEN = (Damaged, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, IndexError)
"""What making a record from a damaged row may raise."""


def why(error: BaseException, row: Any = ()) -> str:
    """What is wrong with a row of which no record could be made."""
    for value in row:
        if isinstance(value, Unreadable):
            return f"it is not JSON ({value.why})"
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, Damaged) else f"{type(error).__name__}: {text}"


def number(value: Any, what: str, *, above: float = -math.inf) -> float:
    """``value`` as a finite number above a bound; raises Damaged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (_MOST >= value > max(above, -_MOST)):
        raise Damaged(f"its {what} is {_short(value)}")
    return float(value)


def cost(value: Any, what: str = "latency") -> float:
    """``value`` as a latency in microseconds, or as what is tuned for in its place; raises Damaged."""
    found = number(value, what)
    if not LEAST_COST <= found <= MOST_COST:
        raise Damaged(f"its {what} is {_short(value)}")
    return found


def moment(value: Any, what: str = "time") -> float:
    """``value`` as a time in seconds since the epoch, up to :data:`LATEST`; raises Damaged."""
    found = number(value, what)
    if not 0 <= found <= LATEST:
        raise Damaged(f"its {what} is {_short(value)}")
    return found


def text(value: Any, what: str) -> str:
    """``value`` as a text that can be written as UTF-8; raises Damaged."""
    if not isinstance(value, str) or (not value.isascii() and _unpaired(value)):
        raise Damaged(f"its {what} is {_short(value)}")
    return value


def _unpaired(value: str) -> bool:
    return any("\ud800" <= ch <= "\udfff" for ch in value)


def whole(value: Any, what: str) -> int:
    """``value`` as an integer that a column can hold; raises Damaged."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise Damaged(f"its {what} is {_short(value)}")
    return value


def latencies(value: Any) -> dict[str, float]:
    """A JSON object of latencies; raises Damaged."""
    if not isinstance(value, Mapping):
        raise Damaged("its baselines are unreadable")
    return {text(name, "baseline"): cost(us, f"latency of {name[:40]}") for name, us in value.items()}


def figures(value: Any) -> dict[str, float]:
    """A JSON object of a domain's own figures; raises Damaged."""
    return {text(name, "metric"): number(figure, name[:40]) for name, figure in mapping(value, "metrics").items()}


def mapping(value: Any, what: str) -> dict[str, Any]:
    """``value`` as a JSON object; raises Damaged."""
    if not isinstance(value, dict):
        raise Damaged(f"its {what} {'is unreadable' if isinstance(value, Unreadable) else 'is no JSON object'}")
    return value


def _short(value: Any) -> str:
    return "unreadable" if isinstance(value, Unreadable) else ascii(value)[:40]
