"""A database as deployment uses it: opened once, and never in the way of the user's model.

Whatever is wrong with it (missing, broken, of another version, locked) gives one warning; look-ups then find nothing
and the model runs as without autotune. A server that cannot be reached, or does not answer, costs a few seconds once:
it is not asked again for :data:`RETRY_S` seconds.
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
    from autotune.store.snapshots.reader import Snapshot

RETRY_S = 300.0
"""Seconds for which a server that was lost is left alone."""


class Database:
    """A database, or a snapshot in the place of one. It is not safe for threads: :class:`Deployment` has the lock.

    Attributes:
        key: what names it in keys of warnings.
        recorded: fingerprints of workload and device of each miss that is recorded in it.
    """

    def __init__(self, url: str | None, key: str, warn: Callable[[str, str], None]) -> None:
        """Opens nothing.

        Args:
            url: as in ``Store.open``; None for $AUTOTUNE_DB or the default file.
            key: what names it in keys of warnings.
            warn: of a warning's key and its text.
        """
        self.recorded: set[tuple[str, str]] = set()
        self._url, self.key, self._warn = url, key, warn
        self._store: Reader | None = None
        self._retry = 0.0  # by the monotonic clock, when a lost server may be asked again; 0.0 if none was lost
        self._absent = self._shut = self._refused = False

    def reader(self) -> Reader | None:
        """The open database; None where there is nothing that can be used (one warning)."""
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
            self._warn(f"open {self.key}", f"autotune: {e}; nothing is looked up and models run as without autotune")
            self._refused = True
            # A file that appears late, as another rank makes it for its misses, has decided nothing yet: that it cannot
            # be opened for a moment changes no answer.
            self._shut = not self._absent
        else:
            self._shut = False
            self._absent = self._absent or self._store is None  # it may still come: a search may be running

    @property
    def is_shut(self) -> bool:
        """True for a database that exists and cannot be read: its decisions are unknown, and nothing replaces them."""
        return self._shut or self._retry > 0.0

    def create(self) -> Store | None:
        """A new database; None where there is one that cannot be used, which is left alone.

        Raises:
            UserError: it cannot be made.
        """
        if self._refused or self._retry:
            return None
        from autotune.store import Store

        store = Store.open(self._url, timeout_s=1.0)
        if self._url is not None or os.environ.get("AUTOTUNE_DB"):  # who names one may expect it to be there
            self._warn(f"new {self.key}", f"autotune: {store.name} is a new database: nothing is tuned in it yet")
        self._store = store
        return store

    def close(self) -> None:
        """Close what is open; a later question opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None


class PackagedSnapshots:
    """The snapshots that come with autotune, opened when they are first asked for."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn, self._lock = warn, threading.Lock()
        self._opened: dict[Path, Snapshot | None] = {}  # None for one that cannot be opened
        self._digests: list[str] = []

    def get(self, path: Path) -> Snapshot | None:
        """The snapshot in a file; None where it cannot be opened (one warning)."""
        with self._lock:
            if path not in self._opened:
                from autotune.store.snapshots.reader import Snapshot

                try:
                    self._opened[path] = Snapshot(path)
                except Exception as e:
                    self._warn(f"open {path}", f"autotune: {e}; nothing that comes with autotune is used")
                    self._opened[path] = None
            return self._opened[path]

    def state(self) -> str:
        """A digest of their content."""
        from autotune.store.snapshots.packaged import digests

        with self._lock:
            self._digests = self._digests or list(digests().values())
            lost = [path.name for path, found in self._opened.items() if found is None or found.lost]
            return " ".join([*self._digests, *lost])
