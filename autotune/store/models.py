"""The tables. Names begin with ``autotune_``, so that they can share a database with Optuna's.

Content-addressed rows have fingerprints (SHA-256, 64 hex digits) as keys, so that two databases merge row by row. A
change here needs a migration in ``db/versions`` and a new :data:`SCHEMA_REVISION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autotune.store.damage import Damaged, unpaired

TABLE_PREFIX = "autotune_"
VERSION_TABLE = "autotune_alembic_version"
SCHEMA_REVISION = "0005"
"""The newest migration, compared at opening without importing Alembic; a test checks that it is current."""

_Fingerprint = String(64)


class Base(DeclarativeBase):
    """Base of the tables. Constraints are named by rule, so that migrations can drop them on both dialects."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {float: Double(), dict[str, Any]: JSON(), list[Any]: JSON()}


def _reference(table: str, **options: Any) -> Mapped[Any]:
    return mapped_column(_Fingerprint, ForeignKey(f"{TABLE_PREFIX}{table}.fingerprint"), **options)


class WorkloadRow(Base):
    """Workloads; ``created`` and all other times are in seconds since the epoch."""

    __tablename__ = "autotune_workloads"
    __table_args__ = (Index("ix_autotune_workloads_family", "family"),)

    fingerprint: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    spec: Mapped[dict[str, Any]]
    family: Mapped[str] = mapped_column(_Fingerprint)
    extent: Mapped[int] = mapped_column(BigInteger)
    label: Mapped[str] = mapped_column(Text)
    source: Mapped[dict[str, Any]]
    created: Mapped[float]


class DeviceRow(Base):
    __tablename__ = "autotune_devices"

    fingerprint: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    name: Mapped[str] = mapped_column(Text)
    identity: Mapped[dict[str, Any]]
    created: Mapped[float]


class EnvironmentRow(Base):
    """Software. ``fingerprint`` is the strict one; environments that likely behave the same share ``loose``."""

    __tablename__ = "autotune_environments"
    __table_args__ = (Index("ix_autotune_environments_loose", "loose"),)

    fingerprint: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    loose: Mapped[str] = mapped_column(_Fingerprint)
    versions: Mapped[dict[str, Any]]
    created: Mapped[float]


class ConfigRow(Base):
    """A candidate: parameter name to value."""

    __tablename__ = "autotune_configs"

    fingerprint: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    params: Mapped[dict[str, Any]]


class MeasurementRow(Base):
    """All measured candidates, including failures. The best one is a query over these."""

    __tablename__ = "autotune_measurements"
    __table_args__ = (
        UniqueConstraint(
            "workload", "device", "environment", "policy", "config", "stage", name="uq_autotune_measurements_key"
        ),
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
    workload: Mapped[str] = _reference("workloads")
    device: Mapped[str] = _reference("devices")
    environment: Mapped[str] = _reference("environments")
    policy: Mapped[str] = mapped_column(_Fingerprint)
    config: Mapped[str] = _reference("configs")
    stage: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16))
    latency_us: Mapped[float | None]
    samples: Mapped[list[Any]]
    noise: Mapped[float | None]
    error: Mapped[float | None]
    reason: Mapped[str] = mapped_column(Text)
    run: Mapped[str] = mapped_column(String(64))
    compile_s: Mapped[float]
    measure_s: Mapped[float]
    created: Mapped[float]
    metrics: Mapped[dict[str, Any]] = mapped_column(server_default="{}")


class BlobRow(Base):
    """Code by its SHA-256: equal cubins are stored once."""

    __tablename__ = "autotune_blobs"

    sha256: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    code: Mapped[bytes] = mapped_column(LargeBinary)


class ArtifactRow(Base):
    """A compiled configuration. The fingerprint covers every field, including the launch data."""

    __tablename__ = "autotune_artifacts"

    fingerprint: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    target: Mapped[str] = mapped_column(String(32))
    generator: Mapped[str] = mapped_column(Text)
    kernels: Mapped[list[Any]]
    scratch: Mapped[list[Any]]
    created: Mapped[float]


