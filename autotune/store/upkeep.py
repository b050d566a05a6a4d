"""Upkeep of a database: finding damaged rows, removing old ones, forgetting failures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from autotune.errors import UserError, safe_line
from autotune.store import codec
from autotune.store.damage import BROKEN, Damaged, moment, why
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
    SavingRow,
    ScheduleRow,
    VerdictRow,
    WorkloadRow,
    table_name,
)
from autotune.store.records import Key
from autotune.store.store import Store
from autotune.store.tables.measurements import WORKLOAD_COLUMNS
from autotune.store.tables.runs import effort_from, miss_from, run_from, saving_from
from autotune.store.tables.schedules import DEPLOYED, TOUCH, artifact_of
from autotune.task import FAILURES, Status

_M, _S = MeasurementRow, ScheduleRow
_LOCKED = "autotune_configs, autotune_measurements, autotune_schedules, autotune_artifacts, autotune_blobs"


def damage(store: Store) -> Iterator[str]:
    """A line for each invalid row, with the reason.

    It compares every checksum, follows every reference, and reads every value as a search or a deployment does. Its
    memory does not grow with the database.

    Raises:
        UserError: the database failed.
    """
    for model in _CHECKS:
        for row, wrong in checked_rows(store, model):
            if wrong:
                yield line(model, row, wrong)
    for model in _CHECKS:
        yield from _dangling(store, model)


def checked_rows(store: Store, model: type[Base]) -> Iterator[tuple[Any, str]]:
    """The rows of a table, each with the reason why it is damaged; "" for a sound one."""
    for row in _rows(store, _QUERIES.get(model, sa.select(model.__table__))):
        wrong = ""
        try:
            if model is ArtifactRow:
                with store.reading() as c:
                    artifact_of(c, row.fingerprint, row)
            _CHECKS[model](row)
        except BROKEN as e:
            wrong = why(e, row)
        yield row, wrong


def line(model: type[Base], row: Any, text: str) -> str:
    """A line about a row, with the row's key."""
    name = " ".join(str(getattr(row, column.name))[:12] for column in sa.inspect(model).primary_key)
    return safe_line(f"{table_name(model)} {name}: {text}", 500)


def _rows(store: Store, query: Any) -> Iterator[Any]:
    with store.reading() as c:
        yield from c.execution_options(yield_per=200).execute(query)


def _dangling(store: Store, model: type[Base]) -> Iterator[str]:
    table = Base.metadata.tables[model.__tablename__]
    for foreign in sorted(table.foreign_keys, key=lambda f: f.parent.name):
        other = foreign.column.table.alias("other")
        there = sa.exists().where(other.c[foreign.column.name] == foreign.parent)
        query = sa.select(*table.primary_key.columns, foreign.parent.label("refers"))
        for row in _rows(store, query.where(foreign.parent.is_not(None), ~there)):
            yield line(model, row, f"its {foreign.parent.name} {str(row.refers)[:12]} is not there")


def _workload(row: Any) -> None:
    codec.workload_from(row)
    moment(row.created)


def _device(row: Any) -> None:
    if codec.device_from(row.fingerprint, row.identity).kind != row.kind:
        raise Damaged("its kind is not that of its identity")


def _environment(row: Any) -> None:
    if codec.environment_from(row.fingerprint, row.versions).loose != row.loose:
        raise Damaged("its loose fingerprint does not match its versions")


def _blob(row: Any) -> None:
    if not isinstance(row.code, bytes) or hashlib.sha256(row.code).hexdigest() != row.sha256:
        raise Damaged("it fails its SHA-256")


def _measurement(row: Any) -> None:
    if row.params_of is not None:  # a missing configuration is reported as a dangling reference
        codec.measurement_from(row)


def _schedule(row: Any) -> None:
    if row.config is None or row.params_of is not None:
        codec.schedule_from(row)


_CHECKS: Mapping[type[Base], Callable[[Any], object]] = {
    WorkloadRow: _workload,
    DeviceRow: _device,
    EnvironmentRow: _environment,
    ConfigRow: lambda row: codec.config_from(row.params, row.fingerprint),
    BlobRow: _blob,
    ArtifactRow: lambda row: None,  # checked_rows checks it, with its code
    MeasurementRow: _measurement,
    ScheduleRow: _schedule,
    VerdictRow: codec.verdict_from,
    EffortRow: effort_from,
    CalibrationRow: codec.calibration_from,
    MissRow: miss_from,
    RunRow: run_from,
    SavingRow: saving_from,
    ClaimRow: lambda row: moment(row.expires, "expiry"),
}
_WITH_CONFIG = (ConfigRow.params, ConfigRow.fingerprint.label("params_of"))
_QUERIES: Mapping[type[Base], Any] = {
    WorkloadRow: sa.select(WorkloadRow.fingerprint, WorkloadRow.created, *WORKLOAD_COLUMNS),
    BlobRow: sa.select(BlobRow.sha256, sa.type_coerce(BlobRow.code, sa.types.NullType()).label("code")),
    MeasurementRow: sa.select(_M.__table__, *_WITH_CONFIG).outerjoin(ConfigRow, ConfigRow.fingerprint == _M.config),
    ScheduleRow: sa.select(_S.__table__, *_WITH_CONFIG).outerjoin(ConfigRow, ConfigRow.fingerprint == _S.config),
    MissRow: sa.select(MissRow.__table__, MissRow.count.label("times")),
}
"""Queries of tables whose checks need other columns than the table has."""
TABLES = tuple(_CHECKS)
"""Each table only refers to earlier ones."""


