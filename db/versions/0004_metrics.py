"""Measurements keep a domain's own figures, such as GB/s.

Those taken before have none. The default stays, so that rows which are merged from elsewhere need not name it.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("autotune_measurements", sa.Column("metrics", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    with op.batch_alter_table("autotune_measurements") as measurements:
        measurements.drop_column("metrics")
