"""Names of databases: from the user's text to an SQLAlchemy URL, and to messages without credentials."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from autotune.errors import UserError, mask_passwords, quoted_command
from autotune.files import default_database

DATABASE_VARIABLE = "AUTOTUNE_DB"
REPLICA_VARIABLE = "AUTOTUNE_DB_READ"
"""Environment variable of the replica for $AUTOTUNE_DB; not used for a database named in another way."""
EXAMPLES = "use a file name, sqlite:///FILE or postgresql://USER@HOST/NAME"

_SERVERS = re.compile(r"(?i)^(sqlite|postgres(ql)?|mysql|mariadb|oracle|mssql|cockroachdb|https?)(\+\w+)?[:;]")
_CREDENTIAL = re.compile(r"(?i):.*@|pass(word|wd)?\s*=")
_HARMLESS = {
    "host", "hostaddr", "port", "dbname", "user", "service", "sslmode", "application_name", "connect_timeout",
    "target_session_attrs", "mode", "uri", "cache", "immutable", "client_encoding", "gssencmode", "channel_binding",
}  # fmt: skip
"""Options of a URL whose values may be shown."""


def no_database(file: str | os.PathLike[str]) -> str:
    """The message for a missing database."""
    return f"there is no database {os.fspath(file)}: run a search first, or name another by --db or AUTOTUNE_DB"


def parse_url(url: str | os.PathLike[str] | None) -> sa.URL:
    """The database of ``url``: None for $AUTOTUNE_DB or the default file, a path, or an SQLAlchemy URL.

    SQLite paths are made absolute, since other processes will open them too.

    Raises:
        UserError: invalid URL, unsupported database, missing driver, or options for an SQLite file (the search's other
            processes would not have them). The message omits text that may have a password.
    """
    text = os.fspath(url) if url is not None else os.environ.get(DATABASE_VARIABLE) or str(default_database())
    if "://" not in text:
        if text.startswith("sqlite:") or text == ":memory:" or not text.strip():
            raise UserError(f"{mask_passwords(text)!r} is not the name of a database: {EXAMPLES}")
        if (_SERVERS.match(text) or _CREDENTIAL.search(text)) and not os.path.lexists(text):
            raise UserError(f"the name of the database looks like a URL, but is not one: {EXAMPLES}")
        return _sqlite_url(text)
    try:
        parsed = sa.make_url(text)
    except ArgumentError:
        raise UserError(f"the name of the database is not a database URL: {EXAMPLES}") from None
    except ValueError:
        raise UserError(f"the port in the database URL is not a number: {EXAMPLES}") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.query:
            raise UserError(
                f"{mask_passwords(str(parsed.database))}: an SQLite URL takes no options ({'&'.join(_options(parsed))})"
                ": name only the file, and remove its write permission if it must not be written"
            )
        if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
            raise UserError("the processes of a search cannot share an in-memory database: give a file name")
        if parsed.host or parsed.username or parsed.password:
            raise UserError(
                "an SQLite URL has no host and no user: write sqlite:///FILE, or sqlite:////FILE from the root"
            )
        return _sqlite_url(parsed.database)
    if backend in ("postgresql", "postgres"):
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        return parsed
    raise UserError(f"databases of type {backend!r} are not supported: {EXAMPLES}")


def is_missing(parsed: sa.URL) -> bool:
    """True for a missing SQLite file."""
    return parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists()


def _sqlite_url(path: str) -> sa.URL:
    if "\0" in path:
        raise UserError("the path of the database contains a zero byte, which file names cannot have")
    try:
        file = Path(path).expanduser().absolute()
        os.stat(file)
    except RuntimeError:
        raise UserError(f"{path}: no such user") from None
    except OSError as e:
        if e.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise UserError(f"cannot use {path} as a database: {e.strerror}") from None
    return sa.URL.create("sqlite", database=str(file))


def _options(url: sa.URL) -> Iterator[str]:
    for name, value in url.query.items():
        values = (value,) if isinstance(value, str) else value
        for one in values:
            shown = name in _HARMLESS and not _CREDENTIAL.search(one) and "=" not in one
            yield f"{name}={quote(one, safe='/:,._-') if shown else '***'}"


def show_url(url: sa.URL) -> str:
    """The URL for messages: a plain path for SQLite; a server's without password and values of unknown options."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    options = "&".join(_options(url))
    plain = url.set(query={}).render_as_string(hide_password=True)
    return mask_passwords(plain) + (f"?{options}" if options else "")


def for_command(db: str | os.PathLike[str]) -> str:
    """The word after ``--db`` in a command for the user to copy: a file's name, or "URL" for a server's."""
    try:
        parsed = parse_url(db)
    except UserError:
        return "URL"
    return os.fspath(db) if parsed.get_backend_name() == "sqlite" else "URL"


def upgrade_command(url: sa.URL) -> str:
    """The command that upgrades a database to this version; a server's URL is a placeholder."""
    name = str(url.database) if url.get_backend_name() == "sqlite" else "URL"
    return quoted_command("autotune", "db", "upgrade", "--db", name)


def without_secrets(text: str, url: sa.URL) -> str:
    """A driver's message without the secrets of ``url``."""
    secrets: set[str] = {str(url.password)} if url.password else set()
    for name, value in url.query.items():
        if name not in _HARMLESS:
            secrets.update((value,) if isinstance(value, str) else value)
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret, safe=""), quote_plus(secret)}:
            if len(form) > 2:
                text = text.replace(form, "***")
    return mask_passwords(text)


def server_options(url: sa.URL, defaults: dict[str, Any]) -> sa.URL:
    """``url`` with the options of ``defaults`` that the user did not give."""
    return url.set(query={**{name: str(value) for name, value in defaults.items()}, **url.query})
