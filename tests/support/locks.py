"""Locks of files, looked at from outside."""

from __future__ import annotations

import fcntl
from pathlib import Path


def awaited(lock: Path) -> bool:
    """Whether some process holds the lock of a file: of a device's queue, whether one waits for the device."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