@dataclass(frozen=True)
class Limits:
    """Rows to remove. Times are in seconds since the epoch; None keeps all of a kind.

    Attributes:
        runs: remove finished runs whose command was run again later.
        failures: remove measurements of failures before this time.
        candidates: remove measurements before this time under the key of a schedule, except of its own configuration.
        misses: remove misses that last occurred before this time.
    """

    runs: bool = False
    failures: float | None = None
    candidates: float | None = None
    misses: float | None = None


def prune(store: Store, limits: Limits, *, dry: bool) -> dict[str, int]:
    """Remove the rows selected by ``limits`` and then unreferenced rows, in one transaction.

    Schedules, verdicts, efforts, calibrations, and referenced artifacts and configurations are kept.

    Args:
        dry: remove nothing; the counts are those of the rows to remove, without rows that would become unreferenced.

    Returns:
        Rows by kind: "runs", "failures", "candidates", "misses", "configurations", "artifacts", "kernels".

    Raises:
        UserError: the database failed.
    """
    chosen = _chosen(limits)

    def counted() -> dict[str, int]:
        with store.reading() as c:
            return {
                name: int(c.scalar(sa.select(sa.func.count()).select_from(model).where(*where)) or 0)
                for name, model, where in chosen
            }

    def removed() -> dict[str, int]:
        with store.writing() as c:
            if c.dialect.name == "postgresql":
                # A search writes a configuration, and then its references: it must not be removed in between.
                c.execute(sa.text(f"LOCK TABLE {_LOCKED} IN SHARE ROW EXCLUSIVE MODE"))
            found = {name: c.execute(sa.delete(model).where(*where)).rowcount for name, model, where in chosen}
            for name, model, where in _unused():
                found[name] = c.execute(sa.delete(model).where(*where)).rowcount
            listed = _listed(c)
            names = [n for n in c.scalars(sa.select(BlobRow.sha256)) if n not in listed]
            for at in range(0, len(names), 500):
                c.execute(sa.delete(BlobRow).where(BlobRow.sha256.in_(names[at : at + 500])))
            return {**found, "kernels": len(names)}

    action: Callable[[], dict[str, int]] = counted if dry else removed
    return store.outlast(action)


def _chosen(limits: Limits) -> list[tuple[str, Any, list[Any]]]:
    found: list[tuple[str, Any, list[Any]]] = []
    if limits.runs:
        later = aliased(RunRow)
        again = sa.exists().where(later.command == RunRow.command, later.started > RunRow.started)
        found.append(("runs", RunRow, [RunRow.state != "running", again]))
    if limits.failures is not None:
        found.append(("failures", _M, [_M.status != str(Status.OK), _M.created < limits.failures]))
    if limits.candidates is not None:
        key = [getattr(_S, n) == getattr(_M, n) for n in ("workload", "device", "environment", "policy")]
        decided = sa.exists().where(*key)
        own = sa.exists().where(*key, _S.config == _M.config)
        found.append(("candidates", _M, [_M.created < limits.candidates, decided, ~own]))
    if limits.misses is not None:
        found.append(("misses", MissRow, [MissRow.created < limits.misses]))
    return found


def _unused() -> list[tuple[str, Any, list[Any]]]:
    measured = sa.exists().where(_M.config == ConfigRow.fingerprint)
    deployed = sa.exists().where(_S.config == ConfigRow.fingerprint)
    launched = sa.exists().where(_S.artifact == ArtifactRow.fingerprint)
    return [("configurations", ConfigRow, [~measured, ~deployed]), ("artifacts", ArtifactRow, [~launched])]


def _listed(c: sa.Connection) -> set[str]:
    """SHA-256 of the code in artifacts; of a damaged artifact those that are readable."""
    found = set()
    for kernels in c.scalars(sa.select(ArtifactRow.kernels)):
        for kernel in kernels if isinstance(kernels, list) else ():
            if isinstance(kernel, dict):
                found.add(str(kernel.get("sha256")))
    return found


def forget_failures(
    store: Store, statuses: Collection[Status] = FAILURES, *, workload: str = "", reason: str = ""
) -> dict[Key, int]:
    """Delete the measurements of these statuses, and the efforts of the workloads on their devices.

    With the efforts, a search would skip a finished workload, and one that has the failed candidate's workload as a
    part. Schedules and successful measurements are kept.

    Args:
        workload: a fingerprint, its beginning, or a part of a label; empty for all.
        reason: a part of the stored reason; empty for any.

    Returns:
        Number of deleted measurements under each key.

    Raises:
        UserError: unknown workload, or a status that is not a failure.
    """
    if wrong := [str(status) for status in statuses if status not in FAILURES]:
        raise UserError(f"{wrong[0]!r} is not a failure: choose from {', '.join(FAILURES)}")
    where: list[sa.ColumnElement[bool]] = [_M.status.in_([str(status) for status in statuses])]
    if workload:
        found = [w.fingerprint for w in store.find_workloads(workload)]
        if not found:
            raise UserError(f"{store.name} has no workload {workload!r}: `autotune show` lists its workloads")
        where.append(_M.workload.in_(found))
    if reason:
        where.append(_M.reason.contains(reason, autoescape=True))
    columns = (_M.workload, _M.device, _M.environment, _M.policy)
    with store.writing() as c:
        counts = c.execute(sa.select(*columns, sa.func.count()).where(*where).group_by(*columns)).all()
        failed = sa.select(_M.workload).where(*where, _M.stage == DEPLOYED)  # look-ups find their schedules again
        c.execute(sa.update(_S).where(_S.workload.in_(failed)).values(created=_S.created + TOUCH))
        c.execute(sa.delete(_M).where(*where))
        devices = {row[1] for row in counts}
        c.execute(sa.delete(EffortRow).where(EffortRow.device.in_(devices)))
    return {Key(*row[:4]): int(row[4]) for row in counts}
