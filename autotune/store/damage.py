"""Damaged data: checks of stored values. Reading continues without a damaged row, and reports it."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

LATEST = 253_370_764_800.0
"""The year 9999, in seconds since the epoch: later times have no date."""
LEAST_COST, MOST_COST = 1e-30, 1e30
"""Limits of a latency, or of another tuned quantity, within which products and ratios of two are finite."""

_MOST = sys.float_info.max
_HUGE = re.compile(r"[0-9]{300}")


class Damaged(Exception):
    """Invalid stored data; the text names the value and the failed check."""


class Unreadable:
    """A column's value that is not JSON. A row with one is damaged."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"Unreadable({self.why!r})"


def from_json_text(text: Any) -> Any:
    """A JSON column's value, or :class:`Unreadable` if it is not JSON, so that the other rows are read.

    Values that no writer stores are not accepted as JSON: NaN, infinities, integers beyond every float.
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
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


BROKEN = (Damaged, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, IndexError)
"""Exceptions that conversion of a damaged row may raise."""


def why(error: BaseException, row: Any = ()) -> str:
    """The reason why a row could not be converted to a record."""
    for value in row:
        if isinstance(value, Unreadable):
            return f"it is not JSON ({value.why})"
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, Damaged) else f"{type(error).__name__}: {text}"


def number(value: Any, what: str, least: float = -_MOST, most: float = _MOST) -> float:
    """``value`` as a finite number within bounds; raises Damaged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise Damaged(f"its {what} is {_short(value)}")
    return float(value)


def cost(value: Any, what: str = "latency") -> float:
    """``value`` as a latency in microseconds, or another tuned quantity; raises Damaged."""
    return number(value, what, LEAST_COST, MOST_COST)


def moment(value: Any, what: str = "time") -> float:
    """``value`` as a time in seconds since the epoch, up to :data:`LATEST`; raises Damaged."""
    return number(value, what, 0, LATEST)


def text(value: Any, what: str) -> str:
    """``value`` as a text that can be written as UTF-8; raises Damaged."""
    if not isinstance(value, str) or unpaired(value):
        raise Damaged(f"its {what} is {_short(value)}")
    return value


def unpaired(value: str) -> bool:
    """Return True for a text with a lone surrogate, which UTF-8 cannot encode."""
    return not value.isascii() and any("\ud800" <= ch <= "\udfff" for ch in value)


def integer(value: Any, what: str, least: int = -(2**63)) -> int:
    """``value`` as an integer within a column's range; raises Damaged."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise Damaged(f"its {what} is {_short(value)}")
    return value


def latencies(value: Any) -> dict[str, float]:
    """A JSON object of latencies; raises Damaged."""
    if not isinstance(value, Mapping):
        raise Damaged("its baselines are unreadable")
    return {text(name, "baseline"): cost(us, f"latency of {name[:40]}") for name, us in value.items()}


def figures(value: Any) -> dict[str, float]:
    """A JSON object of a domain's own metrics; raises Damaged."""
    return {text(name, "metric"): number(figure, name[:40]) for name, figure in mapping(value, "metrics").items()}


def mapping(value: Any, what: str) -> dict[str, Any]:
    """``value`` as a JSON object; raises Damaged."""
    if not isinstance(value, dict):
        raise Damaged(f"its {what} {'is unreadable' if isinstance(value, Unreadable) else 'is not a JSON object'}")
    return value


def _short(value: Any) -> str:
    return "unreadable" if isinstance(value, Unreadable) else ascii(value)[:40]


def step_record(value: Any) -> dict[str, Any]:
    """``value`` as a verdict's record; unknown names, from a later version, are kept.

    Raises:
        Damaged: not a JSON object, or a value is invalid for its name.
    """
    record = mapping(value, "record")
    _checked(record, _RECORD, "")
    return record


def left_of(value: Any) -> tuple[str, ...]:
    """The workloads that a verdict leaves to Inductor; raises Damaged."""
    if not isinstance(value, list):
        raise Damaged("the families left to Inductor are not a list of fingerprints")
    return tuple(text(name, "workload left to Inductor") for name in value)


def _truth(value: Any, what: str) -> None:
    if not isinstance(value, bool):
        raise Damaged(f"its {what} is {ascii(value)[:40]}")


def _families(value: Any, what: str) -> None:
    if not isinstance(value, list):
        raise Damaged(f"its {what} are not a list")
    for family in value:
        _checked(mapping(family, "family"), _FAMILY, "family's ")


def _numerics(value: Any, what: str) -> None:
    for name, setting in mapping(value, what).items():
        text(name, f"name in its {what}")
        if isinstance(setting, str):
            text(setting, what)
        elif not isinstance(setting, (bool, int, list)):
            raise Damaged(f"its {what} have {ascii(setting)[:40]}")


def _checked(values: Mapping[str, Any], checks: Mapping[str, Check], of: str) -> None:
    for name, value in values.items():
        text(name, "name of a figure")
        if name in checks:
            checks[name](value, of + name)


Check = Callable[[Any, str], object]
_share, _count = functools.partial(number, least=0.0), functools.partial(integer, least=0)
_FAMILY: Mapping[str, Check] = {
    **dict.fromkeys(("workload", "label", "gain_of"), text),
    "count": _count,
    "gain_us": lambda value, what: None if value is None else number(value, what),
    "kept": _truth,
}
_RECORD: Mapping[str, Check] = {
    **dict.fromkeys(("mode", "target", "inputs", "command"), text),
    **dict.fromkeys(("compile_us", "all_us", "ratio"), cost),
    **dict.fromkeys(("attention_us", "autotune_us"), lambda value, what: None if value is None else cost(value, what)),
    **dict.fromkeys(("noise", "seconds", "others_busy", "lead_s"), _share),
    **dict.fromkeys(("tries", "graphs"), _count),
    **dict.fromkeys(("cut", "train"), _truth),
    "families": _families,
    "numerics": _numerics,
}
"""Fields of :meth:`autotune.bench.decide.Decision.record` and its caller. All are optional: earlier versions wrote
fewer, and a snapshot keeps only some."""
