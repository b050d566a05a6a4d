"""What the database did wrong, as one line for the user; what may succeed when it is done again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError

from autotune.errors import UserError
from autotune.store.connection.outage import Conflict, LostConnection
from autotune.store.connection.urls import show_url, upgrade_command, without_secrets


def first_line(error: BaseException | None, url: sa.URL) -> str:
    """The first line of what a driver said, without what of ``url`` is not for showing."""
    lines = str(error).strip().splitlines()
    return without_secrets(lines[0] if lines else type(error).__name__, url)


def reason(url: sa.URL, error: BaseException | None) -> str:
    """A driver's error as a line that names the database and, where that is known, says how to mend it."""
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
            # The driver's own, before anything was sent: an option of the URL that it does not know.
            raise UserError(reason(url, e.orig)) from e
        raise
    except UnicodeEncodeError as e:  # half of a character, as arguments that are not UTF-8 come to hold
        raise UserError(f"{ascii(e.object)[:200]} is not UTF-8: a database holds no such text") from e
    except UnicodeDecodeError as e:  # SQLite's own words, which it takes from a damaged file
        if url.get_backend_name() != "sqlite":
            raise
        raise UserError(reason(url, sqlite3.DatabaseError("malformed"))) from e


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
