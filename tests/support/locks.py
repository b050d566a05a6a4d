"""Locks of files, looked at from outside."""

from __future__ import annotations

import fcntl
from pathlib import Path


def awaited(lock: Path) -> bool:
    """Return True if some process holds a file's lock; for a device's queue, if one waits for the device."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
