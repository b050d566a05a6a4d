"""Alembic's environment for autotune's tables.

The database comes from the caller (``autotune.store.connection.migrate`` passes a connection that already holds the
lock), or, for the ``alembic`` command in a checkout, from ``-x db=URL``, $AUTOTUNE_DB or the default file.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from autotune.store.connection.engine import create_engine
from autotune.store.connection.urls import parse_url
from autotune.store.models import TABLE_PREFIX, VERSION_TABLE, Base


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Leave other people's tables alone; Optuna's may live in the same database."""
    return kind != "table" or (name or "").startswith(TABLE_PREFIX)


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        include_name=include_name,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


def offline() -> None:
    """Print SQL (``alembic upgrade head --sql``)."""
    url = parse_url(context.get_x_argument(as_dictionary=True).get("db"))
    context.configure(
        dialect_name=url.get_backend_name(),
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.run_migrations()


connection = context.config.attributes.get("connection")
if connection is not None:
    run(connection)
elif context.is_offline_mode():
    offline()
else:
    engine = create_engine(parse_url(context.get_x_argument(as_dictionary=True).get("db")))
    with engine.execution_options(autotune_write=True).begin() as connection:
        run(connection)
    engine.dispose()
