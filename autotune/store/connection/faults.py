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
    """The server cannot be reached, broke off, or did not answer in time: the same call may well succeed later.

    Attributes:
        named: the text names the database.
        alive: the server answered that it starts, ends or is full: it is worth waiting for.
        replica: of the replica that look-ups read.
        waited: the caller has waited for it already.
    """

    def __init__(self, text: str, *, named: bool = False, alive: bool = False) -> None:
        super().__init__(text)
        self.named = named
        self.alive = alive
        self.replica = False
        self.waited = False


class Conflict(UserError):
    """The server took this transaction back in favour of another: done again, it will succeed."""


@contextmanager
def within(connection: sa.Connection, limit_s: float | None) -> Iterator[None]:
    """Break ``connection`` off where what is done meanwhile takes longer than ``limit_s`` seconds.

    A server's own timeouts are of no use where the server is stopped, and its kernel still answers for it. Cutting the
    socket makes the driver return at once.

    Raises:
        LostConnection: the time was up.
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
    """Shuts a socket down when called, unless :meth:`end` came first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._over = False
        self._done = False

    def __call__(self) -> None:
        with self._lock:
            if self._over:  # by now the number may be another file's
                return
            self._done = True
            with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as own:
                own.shutdown(socket.SHUT_RDWR)

    def end(self) -> bool:
        """Do nothing from now on; returns whether the socket was shut down before."""
        with self._lock:
            self._over = True
            return self._done


class Patience:
    """Repeats calls that lost their connection, for as long as ``seconds`` (0: once more, where the loss was quick, as
    of an idle connection). A line on stderr announces the wait, once for all threads."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._lock = threading.Lock()
        self._since: float | None = None

    def call(self, action: Callable[[], T]) -> T:
        """Call ``action``, again after a Conflict too. Raises LostConnection when the time is up."""
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
                self._tell(e, left)
                time.sleep(min(wait, left))
                wait = min(2 * wait, _LONGEST_S)
                continue
            self._is_back()
            return result

    def _tell(self, error: LostConnection, left: float) -> None:
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


def reason(url: sa.URL, error: BaseException | None) -> str:
    """A driver's error as a line that names the database and, if known, the remedy."""
    where, first = show_url(url), first_line(error, url)
    if "not a database" in first or "malformed" in first:
        return f"{where} is not a usable SQLite database ({first}): give another with --db"
    if "locked" in first or "lock timeout" in first:
        return f"the database {where} is locked by another process ({first}): try again when that has finished"
    if "readonly" in first or "read-only" in first:
        return f"the database {where} cannot be written ({first}): give another with --db"
    if "permission denied" in first:
        return f"the database {where} does not let its user do this ({first}): docs/fleet.md lists the rights to grant"
    if "no such table" in first or ("relation" in first and "does not exist" in first):
        return f"the database {where} lacks autotune's tables: run `{upgrade_command(url)}`"
    return f"cannot use the database {where}: {first}"


_WORDS = ("not a database", "malformed", "does not exist", "read-only", "permission denied", "statement timeout")

_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock


@contextmanager
def user_errors(url: sa.URL) -> Iterator[None]:
    """Turn what the database server or file does wrong into a UserError; mistakes in this package stay exceptions.

    Raises:
        LostConnection: a server that cannot be reached, broke off or did not answer in time.
        Conflict: a transaction that the server took back in favour of another.
    """
    try:
        yield
    except LostConnection as e:
        raise e if e.named else LostConnection(f"the database {show_url(url)} is lost: {e}", named=True) from e
    except DBAPIError as e:
        if _state(e) in _CONFLICTS:
            raise Conflict(reason(url, e.orig)) from e
        if _lost(url, e):
            raise LostConnection(reason(url, e.orig), named=True, alive=_state(e) is not None) from e
        if isinstance(e, (OperationalError, InterfaceError)) or any(w in str(e.orig) for w in _WORDS):
            raise UserError(reason(url, e.orig)) from e
        if isinstance(e, ProgrammingError) and url.get_backend_name() != "sqlite" and _state(e) is None:
            # Raised by the driver before it sent anything: an unknown option of the URL.
            raise UserError(reason(url, e.orig)) from e
        raise
    except UnicodeEncodeError as e:  # half of a character, from an argument that is not UTF-8
        raise UserError(f"{ascii(e.object)[:200]} is not UTF-8: a database holds no such text") from e
    except UnicodeDecodeError as e:  # SQLite's own words, which it takes from a damaged file
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
