"""All results of searches, in SQL: SQLite by default, PostgreSQL by URL.

:mod:`autotune.store.records` has the plain dataclasses and needs no SQL; :class:`Store` is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.store.records import Calibration, Effort, Key, Measurement, Miss, Run, Saving, Schedule, Verdict

if TYPE_CHECKING:
    from autotune.store.connection.faults import LostConnection
    from autotune.store.opening import attach, attached, named_snapshot
    from autotune.store.reading import Reader
    from autotune.store.snapshot import Snapshot
    from autotune.store.store import Store
    from autotune.store.tables.measurements import owner_name
    from autotune.store.tables.overviews import Activity, Overview

_LAZY = {
    "Activity": "autotune.store.tables.overviews",
    "LostConnection": "autotune.store.connection.faults",
    "Overview": "autotune.store.tables.overviews",
    "Reader": "autotune.store.reading",
    "Snapshot": "autotune.store.snapshot",
    "Store": "autotune.store.store",
    "attach": "autotune.store.opening",
    "attached": "autotune.store.opening",
    "named_snapshot": "autotune.store.opening",
    "owner_name": "autotune.store.tables.measurements",
}
__all__ = [
    "Activity", "Calibration", "Effort", "Key", "LostConnection", "Measurement", "Miss", "Overview", "Reader", "Run",
    "Saving", "Schedule", "Snapshot", "Store", "Verdict", "attach", "attached", "named_snapshot", "owner_name",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'autotune.store' has no attribute {name!r}")
