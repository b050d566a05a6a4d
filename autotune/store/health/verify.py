"""Going through a whole database for rows that cannot be used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from autotune.errors import told
from autotune.store.codec import config_from, measurement_from, workload_from
from autotune.store.health.damage import BROKEN, Damaged, moment, why
from autotune.store.models import (
    ArtifactRow,
    Base,
    BlobRow,
    CalibrationRow,
    ClaimRow,
    ConfigRow,
    DeviceRow,
    EffortRow,
    EnvironmentRow,
    MeasurementRow,
    MissRow,
    RunRow,
    VerdictRow,
    WorkloadRow,
)
from autotune.store.store import Store
from autotune.store.tables.efforts import calibration_from, effort_from
from autotune.store.tables.measurements import WORKLOAD_COLUMNS
from autotune.store.tables.runs import miss_from, run_from
from autotune.store.tables.schedules import PLAIN, artifact_of, schedule_from_row
from autotune.store.tables.verdicts import verdict_from
from autotune.store.tables.workloads import device_from, environment_from


def damage(store: Store) -> Iterator[str]:
    """A line for each row that cannot be used: what it is, and why.

    Every checksum is compared, code's among them, every reference followed, and every value read as a search or a
    deployment would. A large database needs no more memory than a small one.

    Raises:
        UserError: the database failed.
    """
    for table, query, check in CHECKS:
        for row in _rows(store, query):
            try:
                check(row)
            except BROKEN as e:
                yield _line(table, row, why(e, row))
    yield from _dangling(store)
    for row in _rows(store, sa.select(BlobRow.sha256, _RAW)):
        if not isinstance(row.code, bytes) or hashlib.sha256(row.code).hexdigest() != row.sha256:
            yield _line("blobs", row, "it fails its SHA-256")
    for row in _rows(store, sa.select(ArtifactRow.__table__)):
        try:
            with store.reading() as c:
                artifact_of(c, row.fingerprint, row)
        except BROKEN as e:
            yield _line("artifacts", row, why(e, row))


def _rows(store: Store, query: Any) -> Iterator[Any]:
    with store.reading() as c:
        yield from c.execution_options(yield_per=200).execute(query)


def _dangling(store: Store) -> Iterator[str]:
    """References that lead nowhere."""
    for table in Base.metadata.sorted_tables:
        for foreign in sorted(table.foreign_keys, key=lambda f: f.parent.name):
            other = foreign.column.table.alias("other")
            there = sa.exists().where(other.c[foreign.column.name] == foreign.parent)
            query = sa.select(*table.primary_key.columns, foreign.parent.label("refers"))
            for row in _rows(store, query.where(foreign.parent.is_not(None), ~there)):
                text = f"its {foreign.parent.name} {str(row.refers)[:12]} is not there"
                yield _line(table.name.removeprefix("autotune_"), row, text)


def _line(table: str, row: Any, text: str) -> str:
    """Names a row by its key."""
    key = Base.metadata.tables[f"autotune_{table}"].primary_key.columns.keys()
    name = " ".join(str(getattr(row, column))[:12] for column in key)
    return told(f"{table} {name}: {text}", 500)


def _workload(row: Any) -> None:
    workload_from(row)
    moment(row.created)


def _device(row: Any) -> None:
    if device_from(row.fingerprint, row.identity).kind != row.kind:
        raise Damaged("its kind is not that of its identity")


def _environment(row: Any) -> None:
    if environment_from(row.fingerprint, row.versions).loose != row.loose:
        raise Damaged("its loose fingerprint does not match its versions")


def _config(row: Any) -> None:
    config_from(row.params, row.fingerprint)


def _measurement(row: Any) -> None:
    if row.params_of is not None:  # what is missing is told as a reference that leads nowhere
        measurement_from(row)


def _schedule(row: Any) -> None:
    if row.config is None or row.params_of is not None:
        schedule_from_row(row, None)


def _claim(row: Any) -> None:
    moment(row.expires, "expiry")


_RAW = sa.type_coerce(BlobRow.code, sa.types.NullType()).label("code")
_CONFIG_IS_THERE = ConfigRow.fingerprint.label("params_of")
CHECKS: tuple[tuple[str, Any, Callable[[Any], object]], ...] = (
    ("workloads", sa.select(WorkloadRow.fingerprint, WorkloadRow.created, *WORKLOAD_COLUMNS), _workload),
    ("devices", sa.select(DeviceRow.__table__), _device),
    ("environments", sa.select(EnvironmentRow.__table__), _environment),
    ("configs", sa.select(ConfigRow.__table__), _config),
    (
        "measurements",
        sa.select(MeasurementRow.__table__, ConfigRow.params, _CONFIG_IS_THERE).outerjoin_from(
            MeasurementRow, ConfigRow, ConfigRow.fingerprint == MeasurementRow.config
        ),
        _measurement,
    ),
    ("schedules", PLAIN.add_columns(_CONFIG_IS_THERE), _schedule),
    ("efforts", sa.select(EffortRow.__table__), effort_from),
    ("verdicts", sa.select(VerdictRow.__table__), verdict_from),
    ("calibrations", sa.select(CalibrationRow.__table__), calibration_from),
    ("misses", sa.select(MissRow.__table__, MissRow.count.label("times")), miss_from),
    ("runs", sa.select(RunRow.__table__), run_from),
    ("claims", sa.select(ClaimRow.__table__), _claim),
)
