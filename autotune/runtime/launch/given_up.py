"""Schedules that failed in this process: no look-up finds them again."""

from __future__ import annotations

import threading

from autotune.store.records import Schedule
from autotune.task import config_key

_failed: dict[tuple[str, str], str] = {}
_count = [0]
_lock = threading.Lock()


def _name(schedule: Schedule) -> tuple[str, str]:
    return schedule.key.workload, config_key(schedule.config or {})


def disable(schedule: Schedule, why: str) -> bool:
    """Use a schedule no more in this process; False where that was said before."""
    name = _name(schedule)
    with _lock:
        if name in _failed:
            return False
        _failed[name] = why
        _count[0] += 1
        return True


def disabled(schedule: Schedule) -> str:
    """Why a schedule is not used any more in this process; "" where it is."""
    return _failed.get(_name(schedule), "") if _failed else ""


def allow_again() -> None:
    """Forget all of them."""
    with _lock:
        _failed.clear()
        _count[0] += 1


def failures() -> int:
    """A number that changes with what is disabled."""
    return _count[0]
