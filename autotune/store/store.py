"""The store: one object for everything that is kept."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import UserError
from autotune.store.connection.engine import create_engine, parse_url, patient, revision, show_url
from autotune.store.connection.outage import OUTAGE_S
from autotune.store.efforts import Efforts
from autotune.store.measurements import Measurements
from autotune.store.models import SCHEMA_REVISION
from autotune.store.overviews import Overviews
from autotune.store.runs import Runs
from autotune.store.schedules import Schedules
from autotune.store.verdicts import Verdicts

DEPLOY_S = 2.0
"""Seconds that a deployment waits for a server to accept a connection, and for each transaction."""


@patient
class Store(Measurements, Schedules, Runs, Efforts, Verdicts, Overviews):
    """Everything learnt, in one SQL database. Open it with :meth:`open`; safe to share among threads.

    Every method raises UserError, in one line, when the database fails (locked for too long, disk full, server gone).
    Fingerprints are those of :class:`~autotune.workload.Workload`, :class:`~autotune.device.DeviceIdentity` and
    :class:`~autotune.device.Environment` (strict).
    """

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | None = None,
        *,
        migrate: bool = True,
        readonly: bool = False,
        timeout_s: float = 30.0,
        limit_s: float | None = None,
        patience_s: float = OUTAGE_S,
    ) -> Store:
        """Open a database.

        Args:
            url: a file name, ``sqlite:///FILE`` or ``postgresql://USER@HOST/NAME``; None for $AUTOTUNE_DB, or else
                ``autotune.db`` in the user's data folder.
            migrate: create or upgrade the tables first; safe when many processes do so at once.
            readonly: write nothing, ever; a file on a read-only medium can be opened so.
            timeout_s: how long to wait for a lock that another process holds.
            limit_s: how long connecting to a server, and each transaction there, may take; None for as long as it
                takes.
            patience_s: how long to wait, when writing, for a server that goes away after it was opened.

        Raises:
            UserError: no such database, not reachable, not writable, not a database, or (without ``migrate``) tables
                of another version.
        """
        parsed = parse_url(url)
        engine = create_engine(parsed, readonly=readonly, timeout_s=timeout_s, limit_s=limit_s)
        patience_s = 0.0 if readonly else patience_s
        store = cls(parsed, engine, readonly=readonly, limit_s=limit_s, patience_s=patience_s)
        try:
            found = revision(engine, parsed, limit_s=limit_s)
            if found != SCHEMA_REVISION:
                if readonly or not migrate:
                    raise UserError(_wrong_revision(show_url(parsed), found))
                from autotune.store.connection.migrate import upgrade_engine

                upgrade_engine(engine, parsed)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def attach(cls, url: str | os.PathLike[str] | None = None, *, timeout_s: float = 1.0) -> Store | None:
        """Open a database for deployment: it is never created or upgraded, read only where it cannot be written, and
        asked for no longer than :data:`DEPLOY_S` seconds at a time.

        Returns:
            None when ``url`` means an SQLite file that is not there: nothing was ever tuned.

        Raises:
            UserError: there is a database, but it cannot be used.
        """
        parsed = parse_url(url)
        readonly = False
        if parsed.get_backend_name() == "sqlite":
            path = Path(str(parsed.database))
            if not path.exists():
                return None
            readonly = not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
        return cls.open(url, migrate=False, readonly=readonly, timeout_s=timeout_s, limit_s=DEPLOY_S, patience_s=0.0)

    @property
    def optuna_url(self) -> str:
        """The same database as ``optuna.storages.RDBStorage`` takes it; the tables' names do not collide."""
        return self.url

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _wrong_revision(name: str, found: str | None) -> str:
    if found is None:
        return f"the database {name} has no autotune tables: run `autotune db upgrade --db {name}`"
    if found > SCHEMA_REVISION:
        return f"the database {name} is at revision {found}, made by a newer autotune ({SCHEMA_REVISION}): upgrade that"
    return f"the database {name} is at revision {found}, not {SCHEMA_REVISION}: run `autotune db upgrade --db {name}`"
