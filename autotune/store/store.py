"""The store: one object for the whole database."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from autotune.errors import UserError
from autotune.store.connection.engine import create_engine, patient, revision
from autotune.store.connection.faults import OUTAGE_S, LostConnection, Patience, disk_is_full
from autotune.store.connection.sqlite import new_file
from autotune.store.connection.urls import (
    REPLICA_VARIABLE,
    is_missing,
    no_database,
    parse_url,
    show_url,
    upgrade_command,
)
from autotune.store.models import SCHEMA_REVISION
from autotune.store.records import Key, Schedule
from autotune.store.tables.measurements import Measurements
from autotune.store.tables.overviews import Overviews
from autotune.store.tables.runs import Savings
from autotune.store.tables.schedules import Schedules

T = TypeVar("T")

DEPLOY_S = 2.0
"""Time limit of a deployment for connecting to a server, and for each transaction, in seconds."""


@patient
class Store(Measurements, Schedules, Savings, Overviews):
    """All results of searches, in one SQL database. Open it with :meth:`open`; it is thread-safe.

    Every method raises a one-line UserError if the database fails (locked for too long, disk full, server lost).
    Fingerprints are those of :class:`~autotune.workload.Workload`, :class:`~autotune.device.DeviceIdentity` and
    :class:`~autotune.device.Environment` (strict).
    """

    trusted = False  # databases are not signed

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | None = None,
        *,
        migrate: bool = True,
        existing: bool = False,
        readonly: bool = False,
        timeout_s: float = 30.0,
        limit_s: float | None = None,
        patience_s: float = OUTAGE_S,
        awaited: bool = False,
    ) -> Store:
        """Open a database.

        Args:
            url: a file name, ``sqlite:///FILE`` or ``postgresql://USER@HOST/NAME``; None for $AUTOTUNE_DB, or else
                ``autotune.db`` in the user's data folder.
            migrate: create or upgrade the tables first; safe when many processes do so at once.
            existing: do not create a missing file.
            readonly: never write; required for a file on a read-only medium.
            timeout_s: seconds to wait for a lock of another process.
            limit_s: time limit in seconds for connecting to a server, and for each transaction; None for no limit.
            patience_s: seconds that a write waits for a lost server, and that opening waits for one that is starting or
                full.
            awaited: opening also waits for a server that does not answer, since it was available before.

        Raises:
            UserError: no such database, not reachable, not writable, not a database, or (without ``migrate``) tables
                of another version.
        """
        parsed = parse_url(url)
        if not readonly and is_missing(parsed):
            if existing or not migrate:
                raise UserError(no_database(str(parsed.database)))
            from autotune.store.connection.migrate import create_file

            create_file(parsed, timeout_s=timeout_s)
        engine = create_engine(parsed, readonly=readonly, timeout_s=timeout_s, limit_s=limit_s)
        patience_s = 0.0 if readonly else patience_s
        store = cls(parsed, engine, readonly=readonly, limit_s=limit_s, patience_s=patience_s)

        def prepare() -> None:
            found = revision(engine, parsed, limit_s=limit_s)
            if found != SCHEMA_REVISION:
                if readonly or not migrate:
                    raise UserError(_wrong_revision(parsed, found))
                from autotune.store.connection.migrate import upgrade_engine

                upgrade_engine(engine, parsed)

        try:
            try:
                prepare()
            except LostConnection as e:
                if not (awaited or e.alive) or patience_s == 0.0:
                    raise
                Patience(f"the database {store.name}", patience_s).call(prepare)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def fill(cls, url: str | os.PathLike[str] | None, action: Callable[[Store], T]) -> T:
        """Call ``action`` with a database; a new SQLite file only appears after that.

        Raises:
            UserError: as :meth:`open`, or from ``action``. No new file is left then.
        """
        parsed = parse_url(url)
        if is_missing(parsed):
            path = Path(str(parsed.database))
            with new_file(path) as made:
                with cls.open(made) as store:
                    found = action(store)
                inode = made.stat().st_ino
            if path.stat().st_ino == inode:
                return found
        with cls.open(url) as store:
            return action(store)

    @classmethod
    def attach(
        cls,
        url: str | os.PathLike[str] | None = None,
        replica: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 1.0,
    ) -> Store | None:
        """Open a database for deployment.

        It is never created or upgraded, and has a time limit of :data:`DEPLOY_S` seconds per operation. It is read-only
        if it cannot be written, or if its disk is full.

        Args:
            replica: a copy of it, such as a server's standby, for all reads, however old. None for $AUTOTUNE_DB_READ if
                ``url`` is None, else for none. With a replica, the database itself is not accessed before the first
                miss is recorded.

        Returns:
            None if the SQLite file to read does not exist.

        Raises:
            UserError: the database exists, but cannot be used.
        """
        if replica is None and url is None:
            replica = os.environ.get(REPLICA_VARIABLE) or None
        if replica is not None:
            return cls._beside(url, replica, timeout_s)
        parsed = parse_url(url)
        readonly = False
        if parsed.get_backend_name() == "sqlite":
            path = Path(str(parsed.database))
            if is_missing(parsed):
                return None
            readonly = not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
        try:
            store = cls.open(
                url, migrate=False, readonly=readonly, timeout_s=timeout_s, limit_s=DEPLOY_S, patience_s=0.0
            )
        except UserError:
            if readonly or not disk_is_full(parsed):
                raise
            store = cls.open(url, migrate=False, readonly=True, timeout_s=timeout_s, limit_s=DEPLOY_S)
        if not store.readonly and not store.may_note():
            store.readonly = True
        return store

    @classmethod
    def _beside(
        cls, url: str | os.PathLike[str] | None, replica: str | os.PathLike[str], timeout_s: float
    ) -> Store | None:
        """A store that reads a replica, and writes to the database itself if it is writable."""
        copy = parse_url(replica)
        if is_missing(copy):
            return None
        reader = create_engine(copy, readonly=True, timeout_s=timeout_s, limit_s=DEPLOY_S)
        try:
            found = revision(reader, copy, limit_s=DEPLOY_S)
            if found != SCHEMA_REVISION:
                raise UserError(_wrong_revision(copy, found))
            parsed = parse_url(url)
            if is_missing(parsed):
                return cls(copy, reader, readonly=True, limit_s=DEPLOY_S)
            engine = create_engine(parsed, timeout_s=timeout_s, limit_s=DEPLOY_S)
            return cls(parsed, engine, readonly=False, limit_s=DEPLOY_S, replica=(copy, reader))
        except BaseException:
            reader.dispose()
            raise

    def may_note(self) -> bool:
        """Return True if misses can be written: not on a server's standby or without the permission."""
        if self.readonly or self._engine.dialect.name != "postgresql":
            return not self.readonly
        rights = " AND ".join(
            f"has_table_privilege('{table}', '{right}')"
            for table, right in (
                ("autotune_misses", "INSERT"),
                ("autotune_misses", "UPDATE"),
                ("autotune_workloads", "INSERT"),
                ("autotune_workloads", "UPDATE"),
                ("autotune_devices", "INSERT"),
                ("autotune_environments", "INSERT"),
            )
        )
        with self.reading() as c:
            return bool(c.scalar(sa.text(f"SELECT NOT pg_is_in_recovery() AND {rights}")))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _wrong_revision(url: sa.URL, found: str | None) -> str:
    name, command = show_url(url), upgrade_command(url)
    if found is None:
        return f"the database {name} has no autotune tables: run `{command}`"
    if found > SCHEMA_REVISION:
        newer = f"newer than revision {SCHEMA_REVISION} of this autotune"
        return f"the database {name} is at revision {found}, {newer}: upgrade autotune"
    return f"the database {name} is at revision {found}, not {SCHEMA_REVISION}: run `{command}`"


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
