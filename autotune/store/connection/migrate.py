"""Creating and upgrading the tables. With ``db/env.py``, the only user of Alembic.

Any number of processes may start on one empty database. The upgrade runs in one transaction that holds the database's
write lock (SQLite, ``BEGIN IMMEDIATE``) or an advisory lock (PostgreSQL). Later processes find the tables upgraded.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from autotune.errors import UserError
from autotune.files import resource_dir
from autotune.store.connection.engine import create_engine, revision, unforked
from autotune.store.connection.faults import user_errors
from autotune.store.connection.sqlite import new_file
from autotune.store.connection.urls import parse_url, show_url
from autotune.store.snapshot_form import is_snapshot

_LOCK = 0x6175746F74756E65  # "autotune" in ASCII: the advisory lock that every upgrade takes


def upgrade(url: str | os.PathLike[str] | None = None, *, timeout_s: float = 60.0) -> str:
    """Upgrade the database at ``url`` (as in :meth:`Store.open`) to the newest revision; create it if necessary.

    Returns:
        The new revision.

    Raises:
        UserError: a snapshot; or the database cannot be reached or written, stays locked for ``timeout_s`` seconds, or
            is of a newer version of autotune.
    """
    parsed = parse_url(url)
    if not create_file(parsed, timeout_s=timeout_s):
        _upgrade(parsed, parsed, timeout_s)
    return head()


def create_file(url: sa.URL, *, timeout_s: float = 60.0) -> bool:
    """Create a missing SQLite file, with all of its tables or not at all; False for an existing one or a server.

    Raises:
        UserError: the file cannot be created.
    """
    path = Path(str(url.database))
    if url.get_backend_name() != "sqlite" or is_snapshot(path) or path.exists():
        return False
    with new_file(path) as made:
        _upgrade(url.set(database=str(made)), url, timeout_s)
    return True


def _upgrade(url: sa.URL, shown: sa.URL, timeout_s: float) -> None:
    engine = create_engine(url, timeout_s=timeout_s)
    try:
        upgrade_engine(engine, shown)
    finally:
        engine.dispose()


def upgrade_engine(engine: sa.Engine, url: sa.URL) -> None:
    """:func:`upgrade` with an open engine of :func:`autotune.store.connection.engine.create_engine`."""
    writer = engine.execution_options(autotune_write=True)
    with unforked(url), user_errors(url), writer.begin() as connection:
        if connection.dialect.name == "postgresql":
            # Released at the end of the transaction, also after an error.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        config = _config()
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as e:
            raise UserError(f"cannot upgrade {show_url(url)}: {e}; a newer autotune made it: upgrade autotune") from e


def current(url: str | os.PathLike[str] | None = None) -> str | None:
    """The database's revision, or None without autotune's tables (or without the database). Changes nothing.

    Raises:
        UserError: the database cannot be reached or read.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
        return None
    engine = create_engine(parsed, readonly=True)
    try:
        return revision(engine, parsed)
    finally:
        engine.dispose()


def head() -> str:
    """The newest revision of this version of autotune."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def _config() -> Config:
    logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(resource_dir("db")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
