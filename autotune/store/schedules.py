"""Schedules and the artifacts they launch: what a deployment reads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.device import Environment
from autotune.store.codec import (
    Damaged,
    artifact_blobs,
    artifact_from,
    artifact_id,
    artifact_json,
    config_from,
    key_from,
    key_values,
)
from autotune.store.engine import Database
from autotune.store.models import ArtifactRow, BlobRow, ConfigRow, EnvironmentRow, MissRow, ScheduleRow
from autotune.store.records import Key, Schedule
from autotune.task import Artifact, config_key

log = logging.getLogger(__name__)

Match = Literal["strict", "loose"]
_S = ScheduleRow
_KEY = ("workload", "device", "environment", "policy")
_JOINED = (  # built once: a look-up spends more time on building its statement than on running it
    sa.select(
        *_S.__table__.c,
        ConfigRow.params,
        ArtifactRow.target,
        ArtifactRow.generator,
        ArtifactRow.kernels,
        ArtifactRow.scratch,
    )
    .select_from(_S)
    .outerjoin(ConfigRow, ConfigRow.fingerprint == _S.config)
    .outerjoin(ArtifactRow, ArtifactRow.fingerprint == _S.artifact)
)
_LATEST = sa.func.max(_S.created).over(partition_by=(_S.workload, _S.policy)).desc()
"""Puts first what was decided by the policy that decided last."""


class Schedules(Database):
    """The store's schedules and artifacts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.problems: deque[str] = deque(maxlen=100)
        """Why stored schedules were passed over (damaged code and the like), newest last; logged as warnings too."""

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
                return self._load(c, fingerprint, row.target, row.generator, row.kernels, row.scratch)
            except Damaged as e:
                self._problem(str(e))
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
                new = insert.excluded
                better = (new.latency_us < _S.latency_us) | (
                    new.config.is_not_distinct_from(_S.config) & (new.winner == _S.winner) & (new.created > _S.created)
                )
                where = None if replace else better
                upsert = insert.on_conflict_do_update(index_elements=list(_KEY), set_=news, where=where)
                stored = self.changed(c, upsert)
                key = schedule.key
                c.execute(sa.delete(MissRow).where(MissRow.workload == key.workload, MissRow.device == key.device))
                return stored
        except IntegrityError as e:
            raise ValueError(f"put the workload, device and environment of {schedule.key} before its schedule") from e

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
            match: "strict" wants equal software; "loose" is content with equal minor versions of torch and CUDA, and
                prefers equal software.

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
    ) -> list[Schedule]:
        """The schedule of each workload of a family on a device, by row extent; arguments as in :meth:`get_schedule`.

        Args:
            artifacts: load them; without, ``artifact`` is None, and only :meth:`get_schedule` tells what is damaged.
        """
        if not family:
            return []
        where = [_S.family == family, _S.device == device]
        best: dict[str, Schedule] = {}
        for s in self._schedules(where, environment, match, artifacts=artifacts, latest=True):
            best.setdefault(s.key.workload, s)
        return sorted(best.values(), key=lambda s: s.extent)

    def schedule_of(self, key: Key) -> Schedule | None:
        """What was decided under exactly this key, without its artifact."""
        where = [_S.workload == key.workload, _S.device == key.device, _S.policy == key.policy]
        found = self._schedules(where, key.environment, "strict", first=True, artifacts=False)
        return found[0] if found else None

    def schedules(self, device: str | None = None, *, artifacts: bool = False) -> list[Schedule]:
        """Every stored schedule, fastest first; without their artifacts unless asked for."""
        where = [] if device is None else [_S.device == device]
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
        query = _JOINED.where(*where)
        if environment is not None:
            strict = environment if isinstance(environment, str) else environment.strict
            equal = _S.environment == strict
            if match == "strict":
                query = query.where(equal)
            else:
                query = query.join(EnvironmentRow, EnvironmentRow.fingerprint == _S.environment)
                query = query.where(EnvironmentRow.loose == _loose(environment))
                query = query.order_by(sa.case((equal, 0), else_=1))
        if latest:
            query = query.order_by(_LATEST)
        query = query.order_by(_S.latency_us, _S.created.desc())
        found = []
        with self.reading() as c:
            for row in c.execute(query).all():
                try:
                    artifact = None
                    if row.artifact is not None and artifacts:
                        artifact = self._load(c, row.artifact, row.target, row.generator, row.kernels, row.scratch)
                    found.append(_schedule(row, artifact))
                except Damaged as e:
                    self._problem(f"schedule of workload {row.workload[:12]} ignored: {e}; search it again")
                    continue
                if first:
                    break
        return found

    def _load(
        self, c: sa.Connection, fingerprint: str, target: str, generator: str, kernels: list[Any], scratch: list[Any]
    ) -> Artifact:
        data = {"target": target, "generator": generator, "kernels": kernels, "scratch": scratch}
        wanted = {k["sha256"] for k in kernels if k.get("sha256")} if isinstance(kernels, list) else set()
        return artifact_from(fingerprint, data, _blobs(c, wanted))

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        log.warning("%s", text)


def _blobs(c: sa.Connection, wanted: Iterable[str]) -> dict[str, bytes]:
    names = sorted(wanted)
    if not names:
        return {}
    return {
        r.sha256: r.code for r in c.execute(sa.select(BlobRow.sha256, BlobRow.code).where(BlobRow.sha256.in_(names)))
    }


def _loose(environment: Environment | str) -> Any:
    if isinstance(environment, Environment):
        return environment.loose
    return sa.select(EnvironmentRow.loose).where(EnvironmentRow.fingerprint == environment).scalar_subquery()


def _schedule(row: Any, artifact: Artifact | None) -> Schedule:
    return Schedule(
        key=key_from(row),
        config=None if row.config is None else config_from(row.params),
        latency_us=row.latency_us,
        baselines={str(name): float(us) for name, us in row.baselines.items()},
        artifact=artifact,
        winner=row.winner,
        family=row.family,
        extent=row.extent,
        when=row.created,
        others=row.others,
        space=row.space,
    )
