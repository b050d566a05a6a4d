"""Stored data that cannot be used: reading goes on without it, and says so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class Damaged(Exception):
    """Stored data that cannot be used, mostly by its checksum; ``str`` says what and how it was found out."""


class Unreadable:
    """In the place of a column's value: what is stored there is no JSON. A row that holds it is damaged."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"Unreadable({self.why!r})"


def from_json_text(text: Any) -> Any:
    """A JSON column's value; :class:`Unreadable` in its place where it is no JSON, so that the other rows are read."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as e:
        return Unreadable(" ".join(str(e).split())[:100])


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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > above):
        raise Damaged(f"its {what} is {_short(value)}")
    return float(value)


def whole(value: Any, what: str) -> int:
    """``value`` as an integer that a column can hold; raises Damaged."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise Damaged(f"its {what} is {_short(value)}")
    return value


def latencies(value: Any) -> dict[str, float]:
    """A JSON object of latencies; raises Damaged."""
    if not isinstance(value, Mapping):
        raise Damaged("its baselines are unreadable")
    return {str(name): number(us, f"latency of {str(name)[:40]}", above=0.0) for name, us in value.items()}


def figures(value: Any) -> dict[str, float]:
    """A JSON object of a domain's own figures; raises Damaged."""
    return {str(name): number(figure, f"{str(name)[:40]}") for name, figure in mapping(value, "metrics").items()}


def mapping(value: Any, what: str) -> dict[str, Any]:
    """``value`` as a JSON object; raises Damaged."""
    if not isinstance(value, dict):
        raise Damaged(f"its {what} {'is unreadable' if isinstance(value, Unreadable) else 'is no JSON object'}")
    return value


def _short(value: Any) -> str:
    return "unreadable" if isinstance(value, Unreadable) else repr(value)[:40]
