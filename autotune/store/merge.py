"""Merging: copy the contents of a snapshot or another database into a database.

:func:`_take` has the rules for both. A snapshot is imported in one transaction, completely or not at all. A database is
merged in batches, without its damaged rows; an interrupted merge continues with the same call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from autotune.errors import UserError, printable, quoted_command
from autotune.space import is_number
from autotune.store import codec
from autotune.store.damage import BROKEN, Damaged, cost, moment, why
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
    SavingRow,
    ScheduleRow,
    VerdictRow,
    WorkloadRow,
    fits,
    table_name,
)
from autotune.store.opening import path_of
from autotune.store.records import PREDICTED
from autotune.store.snapshot import Snapshot
from autotune.store.snapshot_form import kind_of
from autotune.store.store import Store
from autotune.store.tables.schedules import better
from autotune.store.tables.workloads import batches
from autotune.store.upkeep import TABLES, checked_rows, line
from autotune.task import Status, config_key

Row = dict[str, Any]

_BATCH = 500
_SCHEDULE = ("workload", "device", "environment", "policy")
_CANDIDATE = (*_SCHEDULE, "config", "stage")
_TAKEN = tuple(model for model in TABLES if model is not ClaimRow)
"""Each table only refers to earlier ones, so that a merge may stop anywhere."""


@dataclass
class Merged:
    """The outcome of a merge or an import.

    Attributes:
        rows: number of copied rows by table: new ones, or better than the existing ones.
        conflicts: a line for each schedule or measurement that differs between both.
        left_out: a line for each row of the other database that is damaged or refers to a damaged one.
    """

    rows: dict[str, int] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, other: Merged) -> None:
        for table, count in other.rows.items():
            self.rows[table] = self.rows.get(table, 0) + count
        self.conflicts += other.conflicts
        self.left_out += other.left_out


@dataclass(frozen=True)
class Incoming:
    """A snapshot's rows by table, all checked."""

    path: Path
    rows: Mapping[type[Base], Sequence[Row]]

    @property
    def schedules(self) -> int:
        """The number of schedules."""
        return len(self.rows[ScheduleRow])

    def into(self, store: Store) -> Merged:
        """Add the rows to ``store``, in one transaction. Importing twice changes nothing.

        Raises:
            UserError: the database refused them; nothing is changed.
        """
        try:
            return store.outlast(lambda: _write(store, self.rows))
        except (sa.exc.DataError, sa.exc.IntegrityError, OverflowError, UnicodeError) as e:
            first = " ".join(str(getattr(e, "orig", None) or e).split())
            where = f"the database {store.name}"
            raise UserError(f"{where} rejected the rows of {self.path} ({first}): nothing was changed") from e


def checked(file: str | Path, *, key: str | None = None) -> Incoming:
    """Read and check a whole snapshot, before any database is opened for it.

    Args:
        file: a path, or ``package:NAME``.
        key: a public key that the snapshot must be signed with.

    Raises:
        UserError: the file is unreadable, not a snapshot, of a later form, damaged, or not signed with the key.
    """
    path = Path(path_of(file))
    kind = kind_of(path)
    if kind == "bundle":
        raise UserError(
            f"{path} is a bundle of an earlier version, which this version cannot read: run `autotune export"
            " schedules.atdb` on the bundle's database, and import that file"
        )
    if kind == "database":
        raise UserError(
            f"{path} is a database, not a snapshot: run `{quoted_command('autotune', 'db', 'merge', str(path))}`"
        )
    snapshot = Snapshot(path, key=key)
    try:
        snapshot.check()
        rows = _rows(snapshot)
        for model, listed in rows.items():
            for row in listed:
                fits(model, row)
    except BROKEN as e:
        raise UserError(f"the snapshot {path} is damaged ({why(e)}): export it again") from None
    finally:
        snapshot.close()
    return Incoming(path, rows)


def _rows(snapshot: Snapshot) -> dict[type[Base], list[Row]]:
    now = time.time()
    schedules = snapshot.schedules(artifacts=True)
    workloads = snapshot.get_workloads(s.key.workload for s in schedules)
    configs: dict[str, Row] = {}
    blobs: dict[str, Row] = {}
    artifacts: dict[str, Row] = {}
    listed = []
    for s in schedules:
        if s.key.workload not in workloads:
            raise Damaged(f"workload {s.key.workload[:12]} is missing")
        if s.config is not None:
            fingerprint = config_key(s.config)
            configs[fingerprint] = {"fingerprint": fingerprint, "params": s.config}
        name = None
        if s.artifact is not None:
            data = codec.artifact_json(s.artifact)
            name = codec.artifact_id(data)
            artifacts[name] = {"fingerprint": name, **data, "created": now}
            blobs |= {
                sha256: {"sha256": sha256, "code": code} for sha256, code in codec.artifact_blobs(s.artifact).items()
            }
        listed.append(codec.schedule_values(s, name, now))
    return {
        WorkloadRow: [codec.workload_values(w, now) for w in workloads.values()],
        DeviceRow: [codec.device_values(d, now) for d in snapshot.devices],
        EnvironmentRow: [codec.environment_values(e, now) for e in snapshot.environments],
        ConfigRow: list(configs.values()),
        BlobRow: list(blobs.values()),
        ArtifactRow: list(artifacts.values()),
        ScheduleRow: listed,
        VerdictRow: [codec.verdict_values(v, now) for v in snapshot.verdicts()],
        CalibrationRow: [codec.calibration_values(c, now) for c in snapshot.calibrations()],
    }


