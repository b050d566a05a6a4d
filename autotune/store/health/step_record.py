"""The record of a verdict on a step: checked where it is read, so that commands may rely on its types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.store.health.damage import Damaged, cost, mapping, number, text, whole

Check = Callable[[Any, str], object]


def _share(value: Any, what: str) -> None:
    if number(value, what) < 0:
        raise Damaged(f"its {what} is below 0")


def _count(value: Any, what: str) -> None:
    if whole(value, what) < 0:
        raise Damaged(f"its {what} is below 0")


def _truth(value: Any, what: str) -> None:
    if not isinstance(value, bool):
        raise Damaged(f"its {what} is {ascii(value)[:40]}")


def _or_none(check: Check) -> Check:
    return lambda value, what: None if value is None else check(value, what)


def _families(value: Any, what: str) -> None:
    if not isinstance(value, list):
        raise Damaged(f"its {what} are no list")
    for family in value:
        _checked(mapping(family, "family"), _FAMILY, "family's ")


def _numerics(value: Any, what: str) -> None:
    for name, setting in mapping(value, what).items():
        text(name, f"name in its {what}")
        if isinstance(setting, str):
            text(setting, what)
        elif not isinstance(setting, (bool, int, list)):
            raise Damaged(f"its {what} have {ascii(setting)[:40]}")


_FAMILY: Mapping[str, Check] = {
    "workload": text,
    "label": text,
    "count": _count,
    "gain_us": _or_none(number),
    "gain_of": text,
    "kept": _truth,
}
_RECORD: Mapping[str, Check] = {
    "mode": text,
    "compile_us": cost,
    "attention_us": _or_none(cost),
    "all_us": cost,
    "autotune_us": _or_none(cost),
    "ratio": cost,
    "noise": _share,
    "tries": _count,
    "seconds": _share,
    "cut": _truth,
    "others_busy": _share,
    "graphs": _count,
    "families": _families,
    "lead_s": _share,
    "numerics": _numerics,
    "target": text,
    "inputs": text,
    "command": text,
    "train": _truth,
}
"""What :meth:`autotune.bench.decide.Decision.record` and its caller write. All of it may be missing: earlier versions
wrote less, and a snapshot keeps a part."""


def step_record(value: Any) -> dict[str, Any]:
    """``value`` as a verdict's record; names that are not known here are those of a later version, and stay.

    Raises:
        Damaged: it is no JSON object, or a value is none of its name's.
    """
    record = mapping(value, "record")
    _checked(record, _RECORD, "")
    return record


def left_of(value: Any) -> tuple[str, ...]:
    """The workloads that a verdict leaves to Inductor; raises Damaged."""
    if not isinstance(value, list):
        raise Damaged("what it leaves to Inductor is no list of fingerprints")
    return tuple(text(name, "workload left to Inductor") for name in value)


def _checked(values: Mapping[str, Any], checks: Mapping[str, Check], of: str) -> None:
    for name, value in values.items():
        text(name, "name of a figure")
        if name in checks:
            checks[name](value, of + name)