class ScheduleRow(Base):
    """Schedules to deploy, one for each key. ``config`` and ``artifact`` are null if a baseline won."""

    __tablename__ = "autotune_schedules"
    __table_args__ = (
        # A covering index for the nearest rows of a family, so that only the results are read from the table.
        Index("ix_autotune_schedules_nearest", "device", "family", "extent", "workload", "environment"),
    )

    workload: Mapped[str] = _reference("workloads", primary_key=True)
    device: Mapped[str] = _reference("devices", primary_key=True)
    environment: Mapped[str] = _reference("environments", primary_key=True)
    policy: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    config: Mapped[str | None] = _reference("configs", nullable=True)
    artifact: Mapped[str | None] = _reference("artifacts", nullable=True)
    latency_us: Mapped[float]
    baselines: Mapped[dict[str, Any]]
    winner: Mapped[str] = mapped_column(String(32))
    family: Mapped[str] = mapped_column(_Fingerprint)
    extent: Mapped[int] = mapped_column(BigInteger)
    others: Mapped[float | None]
    space: Mapped[str] = mapped_column(_Fingerprint)
    created: Mapped[float]


class MissRow(Base):
    """A workload of a deployment without a stored schedule."""

    __tablename__ = "autotune_misses"

    workload: Mapped[str] = _reference("workloads", primary_key=True)
    device: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    reason: Mapped[str] = mapped_column(Text)
    created: Mapped[float]


class RunRow(Base):
    """One invocation of a search. ``owner`` names its process, which may have died in the state "running"."""

    __tablename__ = "autotune_runs"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    command: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    owner: Mapped[str] = mapped_column(Text)
    started: Mapped[float]
    finished: Mapped[float | None]
    summary: Mapped[dict[str, Any]]


class EffortRow(Base):
    """The progress of a workload's search, within one ``scope`` (space file, method and version of the search)."""

    __tablename__ = "autotune_efforts"

    workload: Mapped[str] = _reference("workloads", primary_key=True)
    device: Mapped[str] = _reference("devices", primary_key=True)
    environment: Mapped[str] = _reference("environments", primary_key=True)
    policy: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    scope: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    seconds: Mapped[float]
    granted: Mapped[float]
    settled: Mapped[bool]
    stop: Mapped[str] = mapped_column(Text)
    created: Mapped[float]


class VerdictRow(Base):
    """The regions of a graph left to Inductor, after its step was timed with and without them."""

    __tablename__ = "autotune_verdicts"

    graph: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    device: Mapped[str] = _reference("devices", primary_key=True)
    environment: Mapped[str] = _reference("environments", primary_key=True)
    mode: Mapped[str] = mapped_column(String(64), primary_key=True)
    left: Mapped[list[Any]]
    record: Mapped[dict[str, Any]]
    created: Mapped[float]


class CalibrationRow(Base):
    """Figures of a device from a short measured run, for a domain's cost models."""

    __tablename__ = "autotune_calibrations"

    device: Mapped[str] = _reference("devices", primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    figures: Mapped[dict[str, Any]]
    created: Mapped[float]


class SavingRow(Base):
    """Steps that ran stored kernels, counted by one process in one week."""

    __tablename__ = "autotune_savings"

    process: Mapped[str] = mapped_column(String(32), primary_key=True)
    graph: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    device: Mapped[str] = _reference("devices", primary_key=True)
    environment: Mapped[str] = _reference("environments", primary_key=True)
    mode: Mapped[str] = mapped_column(String(64), primary_key=True)
    week: Mapped[str] = mapped_column(String(10), primary_key=True)
    program: Mapped[str] = mapped_column(Text)
    steps: Mapped[int] = mapped_column(BigInteger)
    alone_us: Mapped[float]
    created: Mapped[float]


class ClaimRow(Base):
    """A lease on measuring one candidate. It is short-lived, so it has no references in either direction."""

    __tablename__ = "autotune_claims"
    __table_args__ = (Index("ix_autotune_claims_owner", "owner"),)

    workload: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    device: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    environment: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    policy: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    config: Mapped[str] = mapped_column(_Fingerprint, primary_key=True)
    stage: Mapped[str] = mapped_column(String(16), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    expires: Mapped[float]


def table_name(model: type[Base]) -> str:
    """A table's name without the prefix."""
    return str(model.__tablename__).removeprefix(TABLE_PREFIX)


def fits(model: type[Base], row: Mapping[str, Any]) -> None:
    """Check that the texts of a row fit into their columns.

    Raises:
        Damaged: not a text, too long, or with characters that PostgreSQL or UTF-8 cannot store.
    """
    for column in model.__table__.c:
        value, kind = row.get(column.name), column.type
        if not isinstance(kind, String) or (value is None and column.nullable):
            continue
        if not isinstance(value, str):
            raise Damaged(f"its {column.name} is not text")
        if kind.length is not None and len(value) > kind.length:
            raise Damaged(f"its {column.name} is longer than {kind.length} characters")
        if "\0" in value or unpaired(value):
            raise Damaged(f"its {column.name} holds a character that no database takes")
