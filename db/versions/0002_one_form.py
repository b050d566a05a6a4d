"""One form for every database of revision 0001, and schedules of a family by their rows.

0001 was edited three times before it was fixed: databases made by its earlier forms lack ``others`` or ``space`` of
schedules, or the tables of efforts and calibrations. They get them here; a database that has them keeps what it has.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_OLD_INDEX = "ix_autotune_schedules_device_family"
_INDEX = "ix_autotune_schedules_nearest"


def upgrade() -> None:
    if not context.is_offline_mode():  # as SQL to be read, it is for the last form of 0001
        _complete(sa.inspect(op.get_bind()))
    op.create_index(_INDEX, "autotune_schedules", ["device", "family", "extent", "workload", "environment"])
    op.drop_index(_OLD_INDEX, table_name="autotune_schedules")


def _complete(found: sa.Inspector) -> None:
    tables = set(found.get_table_names())
    columns = {column["name"] for column in found.get_columns("autotune_schedules")}
    with op.batch_alter_table("autotune_schedules") as schedules:
        if "others" not in columns:
            schedules.add_column(sa.Column("others", sa.Double(), nullable=True))
        if "space" not in columns:
            # What was tuned before spaces were recorded was tuned in the shipped one, which is written so.
            schedules.add_column(sa.Column("space", sa.String(length=64), nullable=False, server_default=""))
    if "space" not in columns:
        with op.batch_alter_table("autotune_schedules") as schedules:
            schedules.alter_column("space", server_default=None)
    if "autotune_calibrations" not in tables:
        op.create_table(
            "autotune_calibrations",
            sa.Column("device", sa.String(length=64), nullable=False),
            sa.Column("kind", sa.String(length=32), nullable=False),
            sa.Column("figures", sa.JSON(), nullable=False),
            sa.Column("created", sa.Double(), nullable=False),
            sa.ForeignKeyConstraint(
                ["device"], ["autotune_devices.fingerprint"], name="fk_autotune_calibrations_device"
            ),
            sa.PrimaryKeyConstraint("device", "kind", name="pk_autotune_calibrations"),
        )
    if "autotune_efforts" not in tables:
        op.create_table(
            "autotune_efforts",
            sa.Column("workload", sa.String(length=64), nullable=False),
            sa.Column("device", sa.String(length=64), nullable=False),
            sa.Column("environment", sa.String(length=64), nullable=False),
            sa.Column("policy", sa.String(length=64), nullable=False),
            sa.Column("scope", sa.String(length=64), nullable=False),
            sa.Column("seconds", sa.Double(), nullable=False),
            sa.Column("granted", sa.Double(), nullable=False),
            sa.Column("settled", sa.Boolean(), nullable=False),
            sa.Column("stop", sa.Text(), nullable=False),
            sa.Column("created", sa.Double(), nullable=False),
            sa.ForeignKeyConstraint(["device"], ["autotune_devices.fingerprint"], name="fk_autotune_efforts_device"),
            sa.ForeignKeyConstraint(
                ["environment"], ["autotune_environments.fingerprint"], name="fk_autotune_efforts_environment"
            ),
            sa.ForeignKeyConstraint(
                ["workload"], ["autotune_workloads.fingerprint"], name="fk_autotune_efforts_workload"
            ),
            sa.PrimaryKeyConstraint("workload", "device", "environment", "policy", "scope", name="pk_autotune_efforts"),
        )


def downgrade() -> None:
    op.create_index(_OLD_INDEX, "autotune_schedules", ["device", "family"])
    op.drop_index(_INDEX, table_name="autotune_schedules")
