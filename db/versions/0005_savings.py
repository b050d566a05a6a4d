"""Steps that ran stored kernels, by the process that counted them.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "autotune_savings",
        sa.Column("process", sa.String(32), nullable=False),
        sa.Column("graph", sa.String(64), nullable=False),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("environment", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(64), nullable=False),
        sa.Column("week", sa.String(10), nullable=False),
        sa.Column("program", sa.Text(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("alone_us", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["autotune_devices.fingerprint"], name="fk_autotune_savings_device"),
        sa.ForeignKeyConstraint(
            ["environment"], ["autotune_environments.fingerprint"], name="fk_autotune_savings_environment"
        ),
        sa.PrimaryKeyConstraint(
            "process", "graph", "device", "environment", "mode", "week", name="pk_autotune_savings"
        ),
    )


def downgrade() -> None:
    op.drop_table("autotune_savings")
