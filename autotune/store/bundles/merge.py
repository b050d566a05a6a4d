"""Taking over what another database holds: every row that is sound, the better of two that meet."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from autotune.errors import UserError, told
from autotune.space import is_number
from autotune.store.health.damage import BROKEN, Damaged, why
from autotune.store.health.verify import CHECKS
from autotune.store.models import (
    ArtifactRow,
    Base,
    BlobRow,
    CalibrationRow,
    ConfigRow,
    DeviceRow,
    EffortRow,
    EnvironmentRow,
    MeasurementRow,
    MissRow,
    RunRow,
    ScheduleRow,
    VerdictRow,
    WorkloadRow,
)
from autotune.store.store import Store
from autotune.store.tables.schedules import artifact_of, better, contest
from autotune.store.tables.workloads import batches
from autotune.task import Status

_BATCH = 500
_KEY = ("workload", "device", "environment", "policy")
_ORDER: tuple[type[Base], ...] = (
    WorkloadRow,
    DeviceRow,
    EnvironmentRow,
    ConfigRow,
    BlobRow,
    ArtifactRow,
    MeasurementRow,
    ScheduleRow,
    VerdictRow,
    EffortRow,
    CalibrationRow,
    MissRow,
    RunRow,
)
"""Each refers to those before it only, so that a merge may stop anywhere."""


@dataclass
class Merged:
    """What came of a merge.

    Attributes:
        rows: taken over, by table: new here, or better than what was here.
        conflicts: a line for each schedule or measurement that both have and that differ.
        left_out: a line for each row of the other database that is damaged or refers to one that is.
    """

    rows: dict[str, int] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def merge(store: Store, other: Store) -> Merged:
    """Take over all rows of ``other``, except claims. What is stopped is gone on with by the same call.

    The faster of two schedules of one key stays, unless it failed here when it was deployed; of the other the
    configuration is kept, with its latency as a measurement. Of two measurements of one candidate at one stage an ok
    one stays before a failure, then the faster. Of verdicts and calibrations the newer stays, of efforts the larger;
    labels and misses that are here stay as they are.

    Raises:
        UserError: a database failed.
    """
    if store.url == other.url:
        raise UserError(f"{store.name} is the same database: name another to merge into it")
    found = Merged()
    checks = {f"autotune_{name}": (query, check) for name, query, check in CHECKS}
    for model in _ORDER:
        query, check = checks.get(model.__tablename__, (sa.select(model.__table__), lambda row: None))
        count = 0
        for rows in _batches(other, model, query, check, found):
            written, told_of = store.outlast(functools.partial(_write, store, model, rows))
            count += written
            found.conflicts += told_of.conflicts
            found.left_out += told_of.left_out
        found.rows[model.__tablename__.removeprefix("autotune_")] = count
    return found


def _batches(other: Store, model: type[Base], query: Any, check: Any, found: Merged) -> Iterator[list[dict[str, Any]]]:
    columns = [c.name for c in model.__table__.c if not (model is MeasurementRow and c.name == "id")]
    keys = [c.name for c in sa.inspect(model).primary_key]
    rows: list[dict[str, Any]] = []
    with other.reading() as c:
        for row in c.execution_options(yield_per=_BATCH).execute(query):
            try:
                check(row)
                if model is ArtifactRow:
                    with other.reading() as code:
                        artifact_of(code, row.fingerprint, row)
                if model is BlobRow and hashlib.sha256(row.code).hexdigest() != row.sha256:
                    raise Damaged("it fails its SHA-256")
            except BROKEN as e:
                name = " ".join(str(getattr(row, k))[:12] for k in keys)
                found.left_out.append(told(f"{model.__tablename__[9:]} {name}: {why(e, row)}", 500))
                continue
            # Workloads come under other names, since a measurement's row may stand beside one.
            values = row._mapping
            rows.append({n: values[n if n in values else f"w_{n}"] for n in columns})
            if len(rows) >= (20 if model is BlobRow else _BATCH):
                yield rows
                rows = []
    if rows:
        yield rows


def _write(store: Store, model: type[Base], rows: list[dict[str, Any]]) -> tuple[int, Merged]:
    found = Merged()
    with store.writing() as c:
        rows = _with_parents(c, model, rows, found)
        if model is ScheduleRow:
            _keep_losers(store, c, rows, found)
        if model is MeasurementRow:
            _tell_differences(c, rows, found)
        insert: Any = store.insert(model)
        keys = [n.name for n in sa.inspect(model).primary_key]
        where = _better(model, insert.excluded)
        if model is MeasurementRow:
            keys = [*_KEY, "config", "stage"]
        if where is None or not rows:
            insert = insert.on_conflict_do_nothing()
        else:
            news = {n: insert.excluded[n] for n in rows[0] if n not in keys}
            insert = insert.on_conflict_do_update(index_elements=keys, set_=news, where=where)
        return sum(store.changed(c, insert.values(row)) for row in rows), found


def _better(model: type[Base], new: Any) -> Any:
    """Where a row of the other database takes the place of one here; None for never."""
    if model is ScheduleRow:
        return better(new)
    if model is MeasurementRow:
        ok = str(Status.OK)
        here = MeasurementRow
        mended = (new.status == ok) & (here.status != ok)
        return mended | ((new.status == ok) & (new.latency_us < here.latency_us))
    if model is EffortRow:
        return new.seconds > EffortRow.seconds
    if model in (VerdictRow, CalibrationRow):
        return new.created > model.created
    return None


def _with_parents(
    c: sa.Connection, model: type[Base], rows: list[dict[str, Any]], found: Merged
) -> list[dict[str, Any]]:
    """The rows of which all is here that they refer to; what they refer to may have been damaged over there."""
    for foreign in model.__table__.foreign_keys:
        name, target = foreign.parent.name, foreign.column
        wanted = sorted({row[name] for row in rows if row[name] is not None})
        there = {v for part in batches(wanted, 500) for v in c.scalars(sa.select(target).where(target.in_(part)))}
        gone = [row for row in rows if row[name] is not None and row[name] not in there]
        rows = [row for row in rows if row[name] is None or row[name] in there]
        keys = [n.name for n in sa.inspect(model).primary_key if n.name in (gone[0] if gone else ())]
        for row in gone:
            text = " ".join(str(row[k])[:12] for k in keys or ["workload", "config"])
            found.left_out.append(f"{model.__tablename__[9:]} {text}: its {name} was left out")
    return rows


def _keep_losers(store: Store, c: sa.Connection, rows: list[dict[str, Any]], found: Merged) -> None:
    """Note the configuration of each schedule that gives way, or does not come in, as a measurement."""
    for row in rows:
        met = contest(c, row)
        if met is None:
            continue
        found.conflicts.append(
            f"schedule {row['workload'][:12]} on {row['device'][:12]}: {met.here['latency_us']:.4g} us here,"
            f" {row['latency_us']:.4g} us there: {'that' if met.gives_way else 'this'} one stays"
        )
        if values := met.measurement("merged"):
            c.execute(store.insert(MeasurementRow).values(**values).on_conflict_do_nothing())


def _tell_differences(c: sa.Connection, rows: list[dict[str, Any]], found: Merged) -> None:
    m = MeasurementRow
    for part in batches(rows, 100):
        same = sa.or_(*(sa.and_(*(getattr(m, n) == r[n] for n in (*_KEY, "config", "stage"))) for r in part))
        columns = [getattr(m, n) for n in (*_KEY, "config", "stage")]
        query = sa.select(*columns, m.status, m.latency_us).where(same)
        here = {tuple(r)[:6]: tuple(r)[6:] for r in c.execute(query)}
        for r in part:
            known = here.get(tuple(r[n] for n in (*_KEY, "config", "stage")))
            if known is not None and known != (r["status"], r["latency_us"]):
                (s1, us1), (s2, us2) = known, (r["status"], r["latency_us"])
                us1 = us1 if is_number(us1) else None
                found.conflicts.append(
                    f"measurement {r['workload'][:12]} {r['config'][:12]} {r['stage']}: "
                    f"{s1 if us1 is None else f'{us1:.4g} us'} here, {s2 if us2 is None else f'{us2:.4g} us'} there"
                )
