"""Schedules, their artifacts, and verdicts on steps, for deployments."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from autotune.device import Environment
from autotune.store.codec import (
    artifact_blobs,
    artifact_from,
    artifact_id,
    artifact_json,
    key_values,
    measurement_values,
    schedule_from,
    schedule_values,
    verdict_from,
    verdict_values,
)
from autotune.store.connection.engine import Database
from autotune.store.damage import Damaged, left_of, step_record
from autotune.store.models import (
    SCHEMA_REVISION,
    ArtifactRow,
    BlobRow,
    ConfigRow,
    EnvironmentRow,
    MeasurementRow,
    MissRow,
    ScheduleRow,
    VerdictRow,
)
from autotune.store.reading import Listed, Reader, Scope, Where
from autotune.store.records import PREDICTED, Key, Measurement, Schedule, Verdict
from autotune.store.tables.measurements import costed, dated
from autotune.task import Artifact, Config, Status, config_key

_S, _M, _V = ScheduleRow, MeasurementRow, VerdictRow
_KEY = ("workload", "device", "environment", "policy")
_ARTIFACT = (ArtifactRow.target, ArtifactRow.generator, ArtifactRow.kernels, ArtifactRow.scratch)
# Built once: building the statement of a look-up takes longer than running it.
PLAIN = sa.select(*_S.__table__.c, ConfigRow.params).outerjoin_from(_S, ConfigRow, ConfigRow.fingerprint == _S.config)
_JOINED = (
    sa.select(*_S.__table__.c, ConfigRow.params, *_ARTIFACT)
    .outerjoin_from(_S, ConfigRow, ConfigRow.fingerprint == _S.config)
    .outerjoin(ArtifactRow, ArtifactRow.fingerprint == _S.artifact)
)
DEPLOYED = "deployed"
"""The stage of a measurement that records the failure of a stored kernel in a deployment."""
TOUCH = 2.0**-10
"""Seconds added to a schedule's time when a failure of it is recorded or forgotten, or when it becomes visible to
workloads with other rows, so that ``state`` changes."""


def better(new: Any) -> Any:
    """The condition that a schedule (the row of an INSERT) replaces the stored one of its key.

    It is faster, or measured again, or the stored one is damaged or failed in a deployment. The result of a search
    replaces a prediction, and never the reverse.
    """
    again = new.config.is_not_distinct_from(_S.config) & (new.winner == _S.winner) & (new.created > _S.created)
    faster = (new.latency_us < _S.latency_us) | sa.and_(*readable_schedule()).is_not(sa.true())
    mends = _failed() & new.config.is_distinct_from(_S.config)
    before, after = _S.space == PREDICTED, new.space == PREDICTED
    return (before & ~after) | ((before | ~after) & (faster | again | mends))


def readable_schedule() -> list[Any]:
    """Schedules that SQL may compare: their time and latency are numbers in range."""
    return [dated(_S.created), costed(_S.latency_us)]


def name_unreadable_schedules(database: Database, c: sa.Connection, *where: Any) -> None:
    """Report the schedules that :func:`readable_schedule` excludes."""
    rows = c.execute(PLAIN.where(*where, sa.and_(*readable_schedule()).is_not(sa.true())).limit(32)).all()
    list(database.sound(rows, schedule_from, _name))


class Schedules(Database, Reader):
    """The store's schedules, artifacts and verdicts; :class:`Reader` chooses among them."""

    def _put_artifact(self, c: sa.Connection, artifact: Artifact) -> str:
        data = artifact_json(artifact)
        fingerprint = artifact_id(data)
        # This repairs a blob or launch data that were damaged on disk.
        for sha256, code in sorted(artifact_blobs(artifact).items()):
            c.execute(self.upsert(BlobRow, ("code",), ("sha256",)).values(sha256=sha256, code=code))
        insert = self.upsert(ArtifactRow, data, ("fingerprint",))
        c.execute(insert.values(fingerprint=fingerprint, created=time.time(), **data))
        return fingerprint

    def put_schedule(self, schedule: Schedule, *, replace: bool = False) -> bool:
        """Store the winner of a final comparison, with its artifact, and delete its miss.

        A predicted schedule does not delete the miss. There is one schedule for each key (workload, device,
        environment, policy). A stored one is replaced by a lower latency, since latencies of one key are comparable.
        It is also replaced by a new measurement of the same configuration, so that a lucky timing is not kept for ever.

        Args:
            replace: replace the stored winner in any case, for one that lost in this comparison.

        Returns:
            True if this schedule is the stored one now.

        Raises:
            ValueError: its workload, device or environment was not stored before.
        """
        key = schedule.key
        with self.referring(f"the workload, device and environment of {key}", "its schedule") as c:
            artifact = None if schedule.artifact is None else self._put_artifact(c, schedule.artifact)
            values = schedule_values(schedule, artifact, time.time())
            if schedule.config is not None:
                row = self.insert(ConfigRow).values(fingerprint=values["config"], params=schedule.config)
                c.execute(row.on_conflict_do_nothing())
            upsert = self.upsert(_S, values, _KEY, None if replace else better)
            stored = self.changed(c, upsert.values(**values))
            if not schedule.predicted:
                c.execute(sa.delete(MissRow).where(MissRow.workload == key.workload, MissRow.device == key.device))
            return stored

    def put_failure(self, key: Key, config: Config, status: Status, reason: str) -> bool:
        """Record that the stored kernels of a configuration failed in a deployment.

        Look-ups with this key's device and environment skip the schedule, until ``forget_failures`` deletes the record.

        Args:
            key: with the current environment, which may differ from the schedule's.
            status: ``wrong_result`` or ``launch_error``.

        Returns:
            False if it was recorded before.
        """
        failed = Measurement(key, config, status, DEPLOYED, reason=reason)
        name = config_key(config)
        with self.writing() as c:
            insert = self.insert(_M).values(**measurement_values(failed, name, time.time()))
            new = self.changed(c, insert.on_conflict_do_nothing())
            touch = [_S.workload == key.workload, _S.device == key.device, _S.config == name]
            c.execute(sa.update(_S).where(*touch).values(created=_S.created + TOUCH))
            return new

    def put_verdicts(self, verdicts: list[Verdict]) -> None:
        """Store the verdicts of a step's graphs, all or none; each replaces an earlier one of its key.

        Raises:
            ValueError: a device or an environment was not stored before, or a record could not be read back.
        """
        for v in verdicts:
            try:
                left_of(list(v.left)), step_record(dict(v.record))
            except Damaged as e:
                raise ValueError(f"the verdict on graph {v.graph[:12]} cannot be stored: {e}") from e
        with self.referring("the device and the environment of a verdict", "it") as c:
            for v in verdicts:
                values = verdict_values(v, time.time())
                c.execute(self.upsert(_V, values, ("graph", "device", "environment", "mode")).values(**values))

    def tuned_under(self, workload: str) -> list[tuple[str, str]]:
        query = sa.select(_S.device, _S.environment).where(_S.workload == workload).distinct()
        with self.reading() as c:
            return [(str(device), str(environment)) for device, environment in c.execute(query)]

    def schedule_of(self, key: Key) -> Schedule | None:
        """The schedule under exactly this key, without its artifact."""
        return next((s for s, _ in self._listed(key_values(key), artifacts=False)), None)

    def state(self, scope: Scope | None = None) -> str:
        """A digest that changes when a schedule or a verdict is added, decided again, imported or removed.

        Args:
            scope: the schedules and verdicts that count; None for all.
        """
        found: list[Any] = []
        with self.reading() as c:
            for row in (_S, _V):
                # An imported schedule may be older than the newest. In units of TOUCH each touch changes the sum.
                times = sa.func.sum(sa.case((dated(row.created), sa.cast(row.created / TOUCH, sa.BigInteger)), else_=0))
                query = sa.select(sa.func.count(), sa.func.max(row.created), times).select_from(row)
                if scope is not None and row is _S:
                    query = query.where(_S.family.in_(scope.names) | _S.workload.in_(scope.names))
                elif scope is not None:
                    query = query.where(_V.graph.in_(scope.graphs))
                found += c.execute(query).one()
        return hashlib.sha256(repr([SCHEMA_REVISION, *found]).encode()).hexdigest()

    def _listed(self, where: Where, environment: Environment | None = None, *, artifacts: bool = True) -> list[Listed]:
        query = (_JOINED if artifacts else PLAIN).where(*_conditions(_S, where))
        if environment is not None:
            query = query.where(~_failed(_M.environment == environment.strict))
        return self.made(query, lambda row: Listed(schedule_from(row), row), _name)

    def _loaded(self, listed: Listed) -> Schedule | None:
        row = listed.artifact
        if row.artifact is None:
            return listed.schedule
        with self.reading() as c:
            made = self.sound([row], lambda row: schedule_from(row, artifact_of(c, row.artifact, row)), _name)
            return next(made, None)

    def _around(self, where: Where, extent: int, limit: int) -> list[tuple[int, str]]:
        query = sa.select(_S.extent, _S.workload).where(*_conditions(_S, where)).distinct().limit(limit)
        up, down = (_S.extent, _S.workload), (_S.extent.desc(), _S.workload.desc())  # both in the order of the index
        with self.reading() as c:
            above = c.execute(query.where(_S.extent >= extent).order_by(*up)).all()
            below = c.execute(query.where(_S.extent < extent).order_by(*down)).all()
        return [(e, str(w)) for e, w in (*above, *below) if isinstance(e, int)]

    def _decided(self, workloads: Sequence[str]) -> Mapping[str, float]:
        latest = sa.select(_S.workload, sa.func.max(_S.created)).where(_S.workload.in_(workloads), dated(_S.created))
        with self.reading() as c:
            return {row[0]: row[1] for row in c.execute(latest.group_by(_S.workload))}

    def _verdicts(self, where: Where) -> list[Verdict]:
        query = sa.select(*_V.__table__.c).where(*_conditions(_V, where))
        return self.made(
            query, verdict_from, lambda r: f"verdict on graph {str(r.graph)[:12]} (search its program again)"
        )


