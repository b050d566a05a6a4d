"""A database as deployment uses it: opened once, without ever stopping the user's model.

A database that is missing, broken, locked or of another version logs one warning. Look-ups then find nothing, and the
model runs as without autotune. A server that is unreachable or does not answer costs a few seconds once: autotune
retries after :data:`RETRY_S` seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.store import Reader, Store
    from autotune.store.snapshot import Snapshot

RETRY_S = 300.0
"""Seconds until the next attempt to reach a lost server."""


class Database:
    """A database or a snapshot. It is not thread-safe: :class:`Deployment` has the lock.

    Attributes:
        key: its name in keys of warnings.
        recorded: fingerprints of workload and device of each miss recorded in it.
    """

    def __init__(self, url: str | None, key: str, warn: Callable[[str, str], None]) -> None:
        """Store the arguments; the database is opened later.

        Args:
            url: as in ``Store.open``; None for $AUTOTUNE_DB or the default file.
            key: its name in keys of warnings.
            warn: called with a warning's key and its text.
        """
        self.recorded: set[tuple[str, str]] = set()
        self._url, self.key, self._warn = url, key, warn
        self._store: Reader | None = None
        self._retry = 0.0  # monotonic time of the next attempt to reach a lost server; 0.0 if none is lost
        self._absent = self._shut = self._refused = False

    def reader(self) -> Reader | None:
        """The open database; None without a usable one (logs one warning)."""
        if self._store is not None and self._store.lost:
            self.close()
            self._retry = time.monotonic() + RETRY_S
        if self._retry and time.monotonic() < self._retry:
            return None
        self._retry = 0.0
        if self._store is None:
            self._open()
        return self._store

    def _open(self) -> None:
        from autotune.store import attach

        try:
            self._store = attach(self._url)
        except Exception as e:
            if type(e).__name__ == "LostConnection":  # importing its module would load SQLAlchemy
                self._retry = time.monotonic() + RETRY_S
            self._warn(f"open {self.key}", f"autotune: {e}; no schedule is looked up, and models run without autotune")
            self._refused = True
            # A file that appears late, created by another rank for its misses, has no verdicts yet. A temporary failure
            # to open it changes no answer.
            self._shut = not self._absent
        else:
            self._shut = False
            self._absent = self._absent or self._store is None  # a running search may still create it

    @property
    def is_shut(self) -> bool:
        """True for a database that exists and cannot be read: its verdicts are unknown, and not replaced."""
        return self._shut or self._retry > 0.0

    def create(self) -> Store | None:
        """Create the database; None if an unusable one exists, which is not changed.

        Raises:
            UserError: the database cannot be created.
        """
        if self._refused or self._retry:
            return None
        from autotune.store import Store

        store = Store.open(self._url, timeout_s=1.0)
        if self._url is not None or os.environ.get("AUTOTUNE_DB"):  # the user may expect a named database to exist
            self._warn(f"new {self.key}", f"autotune: {store.name} is a new database without schedules: run a search")
        self._store = store
        return store

    def close(self) -> None:
        """Close the database; the next look-up opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None


class PackagedSnapshots:
    """The snapshots shipped with autotune, each opened at its first use."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn, self._lock = warn, threading.Lock()
        self._opened: dict[Path, Snapshot | None] = {}  # None for one that cannot be opened
        self._digests: list[str] = []

    def get(self, path: Path) -> Snapshot | None:
        """The snapshot in a file; None if it cannot be opened (logs one warning)."""
        with self._lock:
            if path not in self._opened:
                from autotune.store.snapshot import Snapshot

                try:
                    self._opened[path] = Snapshot(path)
                except Exception as e:
                    self._warn(f"open {path}", f"autotune: {e}; no packaged schedule is used")
                    self._opened[path] = None
            return self._opened[path]

    def state(self) -> str:
        """A digest of their content."""
        from autotune.store.opening import digests

        with self._lock:
            self._digests = self._digests or list(digests().values())
            lost = [path.name for path, found in self._opened.items() if found is None or found.lost]
            return " ".join([*self._digests, *lost])