def merge(store: Store, other: Store) -> Merged:
    """Copy all rows of ``other``, except claims. An interrupted merge continues with the same call.

    The faster of two schedules of one key is kept, unless it failed in deployment here. The other's configuration is
    kept as a measurement with its latency. Of two measurements of one candidate at one stage, an ok one wins over a
    failure, then the faster one. Of verdicts and calibrations the newer is kept, of efforts and counts of steps the
    larger. Existing labels and misses are not changed.

    Raises:
        UserError: a database failed.
    """
    if store.url == other.url:
        raise UserError(f"{store.name} cannot be merged into itself: name another database")
    found = Merged()
    for model in _TAKEN:
        found.rows[table_name(model)] = 0
        for rows in _batches(other, model, found):
            found.add(store.outlast(functools.partial(_write, store, {model: rows}, partial=True)))
    return found


def _batches(other: Store, model: type[Base], found: Merged) -> Iterator[list[Row]]:
    """The sound rows of a table; damaged ones are reported."""
    columns = [c.name for c in model.__table__.c if not (model is MeasurementRow and c.name == "id")]
    rows: list[Row] = []
    for row, wrong in checked_rows(other, model):
        named = row._mapping  # columns of workloads have other names in it, since they may be joined to a measurement's
        values = {n: named[n if n in named else f"w_{n}"] for n in columns}
        if not wrong:
            try:
                fits(model, values)
            except Damaged as e:
                wrong = str(e)
        if wrong:
            found.left_out.append(line(model, row, wrong))
            continue
        rows.append(values)
        if len(rows) >= (20 if model is BlobRow else _BATCH):
            yield rows
            rows = []
    if rows:
        yield rows


def _write(store: Store, rows: Mapping[type[Base], Sequence[Row]], *, partial: bool = False) -> Merged:
    """Copy rows in one transaction.

    Args:
        partial: omit rows with references to rows that are missing here.
    """
    found = Merged()
    with store.writing() as c:
        for model, listed in rows.items():
            found.rows[table_name(model)] = 0
            for part in batches(listed, _BATCH):
                _take(store, c, model, _with_parents(c, model, part, found) if partial else part, found)
    return found


def _take(store: Store, c: sa.Connection, model: type[Base], rows: Sequence[Row], found: Merged) -> None:
    if not rows:
        return
    if model is ScheduleRow:
        _keep_losers(store, c, rows, found)
    if model is MeasurementRow:
        _tell_differences(c, rows, found)
    keys = _CANDIDATE if model is MeasurementRow else _primary(model)
    insert = store.upsert(model, rows[0], keys, _BETTER[model]) if model in _BETTER else store.insert(model)
    if model not in _BETTER:
        insert = insert.on_conflict_do_nothing()
    done = c.execute(insert, list(rows), execution_options={"preserve_rowcount": True})
    found.rows[table_name(model)] += max(done.rowcount, 0)
    if model is ScheduleRow:
        same = (MissRow.workload == sa.bindparam("the_workload"), MissRow.device == sa.bindparam("the_device"))
        pairs = sorted({(row["workload"], row["device"]) for row in rows if row["space"] != PREDICTED})
        if not pairs:
            return
        c.execute(sa.delete(MissRow).where(*same), [{"the_workload": w, "the_device": d} for w, d in pairs])


def _better_measurement(new: Any) -> Any:
    ok, here = str(Status.OK), MeasurementRow
    return (new.status == ok) & ((here.status != ok) | (new.latency_us < here.latency_us))


def _mended_artifact(new: Any) -> Any:
    """The condition that launch data here are damaged. PostgreSQL compares texts, but not JSON."""
    columns = [ArtifactRow.__table__.c[n] for n in ("target", "generator", "kernels", "scratch")]
    return sa.or_(*(sa.cast(new[c.name], sa.Text) != sa.cast(c, sa.Text) for c in columns))


