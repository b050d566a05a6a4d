"""A store whose new schedules appear in the database later."""

from __future__ import annotations

import threading
from typing import Any

from autotune.store.records import Key, Schedule
from autotune.store.store import Store


class HeldStore(Store):
    """A store that keeps new schedules to itself until :meth:`publish`; all else is stored at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[Key, Schedule] | None = {}
        self._holding = threading.RLock()

    def put_schedule(self, schedule: Schedule, *, replace: bool = False) -> bool:
        """Keep a schedule; the latest one for a key counts. After :meth:`publish`, store it."""
        with self._holding:
            if self._held is None:
                return super().put_schedule(schedule, replace=replace)
            self._held[schedule.key] = schedule
            return True

    def schedule_of(self, key: Key) -> Schedule | None:
        """The schedule under exactly this key, kept or stored."""
        with self._holding:
            return (self._held or {}).get(key) or super().schedule_of(key)

    def publish(self) -> None:
        """Store the kept schedules, and each later one at once."""
        with self._holding:
            held, self._held = self._held or {}, None
            for schedule in held.values():
                super().put_schedule(schedule, replace=True)
