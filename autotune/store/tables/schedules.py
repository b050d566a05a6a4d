"""Schedules and the artifacts they launch: what a deployment reads."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.device import Environment
from autotune.store.codec import (
    artifact_blobs,
    artifact_from,
    artifact_id,
    artifact_json,
    config_from,
    key_from,
    key_values,
    measurement_values,
)
from autotune.store.connection.engine import Database
from autotune.store.health.damage import BROKEN, Damaged, cost, latencies, moment, number, whole, why
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
from autotune.store.reading import Match, Near
from autotune.store.records import Key, Measurement, Schedule
from autotune.store.tables.measurements import costed, dated
from autotune.task import Artifact, Config, Status, config_key

_S = ScheduleRow
_KEY = ("workload", "device", "environment", "policy")
_ARTIFACT = (ArtifactRow.target, ArtifactRow.generator, ArtifactRow.kernels, ArtifactRow.scratch)
# Built once: a look-up spends more time on building its statement than on running it.
PLAIN = sa.select(*_S.__table__.c, ConfigRow.params).outerjoin_from(_S, ConfigRow, ConfigRow.fingerprint == _S.config)
_JOINED = (
    sa.select(*_S.__table__.c, ConfigRow.params, *_ARTIFACT)
    .outerjoin_from(_S, ConfigRow, ConfigRow.fingerprint == _S.config)
    .outerjoin(ArtifactRow, ArtifactRow.fingerprint == _S.artifact)
)
DEPLOYED = "deployed"
"""The stage of a measurement that says no more than that a stored kernel failed when it was deployed."""
TOUCH = 2.0**-10
"""Seconds by which a schedule's time is moved where a failure of it is noted or forgotten, or other rows come to find
it, so that ``state`` tells."""
_M = MeasurementRow
_LATEST = sa.func.max(_S.created).over(partition_by=(_S.workload, _S.policy)).desc()
"""Puts first what was decided by the policy that decided last."""


def better(new: Any) -> Any:
    """Where a schedule (the row of an INSERT) takes the place of the stored one of its key: where it is faster, is
    measured anew, or where what is stored is damaged or failed when it was deployed."""
    again = new.config.is_not_distinct_from(_S.config) & (new.winner == _S.winner) & (new.created > _S.created)
    faster = (new.latency_us < _S.latency_us) | sa.and_(*readable_schedule()).is_not(sa.true())
    return faster | again | (_failed() & new.config.is_distinct_from(_S.config))


def readable_schedule() -> list[Any]:
    """Schedules that SQL may compare: their time and latency are numbers in range."""
    return [dated(_S.created), costed(_S.latency_us)]


def name_unreadable_schedules(database: Database, c: sa.Connection, *where: Any) -> None:
    """Name the schedules that :func:`readable_schedule` leaves out."""
    rows = c.execute(PLAIN.where(*where, sa.and_(*readable_schedule()).is_not(sa.true())).limit(32)).all()
    list(database.sound(rows, lambda row: schedule_from_row(row, None), _name))


@dataclass(frozen=True)
class Contest:
    """Two schedules of one key that differ, one stored and one that comes in.

    Attributes:
        here: the stored one's row.
        gives_way: whether the other takes its place.
        loser: the row of the one that does not stay.
    """

    here: Mapping[str, Any]
    gives_way: bool
    loser: Mapping[str, Any]

    def measurement(self, reason: str) -> dict[str, Any] | None:
        """The loser's latency as a row of measurements; None where a baseline won there, which has no configuration."""
        if self.loser["config"] is None:
            return None
        kept = {name: self.loser[name] for name in (*_KEY, "config", "latency_us", "created")}
        return {**kept, "stage": "final", "status": str(Status.OK), "run": "", "samples": [], "noise": 0.0,
                "error": None, "reason": reason, "compile_s": 0.0, "measure_s": 0.0}  # fmt: skip