_BETTER: Mapping[type[Base], Callable[[Any], Any]] = {
    ScheduleRow: better,
    MeasurementRow: _better_measurement,
    EffortRow: lambda new: new.seconds > EffortRow.seconds,
    VerdictRow: lambda new: new.created > VerdictRow.created,
    CalibrationRow: lambda new: new.created > CalibrationRow.created,
    SavingRow: lambda new: new.steps > SavingRow.steps,
    ArtifactRow: _mended_artifact,
    BlobRow: lambda new: new.code != BlobRow.code,
}
"""Conditions for an incoming row to replace the existing one; rows of other tables are never replaced."""


def _primary(model: type[Base]) -> tuple[str, ...]:
    return tuple(column.name for column in sa.inspect(model).primary_key)


def _with_parents(c: sa.Connection, model: type[Base], rows: Sequence[Row], found: Merged) -> Sequence[Row]:
    """The rows whose references all exist here; a referenced row may be damaged in the other database."""
    for foreign in model.__table__.foreign_keys:
        name, target = foreign.parent.name, foreign.column
        wanted = sorted({row[name] for row in rows if row[name] is not None})
        there = set(c.scalars(sa.select(target).where(target.in_(wanted))))
        gone = [row for row in rows if row[name] is not None and row[name] not in there]
        rows = [row for row in rows if row[name] is None or row[name] in there]
        keys = [n for n in _primary(model) if n in (gone[0] if gone else ())] or ["workload", "config"]
        for row in gone:
            text = " ".join(str(row[k])[:12] for k in keys)
            found.left_out.append(f"{table_name(model)} {text}: its {name} was left out")
    return rows


def _stored(c: sa.Connection, model: type[Base], keys: Sequence[str], rows: Sequence[Row]) -> dict[Any, Row]:
    found = {}
    for part in batches(rows, 150):
        same = sa.tuple_(*(getattr(model, n) for n in keys)).in_([tuple(row[n] for n in keys) for row in part])
        for row in c.execute(sa.select(model.__table__).where(same)).mappings():
            found[tuple(row[n] for n in keys)] = {str(name): value for name, value in row.items()}
    return found


def _keep_losers(store: Store, c: sa.Connection, rows: Sequence[Row], found: Merged) -> None:
    """Store the configuration of each schedule that is replaced or not copied as a measurement."""
    known = _stored(c, ScheduleRow, _SCHEDULE, rows)
    for row in rows:
        here = known.get(tuple(row[n] for n in _SCHEDULE))
        if here is None or (here["config"], here["winner"]) == (row["config"], row["winner"]):
            continue
        try:
            cost(here["latency_us"]), moment(here["created"])
        except Damaged:
            continue  # it has no valid data to keep
        kinds = {n: ScheduleRow.__table__.c[n].type for n in ("config", "winner", "created", "latency_us", "space")}
        new = SimpleNamespace(**{n: sa.literal(row[n], kind) for n, kind in kinds.items()})
        own = [getattr(ScheduleRow, n) == row[n] for n in _SCHEDULE]
        gives_way = c.scalar(sa.select(better(new)).where(*own))
        label = c.scalar(sa.select(WorkloadRow.label).where(WorkloadRow.fingerprint == row["workload"]))
        found.conflicts.append(
            f"schedule of {printable(str(label))} ({row['workload'][:12]}) on {row['device'][:12]}:"
            f" {here['latency_us']:.4g} us here, {row['latency_us']:.4g} us there:"
            f" {'that one takes its place' if gives_way else 'this one stays'}"
        )
        loser = here if gives_way else row
        if loser["config"] is not None:  # None if a baseline won
            kept = {n: loser[n] for n in (*_SCHEDULE, "config", "latency_us", "created")}
            values = {**kept, "stage": "final", "status": str(Status.OK), "run": "", "samples": [], "noise": 0.0,
                      "error": None, "reason": "merged", "compile_s": 0.0, "measure_s": 0.0}  # fmt: skip
            c.execute(store.insert(MeasurementRow).values(**values).on_conflict_do_nothing())


def _tell_differences(c: sa.Connection, rows: Sequence[Row], found: Merged) -> None:
    known = _stored(c, MeasurementRow, _CANDIDATE, rows)
    for there in rows:
        here = known.get(tuple(there[n] for n in _CANDIDATE))
        names = ("status", "latency_us")
        if here is not None and any(here[n] != there[n] for n in names):
            one, other = (
                f"{r['latency_us']:.4g} us" if is_number(r["latency_us"]) else str(r["status"]) for r in (here, there)
            )
            found.conflicts.append(
                f"measurement {there['workload'][:12]} {there['config'][:12]} {there['stage']}: "
                f"{one} here, {other} there"
            )