def _conditions(model: Any, where: Where) -> list[Any]:
    found = []
    for name, value in where.items():
        if name == "loose":
            same = sa.select(EnvironmentRow.fingerprint).where(EnvironmentRow.loose == value)
            found.append(model.environment.in_(same))
        else:
            found.append(model.extent.between(*value) if name == "extents" else getattr(model, name) == value)
    return found


def _failed(*more: Any) -> Any:
    """The condition that a schedule's configuration failed in a deployment."""
    same = [getattr(_M, name) == getattr(_S, name) for name in ("workload", "device", "policy", "config")]
    return sa.exists().where(*same, _M.stage == DEPLOYED, *more)


def artifact_of(c: sa.Connection, fingerprint: str, row: Any) -> Artifact:
    """An artifact from a row with the columns of its table, and its code. Raises Damaged, or one of ``BROKEN``."""
    data = {"target": row.target, "generator": row.generator, "kernels": row.kernels, "scratch": row.scratch}
    listed = row.kernels if isinstance(row.kernels, list) else []
    wanted = {str(k["sha256"]) for k in listed if isinstance(k, dict) and k.get("sha256")}
    return artifact_from(fingerprint, data, _blobs(c, wanted))


def _name(row: Any) -> str:
    return f"schedule of workload {str(row.workload)[:12]} (search it again)"


def _blobs(c: sa.Connection, wanted: Iterable[str]) -> dict[str, bytes]:
    names = sorted(wanted)
    if not names:
        return {}
    code = sa.type_coerce(BlobRow.code, sa.types.NullType()).label("code")  # damaged code may be a text
    rows = c.execute(sa.select(BlobRow.sha256, code).where(BlobRow.sha256.in_(names)))
    return {r.sha256: r.code if isinstance(r.code, bytes) else b"" for r in rows}
