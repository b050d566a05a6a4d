"""Connecting: from what the user wrote to an engine with the right transactions, and errors in one line."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import QueuePool

from autotune.errors import UserError
from autotune.store.models import VERSION_TABLE, Base
from autotune.workload import canonical_json

DATABASE_VARIABLE = "AUTOTUNE_DB"
_EXAMPLES = "use a file name, sqlite:///FILE or postgresql://USER@HOST/NAME"


def default_path() -> Path:
    """Where the database lies if the user names none: ``autotune.db`` in the user's data folder."""
    import platformdirs

    return Path(platformdirs.user_data_dir("autotune")) / "autotune.db"


def parse_url(url: str | os.PathLike[str] | None) -> sa.URL:
    """The database that ``url`` means: None for $AUTOTUNE_DB or the default file, a path, or an SQLAlchemy URL.

    SQLite paths are made absolute, since other processes will open them too.

    Raises:
        UserError: no URL, a database that is not supported, a driver that is not installed, options on an SQLite file
            (they would be lost on the search's other processes).
    """
    text = os.fspath(url) if url is not None else os.environ.get(DATABASE_VARIABLE) or str(default_path())
    if "://" not in text:
        if text.startswith("sqlite:") or text == ":memory:" or not text.strip():
            raise UserError(f"{text!r} names no database: {_EXAMPLES}")
        return _sqlite_url(text)
    try:
        parsed = sa.make_url(text)
    except ArgumentError:
        raise UserError(f"{text!r} is not a database URL: {_EXAMPLES}") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.query:
            given = "&".join(f"{k}={v}" for k, v in parsed.query.items())
            raise UserError(
                f"{parsed.database}: an SQLite URL takes no options ({given}): give only the file; take away its"
                " write permission where it must not be written"
            )
        if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
            raise UserError("an in-memory database cannot be shared between the search's processes: give a file name")
        return _sqlite_url(parsed.database)
    if backend in ("postgresql", "postgres"):
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        return parsed
    raise UserError(f"databases of type {backend!r} are not supported: {_EXAMPLES}")


def _sqlite_url(path: str) -> sa.URL:
    return sa.URL.create("sqlite", database=str(Path(path).expanduser().absolute()))


def show_url(url: sa.URL) -> str:
    """The URL for messages: a plain path for SQLite, without the password for a server."""
    return str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)


def create_engine(url: sa.URL, *, readonly: bool = False, timeout_s: float = 30.0) -> sa.Engine:
    """An engine whose transactions are what they say; see :class:`Database` for reading and writing with it.

    Raises:
        UserError: the database cannot be reached, written (unless ``readonly``) or is not a database.
    """
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, readonly, timeout_s)
    query = dict(url.query)
    query.setdefault("connect_timeout", "10")
    query.setdefault("application_name", "autotune")
    options = "-c default_transaction_read_only=on" if readonly else f"-c lock_timeout={int(timeout_s * 1000)}"
    try:
        return sa.create_engine(
            url.set(query=query),
            pool_pre_ping=True,
            json_serializer=canonical_json,
            connect_args={} if "options" in query else {"options": options},
        )
    except (NoSuchModuleError, ImportError):
        raise UserError(
            f"no driver for {url.drivername!r} is installed: pip install 'psycopg[binary]' and use postgresql://"
        ) from None


