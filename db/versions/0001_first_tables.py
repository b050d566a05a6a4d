"""The first tables.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "autotune_artifacts",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=32), nullable=False),
        sa.Column("generator", sa.Text(), nullable=False),
        sa.Column("kernels", sa.JSON(), nullable=False),
        sa.Column("scratch", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_autotune_artifacts"),
    )
    op.create_table(
        "autotune_blobs",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("code", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_autotune_blobs"),
    )
    op.create_table(
        "autotune_claims",
        sa.Column("workload", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("environment", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("config", sa.String(length=64), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint(
            "workload", "device", "environment", "policy", "config", "stage", name="pk_autotune_claims"
        ),
    )
    op.create_index("ix_autotune_claims_owner", "autotune_claims", ["owner"])
    op.create_table(
        "autotune_configs",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_autotune_configs"),
    )
    op.create_table(
        "autotune_devices",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("identity", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_autotune_devices"),
    )
    op.create_table(
        "autotune_environments",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("loose", sa.String(length=64), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_autotune_environments"),
    )
    op.create_index("ix_autotune_environments_loose", "autotune_environments", ["loose"])
    op.create_table(
        "autotune_runs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("finished", sa.Double(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_autotune_runs"),
    )
    op.create_table(
        "autotune_workloads",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("family", sa.String(length=64), nullable=False),
        sa.Column("extent", sa.BigInteger(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_autotune_workloads"),
    )
    op.create_index("ix_autotune_workloads_family", "autotune_workloads", ["family"])
    op.create_table(
        "autotune_calibrations",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["autotune_devices.fingerprint"], name="fk_autotune_calibrations_device"),
        sa.PrimaryKeyConstraint("device", "kind", name="pk_autotune_calibrations"),
    )
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
        sa.ForeignKeyConstraint(["workload"], ["autotune_workloads.fingerprint"], name="fk_autotune_efforts_workload"),
        sa.PrimaryKeyConstraint("workload", "device", "environment", "policy", "scope", name="pk_autotune_efforts"),
    )
    op.create_table(
        "autotune_measurements",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("workload", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("environment", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("config", sa.String(length=64), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("latency_us", sa.Double(), nullable=True),
        sa.Column("samples", sa.JSON(), nullable=False),
        sa.Column("noise", sa.Double(), nullable=True),
        sa.Column("error", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("compile_s", sa.Double(), nullable=False),
        sa.Column("measure_s", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["config"], ["autotune_configs.fingerprint"], name="fk_autotune_measurements_config"),
        sa.ForeignKeyConstraint(["device"], ["autotune_devices.fingerprint"], name="fk_autotune_measurements_device"),
        sa.ForeignKeyConstraint(
            ["environment"], ["autotune_environments.fingerprint"], name="fk_autotune_measurements_environment"
        ),
        sa.ForeignKeyConstraint(
            ["workload"], ["autotune_workloads.fingerprint"], name="fk_autotune_measurements_workload"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_autotune_measurements"),
        sa.UniqueConstraint(
            "workload", "device", "environment", "policy", "config", "stage", name="uq_autotune_measurements_key"
        ),
    )
    op.create_table(
        "autotune_misses",
        sa.Column("workload", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["workload"], ["autotune_workloads.fingerprint"], name="fk_autotune_misses_workload"),
        sa.PrimaryKeyConstraint("workload", "device", name="pk_autotune_misses"),
    )
    op.create_table(
        "autotune_schedules",
        sa.Column("workload", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("environment", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("config", sa.String(length=64), nullable=True),
        sa.Column("artifact", sa.String(length=64), nullable=True),
        sa.Column("latency_us", sa.Double(), nullable=False),
        sa.Column("baselines", sa.JSON(), nullable=False),
        sa.Column("winner", sa.String(length=32), nullable=False),
        sa.Column("family", sa.String(length=64), nullable=False),
        sa.Column("extent", sa.BigInteger(), nullable=False),
        sa.Column("others", sa.Double(), nullable=True),
        sa.Column("space", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact"], ["autotune_artifacts.fingerprint"], name="fk_autotune_schedules_artifact"
        ),
        sa.ForeignKeyConstraint(["config"], ["autotune_configs.fingerprint"], name="fk_autotune_schedules_config"),
        sa.ForeignKeyConstraint(["device"], ["autotune_devices.fingerprint"], name="fk_autotune_schedules_device"),
        sa.ForeignKeyConstraint(
            ["environment"], ["autotune_environments.fingerprint"], name="fk_autotune_schedules_environment"
        ),
        sa.ForeignKeyConstraint(
            ["workload"], ["autotune_workloads.fingerprint"], name="fk_autotune_schedules_workload"
        ),
        sa.PrimaryKeyConstraint("workload", "device", "environment", "policy", name="pk_autotune_schedules"),
    )
    op.create_index("ix_autotune_schedules_device_family", "autotune_schedules", ["device", "family"])


def downgrade() -> None:
    op.drop_index("ix_autotune_schedules_device_family", table_name="autotune_schedules")
    op.drop_table("autotune_schedules")
    op.drop_table("autotune_misses")
    op.drop_table("autotune_measurements")
    op.drop_table("autotune_efforts")
    op.drop_table("autotune_calibrations")
    op.drop_index("ix_autotune_workloads_family", table_name="autotune_workloads")
    op.drop_table("autotune_workloads")
    op.drop_table("autotune_runs")
    op.drop_index("ix_autotune_environments_loose", table_name="autotune_environments")
    op.drop_table("autotune_environments")
    op.drop_table("autotune_devices")
    op.drop_table("autotune_configs")
    op.drop_index("ix_autotune_claims_owner", table_name="autotune_claims")
    op.drop_table("autotune_claims")
    op.drop_table("autotune_blobs")
    op.drop_table("autotune_artifacts")
