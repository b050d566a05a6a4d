"""Verdicts of whole steps: the regions of a graph that are left to Inductor.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "autotune_verdicts",
        sa.Column("graph", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("environment", sa.String(length=64), nullable=False),
        sa.Column("mode", sa.String(length=64), nullable=False),
        sa.Column("left", sa.JSON(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["autotune_devices.fingerprint"], name="fk_autotune_verdicts_device"),
        sa.ForeignKeyConstraint(
            ["environment"], ["autotune_environments.fingerprint"], name="fk_autotune_verdicts_environment"
        ),
        sa.PrimaryKeyConstraint("graph", "device", "environment", "mode", name="pk_autotune_verdicts"),
    )


def downgrade() -> None:
    op.drop_table("autotune_verdicts")