def contest(c: sa.Connection, row: Mapping[str, Any]) -> Contest | None:
    """How a schedule that comes in stands to the stored one of its key; None where there is none, or the same.

    Args:
        row: a row of the table of schedules.
    """
    new = SimpleNamespace(**{n: sa.literal(row[n], getattr(_S, n).type) for n in ("config", "winner", "created",
                                                                                 "latency_us")})  # fmt: skip
    query = sa.select(*_S.__table__.c, better(new).label("gives_way")).where(*(getattr(_S, n) == row[n] for n in _KEY))
    found = c.execute(query).mappings().first()
    here = None if found is None else {str(name): value for name, value in found.items()}
    if here is None or (here["config"], here["winner"]) == (row["config"], row["winner"]):
        return None
    try:
        cost(here["latency_us"]), moment(here["created"])
    except Damaged:
        return None  # nothing of it is worth keeping
    return Contest(here, bool(here["gives_way"]), here if here["gives_way"] else row)


class Schedules(Database):
    """The store's schedules and artifacts."""

    def put_artifact(self, artifact: Artifact) -> str:
        """Store an artifact and its code; returns its id, a SHA-256 over all of it. Equal ones are kept once."""
        with self.writing() as c:
            return self._put_artifact(c, artifact)

    def _put_artifact(self, c: sa.Connection, artifact: Artifact) -> str:
        data = artifact_json(artifact)
        fingerprint = artifact_id(data)
        # Storing anew mends a blob or launch data that was damaged on disk.
        for sha256, code in sorted(artifact_blobs(artifact).items()):
            insert = self.insert(BlobRow).values(sha256=sha256, code=code)
            c.execute(insert.on_conflict_do_update(index_elements=["sha256"], set_={"code": code}))
        insert = self.insert(ArtifactRow).values(fingerprint=fingerprint, created=time.time(), **data)
        c.execute(insert.on_conflict_do_update(index_elements=["fingerprint"], set_=data))
        return fingerprint

    def get_artifact(self, fingerprint: str) -> Artifact | None:
        """The artifact with this id; None where it is not stored or fails a checksum (see :attr:`problems`)."""
        with self.reading() as c:
            row = c.execute(sa.select(ArtifactRow.__table__).where(ArtifactRow.fingerprint == fingerprint)).first()
            if row is None:
                return None
            try:
                return artifact_of(c, fingerprint, row)
            except BROKEN as e:
                self.problem(why(e, row))
                return None

    def put_schedule(self, schedule: Schedule, *, replace: bool = False) -> bool:
        """Store the winner of a final comparison, with its artifact, and clear the miss that asked for it.

        There is one schedule for each key (workload, device, environment, policy). A stored one gives way only to a
        lower latency, which one key makes comparable, or to a new measurement of the same configuration, so that the
        luckiest of several numbers is not kept for ever.

        Args:
            replace: let it give way in any case; right where the stored winner took part in the comparison and lost.

        Returns:
            Whether this schedule is the stored one now.

        Raises:
            ValueError: its workload, device or environment was not put before.
        """
        try:
            with self.writing() as c:
                artifact = None if schedule.artifact is None else self._put_artifact(c, schedule.artifact)
                config = None
                if schedule.config is not None:
                    config = config_key(schedule.config)
                    row = self.insert(ConfigRow).values(fingerprint=config, params=schedule.config)
                    c.execute(row.on_conflict_do_nothing())
                news = {
                    "config": config,
                    "artifact": artifact,
                    "latency_us": schedule.latency_us,
                    "baselines": dict(schedule.baselines),
                    "winner": schedule.winner,
                    "family": schedule.family,
                    "extent": schedule.extent,
                    "others": schedule.others,
                    "space": schedule.space,
                    "created": schedule.when or time.time(),
                }
                insert = self.insert(_S).values(**key_values(schedule.key), **news)
                where = None if replace else better(insert.excluded)
                upsert = insert.on_conflict_do_update(index_elements=list(_KEY), set_=news, where=where)
                stored = self.changed(c, upsert)
                key = schedule.key
                c.execute(sa.delete(MissRow).where(MissRow.workload == key.workload, MissRow.device == key.device))
                return stored
        except IntegrityError as e:
            raise ValueError(f"put the workload, device and environment of {schedule.key} before its schedule") from e

    def put_failure(self, key: Key, config: Config, status: Status, reason: str) -> bool:
        """Note that the stored kernels of a configuration failed when they were deployed: with this key's device and
        environment look-ups pass its schedule over, until ``forget_failures`` takes the note back.

        Args:
            key: with the environment at hand, which may be another than the schedule's own.
            status: ``wrong_result`` or ``launch_error``.

        Returns:
            False when that was noted before.
        """
        failed = Measurement(key, config, status, DEPLOYED, reason=reason)
        name = config_key(config)
        with self.writing() as c:
            insert = self.insert(_M).values(**measurement_values(failed, name, time.time()))
            new = self.changed(c, insert.on_conflict_do_nothing())
            touch = [_S.workload == key.workload, _S.device == key.device, _S.config == name]
            c.execute(sa.update(_S).where(*touch).values(created=_S.created + TOUCH))
            return new

    def get_schedule(
        self,
        workload: str,
        device: str,
        environment: Environment | str | None = None,
        *,
        match: Match = "strict",
    ) -> Schedule | None:
        """The schedule to deploy for a workload on a device, its artifact loaded and every SHA-256 checked.

        Args:
            workload, device: fingerprints.
            environment: the software at hand, or its strict fingerprint if it is known to the database; None accepts
                what was tuned with any.
            match: "strict" wants equal software; "loose" is content with equal minor versions of torch and CUDA;
                "ignore" with any. Equal software is preferred, then equal minor versions.

        Returns:
            The fastest that fits, of those decided by the measuring policy that decided last: numbers of different
            policies cannot be compared. One that is damaged is passed over with a warning and an entry in
            :attr:`problems`.
        """
        where = [_S.workload == workload, _S.device == device]
        found = self._schedules(where, environment, match, first=True, latest=True)
        return found[0] if found else None

    def family_schedules(
        self,
        family: str,
        device: str,
        environment: Environment | str | None = None,
        *,
        match: Match = "strict",
        artifacts: bool = True,
        extents: tuple[float, float] | None = None,
    ) -> list[Schedule]:
        """The schedule of each workload of a family on a device, by row extent; arguments as in :meth:`get_schedule`.

        Args:
            artifacts: load them; without, ``artifact`` is None, and only :meth:`get_schedule` tells what is damaged.
            extents: the least and the most rows.
        """
        if not family:
            return []
        where = [_S.family == family, _S.device == device]
        if extents is not None:
            where.append(_S.extent.between(math.ceil(extents[0]), math.floor(extents[1])))
        best: dict[str, Schedule] = {}
        for s in self._schedules(where, environment, match, artifacts=artifacts, latest=True):
            best.setdefault(s.key.workload, s)
        return sorted(best.values(), key=lambda s: s.extent)

    def nearest(
        self, family: str, device: str, environment: Environment, extent: int, *, match: Match = "strict", limit: int
    ) -> list[Near]:
        """The tuned workloads of a family with the nearest numbers of rows by ratio, nearest first, ``limit`` at most.

        Two ranges of an index are read, however many schedules the family has. What is damaged shows only when a
        schedule is read.
        """
        if not family:
            return []
        fits: Any = _S.environment == environment.strict
        if match == "ignore":
            fits = sa.true()
        elif match == "loose":
            fits = _S.environment.in_(
                sa.select(EnvironmentRow.fingerprint).where(EnvironmentRow.loose == environment.loose)
            )
        own = (_S.family == family, _S.device == device)
        query = sa.select(_S.extent, _S.workload).where(*own, fits).distinct().limit(limit)
        up, down = (_S.extent, _S.workload), (_S.extent.desc(), _S.workload.desc())  # both as the index has it
        with self.reading() as c:
            above = c.execute(query.where(_S.extent >= extent).order_by(*up)).all()
            below = c.execute(query.where(_S.extent < extent).order_by(*down)).all()
            found = [(e, w) for e, w in (*above, *below) if isinstance(e, int)]
            found = sorted(found, key=lambda f: abs(math.log(max(f[0], 1) / max(extent, 1))))[:limit]
            latest = sa.select(_S.workload, sa.func.max(_S.created)).where(_S.workload.in_([w for _, w in found]))
            latest = latest.where(dated(_S.created))
            when = {row[0]: row[1] for row in c.execute(latest.group_by(_S.workload))}
        return [Near(str(w), e, when.get(w, 0.0)) for e, w in found]

    def places(self, workload: str) -> list[tuple[str, str]]:
        """Device and (strict) environment of every schedule of a workload, in no order."""
        query = sa.select(_S.device, _S.environment).where(_S.workload == workload).distinct()
        with self.reading() as c:
            return [(str(device), str(environment)) for device, environment in c.execute(query)]

    def schedule_of(self, key: Key) -> Schedule | None:
        """What was decided under exactly this key, without its artifact."""
        where = [_S.workload == key.workload, _S.device == key.device, _S.policy == key.policy]
        found = self._schedules(where, key.environment, "strict", first=True, artifacts=False)
        return found[0] if found else None

    def state(self) -> str:
        """A digest of what is deployed: it changes where a schedule or a verdict is added, decided anew, imported or
        removed.
        """
        found: list[Any] = []
        with self.reading() as c:
            for row in (_S, VerdictRow):
                # An imported one may be older than the newest. In units of TOUCH each touch is a number of its own.
                times = sa.func.sum(sa.case((dated(row.created), sa.cast(row.created / TOUCH, sa.BigInteger)), else_=0))
                found += c.execute(sa.select(sa.func.count(), sa.func.max(row.created), times).select_from(row)).one()
        return hashlib.sha256(repr([SCHEMA_REVISION, *found]).encode()).hexdigest()

    def schedules(
        self, device: str | None = None, *, workload: str | None = None, artifacts: bool = False
    ) -> list[Schedule]:
        """Every stored schedule of a device and a workload (fingerprints; None for all), fastest first.

        Args:
            artifacts: load them, too.
        """
        where = [] if device is None else [_S.device == device]
        where += [] if workload is None else [_S.workload == workload]
        return self._schedules(where, None, "strict", artifacts=artifacts)

    def _schedules(
        self,
        where: Sequence[Any],
        environment: Environment | str | None,
        match: Match,
        *,
        first: bool = False,
        artifacts: bool = True,
        latest: bool = False,
    ) -> list[Schedule]:
        query = (_JOINED if artifacts else PLAIN).where(*where)
        if environment is not None:
            strict = environment if isinstance(environment, str) else environment.strict
            equal = _S.environment == strict
            if match == "strict":
                query = query.where(equal)
            else:
                query = query.join(EnvironmentRow, EnvironmentRow.fingerprint == _S.environment)
                near = EnvironmentRow.loose == _loose(environment)
                query = query if match == "ignore" else query.where(near)
                query = query.order_by(sa.case((equal, 0), (near, 1), else_=2))
        if latest:
            query = query.order_by(_LATEST)
            if isinstance(environment, Environment):
                query = query.where(~_failed(_M.environment == environment.strict))
        query = query.order_by(_S.latency_us, _S.created.desc())
        found = []
        with self.reading() as c:

            def made(row: Any) -> Schedule:
                artifact = None
                if row.artifact is not None and artifacts:
                    artifact = artifact_of(c, row.artifact, row)
                return schedule_from_row(row, artifact)

            for schedule in self.sound(c.execute(query).all(), made, _name):
                found.append(schedule)
                if first:
                    break
        return found


def _failed(*more: Any) -> Any:
    """Whether a schedule's configuration failed when it was deployed."""
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
    code = sa.type_coerce(BlobRow.code, sa.types.NullType()).label("code")  # a text among them is damage to be told
    rows = c.execute(sa.select(BlobRow.sha256, code).where(BlobRow.sha256.in_(names)))
    return {r.sha256: r.code if isinstance(r.code, bytes) else b"" for r in rows}


def _loose(environment: Environment | str) -> Any:
    if isinstance(environment, Environment):
        return environment.loose
    return sa.select(EnvironmentRow.loose).where(EnvironmentRow.fingerprint == environment).scalar_subquery()


def schedule_from_row(row: Any, artifact: Artifact | None) -> Schedule:
    """A schedule from its row, joined with its configuration (``params``). Raises Damaged."""
    return Schedule(
        key=key_from(row),
        config=None if row.config is None else config_from(row.params, row.config),
        latency_us=cost(row.latency_us),
        baselines=latencies(row.baselines),
        artifact=artifact,
        winner=str(row.winner),
        family=str(row.family),
        extent=whole(row.extent, "number of rows"),
        when=moment(row.created),
        others=None if row.others is None else number(row.others, "number of busy processors"),
        space=str(row.space),
    )
