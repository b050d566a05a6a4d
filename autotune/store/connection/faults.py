"""Errors of databases as one line for the user, and waiting for a server to come back."""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError

from autotune.errors import UserError
from autotune.store.connection.urls import show_url, upgrade_command, without_secrets

T = TypeVar("T")

OUTAGE_S = 300.0
"""Seconds that a search waits for its database's server to come back."""

_FIRST_S, _LONGEST_S = 0.5, 10.0  # between two attempts
_QUICK_S = 1.0
_MOST_CONFLICTS = 30


class LostConnection(UserError):
    """The server is unreachable, closed the connection, or did not answer in time; the same call may succeed later.

    Attributes:
        named: True if the text names the database.
        alive: True if the server answered that it is starting, stopping or full, so that waiting may help.
        replica: True for the replica that look-ups read.
        waited: True if the caller has waited for it already.
    """

    def __init__(self, text: str, *, named: bool = False, alive: bool = False) -> None:
        super().__init__(text)
        self.named = named
        self.alive = alive
        self.replica = False
        self.waited = False


class Conflict(UserError):
    """The server rolled this transaction back because of another one; a repetition will succeed."""


@contextmanager
def within(connection: sa.Connection, limit_s: float | None) -> Iterator[None]:
    """Context manager that cuts ``connection`` after ``limit_s`` seconds.

    A server's own timeouts do not work for a stopped server whose kernel still answers. Shutting the socket down makes
    the driver return at once.

    Raises:
        LostConnection: the time limit was reached.
    """
    raw = connection.connection.driver_connection
    if limit_s is None or raw is None or connection.dialect.name != "postgresql":
        yield
        return
    cut = _Cut(raw.fileno())
    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException as e:
        if cut.end():
            raise LostConnection(f"the server did not answer within {limit_s:g} s") from e
        raise
    finally:
        timer.cancel()
        cut.end()


class _Cut:
    """A callable that shuts a socket down, unless :meth:`end` was called first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._over = False
        self._done = False

    def __call__(self) -> None:
        with self._lock:
            if self._over:  # the descriptor may belong to another file now
                return
            self._done = True
            with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as own:
                own.shutdown(socket.SHUT_RDWR)

    def end(self) -> bool:
        """Disable this callable; True if it shut the socket down before."""
        with self._lock:
            self._over = True
            return self._done


class Patience:
    """Repeats calls that lost their connection, for ``seconds`` (0 for one repetition after a quick loss, such as that
    of an idle connection). A line on stderr announces the wait, once for all threads."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._lock = threading.Lock()
        self._since: float | None = None

    def call(self, action: Callable[[], T]) -> T:
        """Call ``action``, and repeat it after a Conflict too. Raises LostConnection at the time limit."""
        begin, wait, again, conflicts = time.monotonic(), _FIRST_S, True, 0
        while True:
            try:
                result = action()
            except Conflict:
                conflicts += 1
                if conflicts > _MOST_CONFLICTS:
                    raise
                time.sleep(random.uniform(0.001, 0.02) * conflicts)
                continue
            except LostConnection as e:
                now = time.monotonic()
                if again and not e.waited and now - begin < _QUICK_S:
                    again = False
                    continue
                left = begin + self._seconds - now
                if e.waited or left <= 0:
                    e.waited = True
                    raise
                self._warn(e, left)
                time.sleep(min(wait, left))
                wait = min(2 * wait, _LONGEST_S)
                continue
            self._is_back()
            return result

    def _warn(self, error: LostConnection, left: float) -> None:
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()
                print(f"autotune: {error}; waiting for it, {left:.0f} s at most", file=sys.stderr, flush=True)

    def _is_back(self) -> None:
        if self._since is None:
            return
        with self._lock:
            if self._since is not None:
                away = time.monotonic() - self._since
                self._since = None
                print(f"autotune: {self._name} answers again, after {away:.0f} s", file=sys.stderr, flush=True)


def first_line(error: BaseException | None, url: sa.URL) -> str:
    """The first line of a driver's message, without the secrets of ``url``."""
    lines = str(error).strip().splitlines()
    return without_secrets(lines[0] if lines else type(error).__name__, url)


_LEAST_FREE = 1 << 20
"""Bytes; SQLite needs some for the log of a file that it opens."""


def disk_is_full(url: sa.URL) -> bool:
    """True if a database is a file, on a disk with less free space than :data:`_LEAST_FREE`."""
    if url.get_backend_name() != "sqlite":
        return False
    with suppress(OSError):
        found = os.statvfs(os.path.dirname(str(url.database)))
        return found.f_bavail * found.f_frsize < _LEAST_FREE
    return False


def reason(url: sa.URL, error: BaseException | None) -> str:
    """A driver's error as a line that names the database and, if known, the remedy."""
    where, first = show_url(url), first_line(error, url)
    if "not a database" in first or "malformed" in first:
        return f"{where} is not a usable SQLite database ({first}): name another by --db or AUTOTUNE_DB"
    if "locked" in first or "lock timeout" in first:
        return f"the database {where} is locked by another process ({first}): try again when that has finished"
    if "readonly" in first or "read-only" in first:
        return f"the database {where} cannot be written ({first}): name another by --db or AUTOTUNE_DB"
    if "disk I/O error" in first and disk_is_full(url):
        return f"the disk of the database {where} is full ({first}): free some space, or name another by AUTOTUNE_DB"
    if "permission denied" in first:
        return f"the database {where} does not let its user do this ({first}): rights to grant: docs/how-to/fleet.md"
    if "no such table" in first or ("relation" in first and "does not exist" in first):
        return f"the database {where} lacks autotune's tables: run `{upgrade_command(url)}`"
    return f"cannot use the database {where}: {first}"


_WORDS = ("not a database", "malformed", "does not exist", "read-only", "permission denied", "statement timeout")

_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock


@contextmanager
def user_errors(url: sa.URL) -> Iterator[None]:
    """Convert errors of the database server or file to UserError, but not bugs of this package.

    Raises:
        LostConnection: the server is unreachable, closed the connection, or did not answer in time.
        Conflict: the server rolled the transaction back because of another one.
    """
    try:
        yield
    except LostConnection as e:
        raise (
            e if e.named else LostConnection(f"the connection to the database {show_url(url)} is lost: {e}", named=True)
        ) from e
    except DBAPIError as e:
        if _state(e) in _CONFLICTS:
            raise Conflict(reason(url, e.orig)) from e
        if _lost(url, e):
            raise LostConnection(reason(url, e.orig), named=True, alive=_state(e) is not None) from e
        if isinstance(e, (OperationalError, InterfaceError)) or any(w in str(e.orig) for w in _WORDS):
            raise UserError(reason(url, e.orig)) from e
        if isinstance(e, ProgrammingError) and url.get_backend_name() != "sqlite" and _state(e) is None:
            # Raised by the driver before it connects: an unknown option of the URL.
            raise UserError(reason(url, e.orig)) from e
        raise
    except UnicodeEncodeError as e:  # a lone surrogate, from an argument that is not UTF-8
        raise UserError(f"{ascii(e.object)[:200]} is not UTF-8, so a database cannot store it") from e
    except UnicodeDecodeError as e:  # SQLite's message, with text from a damaged file
        if url.get_backend_name() != "sqlite":
            raise
        raise UserError(reason(url, sqlite3.DatabaseError("malformed"))) from e


def _state(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _lost(url: sa.URL, error: DBAPIError) -> bool:
    if url.get_backend_name() == "sqlite":
        return False
    state = _state(error)
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    return state is None or (state[:2] in ("08", "57") and state != "57014") or state == "53300"