def _sqlite_engine(url: sa.URL, readonly: bool, timeout_s: float) -> sa.Engine:
    path = Path(str(url.database))
    uri = f"file:{quote(str(path))}"
    if readonly:
        if not path.is_file():
            raise UserError(f"there is no database {path}: run a search first, or give another with --db")
        uri += _readonly_mode(uri, path)
    else:
        _prepare_sqlite_file(path, timeout_s)

    def connect() -> sqlite3.Connection:
        # isolation_level None: the driver begins nothing by itself, the "begin" event below does.
        connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    engine = sa.create_engine(url, creator=connect, poolclass=QueuePool, json_serializer=canonical_json)

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes the write lock at once: upgrading a read lock later can fail without waiting.
        immediate = connection.get_execution_options().get("autotune_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _readonly_mode(uri: str, path: Path) -> str:
    """URI options for reading ``path``; a write-ahead log cannot be joined on a read-only medium, so go without one."""
    wal = path.with_name(path.name + "-wal")
    for mode in ("?mode=ro", "?mode=ro&immutable=1"):
        if "immutable" in mode and wal.exists() and wal.stat().st_size:
            break  # its newest rows are in the log, which cannot be read
        try:
            probe = sqlite3.connect(uri + mode, uri=True, timeout=5.0)
            try:
                probe.execute("SELECT count(*) FROM sqlite_master").fetchone()
            finally:
                probe.close()
            return mode
        except sqlite3.DatabaseError as e:
            error = e
    raise UserError(f"cannot read the database {path}: {error}") from None


def _prepare_sqlite_file(path: Path, timeout_s: float) -> None:
    """Make the folder, check that the file can be written, and turn write-ahead logging on (it stays on)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot create the folder {path.parent} for the database: {e.strerror}") from None
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it, such as {path / 'autotune.db'}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UserError(f"cannot write the database {path} (SQLite needs the file and its folder writable): give --db")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = sqlite3.connect(path, timeout=timeout_s)
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
            finally:
                connection.close()
            return
        except sqlite3.DatabaseError as e:
            # Changing the mode does not always wait for other processes that do the same.
            if "locked" not in str(e) or time.monotonic() > deadline:
                raise UserError(_reason(str(path), e)) from None
        time.sleep(0.02)


def _reason(where: str, error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    if "not a database" in first or "malformed" in first:
        return f"{where} is not a usable SQLite database ({first}): give another with --db"
    if "locked" in first or "lock timeout" in first:
        return f"the database {where} is locked by another process ({first}): try again when that has finished"
    if "readonly" in first or "read-only" in first:
        return f"the database {where} cannot be written ({first}): give another with --db"
    if "no such table" in first or ("relation" in first and "does not exist" in first):
        return f"the database {where} lacks autotune's tables: run `autotune db upgrade --db {where}`"
    return f"cannot use the database {where}: {first}"


@contextmanager
def user_errors(url: sa.URL) -> Iterator[None]:
    """Turn what the database server or file does wrong into a UserError; mistakes in this package stay exceptions."""
    try:
        yield
    except (OperationalError, InterfaceError) as e:
        raise UserError(_reason(show_url(url), e.orig)) from e
    except DBAPIError as e:
        text = str(e.orig)
        if any(w in text for w in ("not a database", "malformed", "does not exist", "read-only", "permission denied")):
            raise UserError(_reason(show_url(url), e.orig)) from e
        raise


def revision(engine: sa.Engine, url: sa.URL) -> str | None:
    """The revision in our own version table, or None without one."""
    with user_errors(url), engine.connect() as connection:
        if not sa.inspect(connection).has_table(VERSION_TABLE):
            return None
        row = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).first()
        return str(row[0]) if row else None


class Database:
    """One database, open: the base of the store's parts.

    Thread-safe: every call takes its own connection from the pool. A forked child gets a pool of its own.
    """

    def __init__(self, url: sa.URL, engine: sa.Engine, *, readonly: bool) -> None:
        self._url = url
        self._engine = engine
        self._writer = engine.execution_options(autotune_write=True)
        self._insert = sqlite.insert if url.get_backend_name() == "sqlite" else postgresql.insert
        self._pid = os.getpid()
        self.readonly = readonly

    @property
    def url(self) -> str:
        """The database's URL, password included; :meth:`Store.open` takes it in any process."""
        return self._url.render_as_string(hide_password=False)

    @property
    def name(self) -> str:
        """The database for messages: a path, or a URL without its password."""
        return show_url(self._url)

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection in one read transaction. Raises UserError when the database fails."""
        self._check_fork()
        with user_errors(self._url), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A connection in one write transaction, committed at the end. Raises UserError when the database fails."""
        if self.readonly:
            raise UserError(f"the database {self.name} was opened for reading only")
        self._check_fork()
        with user_errors(self._url), self._writer.begin() as connection:
            yield connection

    def insert(self, model: type[Base]) -> Any:
        """An INSERT with ``on_conflict_do_...``, which both dialects spell alike but SQLAlchemy types apart."""
        return self._insert(model)

    @staticmethod
    def changed(connection: sa.Connection, statement: Any) -> bool:
        """Execute an INSERT, UPDATE or DELETE and say whether it changed a row."""
        # Without the option SQLAlchemy drops an INSERT's row count, on PostgreSQL in favour of -1, which is true.
        return connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount > 0

    def close(self) -> None:
        """Close the connections. The store may not be used afterwards."""
        self._engine.dispose(close=self._pid == os.getpid())

    def _check_fork(self) -> None:
        if self._pid != os.getpid():  # the parent's connections must be neither used nor closed here
            self._engine.dispose(close=False)
            self._pid = os.getpid()
