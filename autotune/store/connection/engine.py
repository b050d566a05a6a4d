"""Connecting: engines with the right transactions, and the base class of the store."""

from __future__ import annotations

import functools
import logging
import math
import os
import sqlite3
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from autotune.errors import UserError, safe_line
from autotune.store.connection.faults import LostConnection, Patience, first_line, user_errors, within
from autotune.store.connection.sqlite import sqlite_engine
from autotune.store.connection.urls import server_options, show_url
from autotune.store.damage import BROKEN, from_json_text, why
from autotune.store.models import VERSION_TABLE, Base
from autotune.workload import canonical_json

T = TypeVar("T")
log = logging.getLogger(__name__)

CONNECT_S = 10
"""Seconds to wait for a server to accept a connection, unless the URL has a ``connect_timeout``."""

IDLE_S = 60
"""Seconds after which a server ends a deployment's idle connection, since a thousand processes would hold a thousand.
Servers before PostgreSQL 14 do not end them."""

_DEAD_PEER = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
"""TCP keepalives, which detect a lost host after a minute."""


def create_engine(
    url: sa.URL, *, readonly: bool = False, timeout_s: float = 30.0, limit_s: float | None = None
) -> sa.Engine:
    """An engine with explicit transactions; :class:`Database` reads and writes with it.

    Args:
        limit_s: time limit in seconds for connecting to a server, and for each statement; None for the default limit of
            connecting, and none for statements.

    Raises:
        UserError: not a database, unreachable, or not writable (unless ``readonly``).
    """
    if url.get_backend_name() == "sqlite":
        return sqlite_engine(url, readonly, timeout_s)
    given = {"connect_timeout": CONNECT_S if limit_s is None else math.ceil(limit_s), "application_name": "autotune"}
    url = server_options(url, {**given, **_DEAD_PEER})
    options = "-c default_transaction_read_only=on" if readonly else f"-c lock_timeout={int(timeout_s * 1000)}"
    if limit_s is not None:
        options += f" -c statement_timeout={int(limit_s * 1000)}"
    own = url.query.get("options", "")
    try:
        engine = sa.create_engine(
            url,
            pool_pre_ping=limit_s is None,  # a stopped server does not answer a ping, which has no time limit
            json_serializer=canonical_json,
            json_deserializer=from_json_text,
            connect_args={"options": f"{own if isinstance(own, str) else ' '.join(own)} {options}".strip()},
        )
    except (NoSuchModuleError, ImportError):
        raise UserError(
            f"no driver for {url.drivername!r} is installed: run `pip install 'psycopg[binary]'` and use postgresql://"
        ) from None
    except (ArgumentError, ValueError, TypeError) as e:
        raise UserError(f"the database URL {show_url(url)} has invalid options: {first_line(e, url)}") from None
    if limit_s is not None:
        event.listen(engine, "connect", _end_when_idle)
    return engine


def _end_when_idle(connection: Any, record: object) -> None:
    if connection.info.server_version >= 140_000:
        connection.execute(f"SET idle_session_timeout = '{IDLE_S}s'")
        connection.commit()


def revision(engine: sa.Engine, url: sa.URL, *, limit_s: float | None = None) -> str | None:
    """The revision in our own version table, or None without one."""
    with user_errors(url), engine.connect() as connection, within(connection, limit_s):
        if not sa.inspect(connection).has_table(VERSION_TABLE):
            return None
        row = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).first()
        return str(row[0]) if row else None


