"""Connecting: from what the user wrote to an engine with the right transactions, and errors in one line."""

from __future__ import annotations

import functools
import logging
import math
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.pool import QueuePool

from autotune.errors import UserError, told
from autotune.store.connection.outage import LostConnection, Patience, within
from autotune.store.connection.urls import default_path, parse_url, server_options, show_url, without_secrets
from autotune.store.health.damage import BROKEN, from_json_text, why
from autotune.store.models import VERSION_TABLE, Base
from autotune.workload import canonical_json

__all__ = ["Database", "create_engine", "default_path", "parse_url", "patient", "revision", "show_url", "user_errors"]

T = TypeVar("T")
log = logging.getLogger(__name__)

CONNECT_S = 10
"""Seconds to wait for a server to accept a connection, unless the URL's ``connect_timeout`` says another number."""

_DEAD_PEER = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
"""A host that vanished without a word is noticed after a minute."""


def create_engine(
    url: sa.URL, *, readonly: bool = False, timeout_s: float = 30.0, limit_s: float | None = None
) -> sa.Engine:
    """An engine whose transactions are what they say; see :class:`Database` for reading and writing with it.

    Args:
        limit_s: seconds that connecting to a server, and each statement there, may take; None waits for as long as it
            takes to connect by default.

    Raises:
        UserError: the database cannot be reached, written (unless ``readonly``) or is not a database.
    """
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, readonly, timeout_s)
    given = {"connect_timeout": CONNECT_S if limit_s is None else math.ceil(limit_s), "application_name": "autotune"}
    url = server_options(url, {**given, **_DEAD_PEER})
    options = "-c default_transaction_read_only=on" if readonly else f"-c lock_timeout={int(timeout_s * 1000)}"
    if limit_s is not None:
        options += f" -c statement_timeout={int(limit_s * 1000)}"
    try:
        return sa.create_engine(
            url,
            pool_pre_ping=limit_s is None,  # a stopped server does not answer to it, and it knows no limit
            json_serializer=canonical_json,
            json_deserializer=from_json_text,
            connect_args={} if "options" in url.query else {"options": options},
        )
    except (NoSuchModuleError, ImportError):
        raise UserError(
            f"no driver for {url.drivername!r} is installed: pip install 'psycopg[binary]' and use postgresql://"
        ) from None
    except (ArgumentError, ValueError, TypeError) as e:
        raise UserError(f"the options of the database URL {show_url(url)} do not fit: {_first(e, url)}") from None


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
        connection.text_factory = _text
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    engine = sa.create_engine(
        url,
        creator=connect,
        poolclass=QueuePool,
        json_serializer=canonical_json,
        json_deserializer=from_json_text,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes the write lock at once: upgrading a read lock later can fail without waiting.
        immediate = connection.get_execution_options().get("autotune_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _text(data: bytes) -> str:
    """A text that was damaged on disk is read all the same: its row is told apart by what it says."""
    return data.decode(errors="replace")


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
                raise UserError(_reason(sa.URL.create("sqlite", database=str(path)), e)) from None
        time.sleep(0.02)


def _first(error: BaseException | None, url: sa.URL) -> str:
    lines = str(error).strip().splitlines()
    return without_secrets(lines[0] if lines else type(error).__name__, url)


def _reason(url: sa.URL, error: BaseException | None) -> str:
    where, first = show_url(url), _first(error, url)
    if "not a database" in first or "malformed" in first:
        return f"{where} is not a usable SQLite database ({first}): give another with --db"
    if "locked" in first or "lock timeout" in first:
        return f"the database {where} is locked by another process ({first}): try again when that has finished"
    if "readonly" in first or "read-only" in first:
        return f"the database {where} cannot be written ({first}): give another with --db"
    if "no such table" in first or ("relation" in first and "does not exist" in first):
        return f"the database {where} lacks autotune's tables: run `autotune db upgrade --db {where}`"
    return f"cannot use the database {where}: {first}"


_WORDS = ("not a database", "malformed", "does not exist", "read-only", "permission denied", "statement timeout")


@contextmanager
def user_errors(url: sa.URL) -> Iterator[None]:
    """Turn what the database server or file does wrong into a UserError; mistakes in this package stay exceptions.

    Raises:
        LostConnection: a server that cannot be reached, broke off or did not answer in time.
    """
    try:
        yield
    except LostConnection as e:
        raise e if e.named else LostConnection(f"the database {show_url(url)} is lost: {e}", named=True) from e
    except DBAPIError as e:
        if _lost(url, e):
            raise LostConnection(_reason(url, e.orig), named=True) from e
        if isinstance(e, (OperationalError, InterfaceError)) or any(w in str(e.orig) for w in _WORDS):
            raise UserError(_reason(url, e.orig)) from e
        if isinstance(e, ProgrammingError) and url.get_backend_name() != "sqlite" and _state(e) is None:
            # The driver's own, before anything was sent: an option of the URL that it does not know.
            raise UserError(_reason(url, e.orig)) from e
        raise


def _state(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _lost(url: sa.URL, error: DBAPIError) -> bool:
    """Whether a server cannot be reached, or has ended the connection."""
    if url.get_backend_name() == "sqlite":
        return False
    state = _state(error)
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    return state is None or (state[:2] in ("08", "57") and state != "57014") or state == "53300"


def revision(engine: sa.Engine, url: sa.URL, *, limit_s: float | None = None) -> str | None:
    """The revision in our own version table, or None without one."""
    with user_errors(url), engine.connect() as connection, within(connection, limit_s):
        if not sa.inspect(connection).has_table(VERSION_TABLE):
            return None
        row = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).first()
        return str(row[0]) if row else None


class Database:
    """One database, open: the base of the store's parts.

    Thread-safe: every call takes its own connection from the pool. A forked child gets a pool of its own.
    """

    def __init__(
        self,
        url: sa.URL,
        engine: sa.Engine,
        *,
        readonly: bool,
        limit_s: float | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._url = url
        self._engine = engine
        self._writer = engine.execution_options(autotune_write=True)
        self._insert = sqlite.insert if url.get_backend_name() == "sqlite" else postgresql.insert
        self._pid = os.getpid()
        self._limit_s = limit_s
        self._patience = Patience(f"the database {show_url(url)}", patience_s)
        self.readonly = readonly
        self.problems: deque[str] = deque(maxlen=1000)
        """Why stored rows were passed over (damaged code and the like), newest last; each is logged as a warning."""
        self._told: set[str] = set()
        self.lost = ""
        """Why the server was given up, once it was; a deployment then asks nothing more of it for a while."""

    @property
    def url(self) -> str:
        """The database's URL, password included; :meth:`Store.open` takes it in any process."""
        return self._url.render_as_string(hide_password=False)

    @property
    def name(self) -> str:
        """The database for messages: a path, or a URL without its password."""
        return show_url(self._url)

    def outlast(self, action: Callable[[], T]) -> T:
        """What ``action`` returns, called again while the server is away; see :class:`Patience`.

        Raises:
            LostConnection: it did not come back in time.
        """
        try:
            return self._patience.call(action)
        except LostConnection as e:
            self.lost = str(e)
            raise

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection in one read transaction. Raises UserError when the database fails."""
        self._check_fork()
        with user_errors(self._url), self._engine.connect() as c, within(c, self._limit_s):
            yield c

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A connection in one write transaction, committed at the end. Raises UserError when the database fails."""
        if self.readonly:
            raise UserError(f"the database {self.name} was opened for reading only")
        self._check_fork()
        # The limit covers the commit too, which a server may not answer either.
        with user_errors(self._url), self._writer.connect() as c, within(c, self._limit_s), c.begin():
            yield c

    def problem(self, text: str) -> None:
        """Note, and warn of once, that a stored row was passed over."""
        line = told(text, 500)
        if line in self._told:
            return
        if len(self._told) < 10_000:
            self._told.add(line)
        self.problems.append(line)
        log.warning("%s", line)

    def sound(self, rows: Iterable[Any], make: Callable[[Any], T], name: Callable[[Any], str]) -> Iterator[T]:
        """What ``make`` makes of each row, without those that are damaged, which are told by ``name``."""
        for row in rows:
            try:
                yield make(row)
            except BROKEN as e:
                self.problem(f"{name(row)} ignored: {why(e, row)}")

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


def patient(cls: type[T]) -> type[T]:
    """Make every public method of a store, its own and inherited, go through its :class:`Patience`.

    Each is one transaction, or several that may be done again: a repeated one finds what an earlier attempt stored.
    """
    for base in cls.__mro__:
        if base is object or base is Database:
            continue
        for name, method in vars(base).items():
            if callable(method) and not name.startswith("_") and not isinstance(method, (type, staticmethod)):
                setattr(cls, name, _repeated(getattr(cls, name)))
    return cls


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(method, "__wrapped__"):
        return method

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.outlast(lambda: method(self, *args, **kwargs))

    return call
