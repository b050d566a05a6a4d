"""Tables of a new database, made by the statements that Alembic made the first ones with: it takes longer itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic.config import Config

from autotune.store.models import VERSION_TABLE

Upgrade = Callable[[Config, str], None]


def kept(upgrade: Upgrade) -> Upgrade:
    """``alembic.command.upgrade`` that runs once for an empty database of each kind, within one process."""
    made: dict[str, list[tuple[str, Any]]] = {}

    def upgraded(config: Config, to: str) -> None:
        connection: sa.Connection = config.attributes["connection"]
        if sa.inspect(connection).has_table(VERSION_TABLE):
            upgrade(config, to)
            return
        kind = connection.dialect.name
        if kind not in made:
            made[kind] = _recorded(connection, lambda: upgrade(config, to))
            return
        for statement, values in made[kind]:
            connection.exec_driver_sql(statement, values)

    return upgraded


def _recorded(connection: sa.Connection, run: Callable[[], None]) -> list[tuple[str, Any]]:
    """The statements that it runs, and their values."""
    statements: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, values: Any, *___: object) -> None:
        if not statement.lstrip().startswith(("SELECT", "PRAGMA")):
            statements.append((statement, values))

    sa.event.listen(connection, "before_cursor_execute", note)
    try:
        run()
    finally:
        sa.event.remove(connection, "before_cursor_execute", note)
    return statements