class Database:
    """One database, open: the base of the store's parts.

    Thread-safe: every call takes its own connection from the pool. A forked child opens another pool.

    Args:
        replica: the URL and engine for reads; None reads from the database itself.
    """

    def __init__(
        self,
        url: sa.URL,
        engine: sa.Engine,
        *,
        readonly: bool,
        limit_s: float | None = None,
        patience_s: float = 0.0,
        replica: tuple[sa.URL, sa.Engine] | None = None,
    ) -> None:
        self._url = url
        self._replica = replica
        self._engine = engine
        self._writer = engine.execution_options(autotune_write=True)
        self._insert = sqlite.insert if url.get_backend_name() == "sqlite" else postgresql.insert
        self._pid = os.getpid()
        self._limit_s = limit_s
        self._patience = Patience(f"the database {show_url(url)}", patience_s)
        self.readonly = readonly
        self.problems: deque[str] = deque(maxlen=1000)
        """Reasons why stored rows were skipped (such as damaged code), newest last; each is logged as a warning."""
        self._logged: set[str] = set()
        self.lost = ""
        """The reason why the server was given up, or ""; a deployment then does not use it for a while."""
        _opened.add(self)

    @property
    def url(self) -> str:
        """The database's URL with its password, for :meth:`Store.open` in any process. A path that is not UTF-8 stays a
        path, since no URL can contain it."""
        path = str(self._url.database)
        if self._url.get_backend_name() == "sqlite" and path != path.encode(errors="replace").decode():
            return path
        return self._url.render_as_string(hide_password=False)

    @property
    def name(self) -> str:
        """The database for messages: a path, or a URL without its password."""
        return show_url(self._url)

    def outlast(self, action: Callable[[], T]) -> T:
        """Call ``action``, and repeat it while the server is unreachable; see :class:`Patience`.

        Raises:
            LostConnection: the server did not come back in time.
        """
        try:
            return self._patience.call(action)
        except LostConnection as e:
            if self._replica is not None and not e.replica:
                self.readonly = True  # misses are not recorded, but look-ups continue
            else:
                self.lost = str(e)
            raise

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection in one read transaction, to the replica if there is one. Raises UserError if it fails."""
        self._check_fork()
        url, engine = self._replica or (self._url, self._engine)
        try:
            with user_errors(url), engine.connect() as c, within(c, self._limit_s):
                yield c
        except LostConnection as e:
            e.replica = self._replica is not None
            raise

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A connection in one write transaction, committed at the end. Raises UserError if the database fails."""
        if self.readonly:
            raise UserError(f"the database {self.name} is open for reading only")
        self._check_fork()
        # The limit covers the commit too, which may also hang.
        with user_errors(self._url), self._writer.connect() as c, within(c, self._limit_s), c.begin():
            yield c

    def problem(self, text: str) -> None:
        """Record that a stored row was skipped, and warn once."""
        line = safe_line(text, 500)
        if line in self._logged:
            return
        if len(self._logged) < 10_000:
            self._logged.add(line)
        self.problems.append(line)
        log.warning("%s", line)

    @contextmanager
    def referring(self, what: str, before: str) -> Iterator[sa.Connection]:
        """As :meth:`writing`, for a row that refers to others.

        Raises:
            ValueError: the other rows, ``what``, were not stored before.
        """
        try:
            with self.writing() as c:
                yield c
        except IntegrityError as e:
            raise ValueError(f"put {what} before {before}") from e

    def made(
        self,
        query: Any,
        make: Callable[[Any], T],
        name: Callable[[Any], str],
        values: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """The sound rows of ``query``, with ``values`` for its parameters, converted by :meth:`sound`."""
        with self.reading() as c:
            rows = c.execute(query, values).all()
        return list(self.sound(rows, make, name))

    def sound(self, rows: Iterable[Any], make: Callable[[Any], T], name: Callable[[Any], str]) -> Iterator[T]:
        """Call ``make`` with each row; damaged rows are left out and reported under their ``name``."""
        for row in rows:
            try:
                yield make(row)
            except BROKEN as e:
                self.problem(f"{name(row)} ignored: {why(e, row)}")

    def insert(self, model: type[Base]) -> Any:
        """An INSERT with ``on_conflict_do_...``, the same in both dialects but with different types in SQLAlchemy."""
        return self._insert(model)

    def upsert(
        self, model: type[Base], columns: Iterable[str], keys: Sequence[str], where: Callable[[Any], Any] | None = None
    ) -> Any:
        """An INSERT of ``columns`` that replaces the stored row with the same ``keys``.

        Args:
            where: takes the new row and returns the condition for replacing; None for always.
        """
        insert = self.insert(model)
        news = {n: insert.excluded[n] for n in columns if n not in keys}
        condition = None if where is None else where(insert.excluded)
        return insert.on_conflict_do_update(index_elements=list(keys), set_=news, where=condition)

    @staticmethod
    def changed(connection: sa.Connection, statement: Any, values: Mapping[str, Any] | None = None) -> bool:
        """Execute an INSERT, UPDATE or DELETE, with ``values`` for its parameters; True if it changed a row."""
        # Without the option SQLAlchemy drops an INSERT's row count; on PostgreSQL it is -1, which is true.
        return connection.execute(statement, values, execution_options={"preserve_rowcount": True}).rowcount > 0

    def close(self) -> None:
        """Close the connections. The store must not be used afterwards."""
        if not self.readonly and self._pid == os.getpid():
            self._empty_log()
        for engine in self._engines():
            engine.dispose(close=self._pid == os.getpid())

    def _empty_log(self) -> None:
        """Copy SQLite's write-ahead log into the file, as far as readers allow. Never waits.

        SQLite does so when the last connection closes. A deployment in the same process may read the file until the
        process ends, and users copy the file without its log.
        """
        pool = self._engine.pool
        if self._engine.dialect.name != "sqlite" or not isinstance(pool, sa.QueuePool) or not pool.checkedin():
            return
        with suppress(SQLAlchemyError, sqlite3.Error):
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            finally:
                connection.close()

    def _engines(self) -> list[sa.Engine]:
        return [self._engine] if self._replica is None else [self._engine, self._replica[1]]

    def _check_fork(self) -> None:
        if self._pid != os.getpid():  # the parent's connections must be neither used nor closed here
            for engine in self._engines():
                engine.dispose(close=False)
            self._pid = os.getpid()

    def _before_fork(self) -> None:
        """Close SQLite's idle connections before a fork. A child that inherits one appears to hold the parent's locks.
        The parent would then remove the log that the child writes, when it closes its last connection."""
        if self._pid == os.getpid():
            for engine in self._engines():
                if engine.dialect.name == "sqlite":
                    engine.dispose()


_opened: weakref.WeakSet[Database] = weakref.WeakSet()


def _before_fork() -> None:
    for database in list(_opened):
        database._before_fork()


os.register_at_fork(before=_before_fork)


def patient(cls: type[T]) -> type[T]:
    """Wrap every public method of a store, own and inherited, in its :class:`Patience`.

    Each is one transaction, or several that may be repeated: a repeated one finds the rows of an earlier attempt.
    """
    for base in cls.__mro__:
        if base is object or base is Database:
            continue
        for name, method in vars(base).items():
            public = callable(method) and not name.startswith("_") and not isinstance(method, (type, staticmethod))
            if public and not hasattr(Database, name):
                setattr(cls, name, _repeated(getattr(cls, name)))
    return cls


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(method, "__wrapped__"):
        return method

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.outlast(lambda: method(self, *args, **kwargs))

    return call
