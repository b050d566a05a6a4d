"""Measurements, and leases on measuring: every measurement is kept, and "the best" is a query over them.

A claim exists until its measurement is stored (in the same transaction), it is released, its lease expires, or its
owner is found dead. The clocks of hosts that share a server must agree to within a lease.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import cache, cached_property, lru_cache
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from autotune.store.codec import key_values, measurement_from, measurement_values, workload_from
from autotune.store.connection.engine import Database
from autotune.store.damage import LATEST, LEAST_COST, MOST_COST
from autotune.store.models import ClaimRow, ConfigRow, MeasurementRow, WorkloadRow
from autotune.store.records import Key, Measurement
from autotune.task import Config, Status, config_key
from autotune.workload import Workload, extent_ratio


def owner_name() -> str:
    """A new name for one owner of claims in this process: ``host:pid:uuid``.

    "host" includes the PID namespace, if there is one: processes in two containers may share a host's name and a
    database, but not their process ids.
    """
    return f"{_host()}:{os.getpid()}:{uuid.uuid4().hex}"


@lru_cache(maxsize=1)
def _host() -> str:
    host = socket.gethostname().replace(":", "_")
    try:
        return f"{host}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return host


def owner_is_dead(owner: str) -> bool:
    """Return True if ``owner`` names a dead process of this host; False if unknown."""
    host, _, rest = owner.rpartition(":")[0].rpartition(":")
    if host not in (_host(), socket.gethostname()) or not rest.isdecimal():
        return False
    import psutil

    try:
        return bool(psutil.Process(int(rest)).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


_M = MeasurementRow
_CANDIDATE = ("workload", "device", "environment", "policy", "config", "stage")
_SPARE = 32  # extra rows to read, to replace damaged ones
# A later stage is more reliable: "final" is interleaved with the baselines, "screen" is a cheap first timing.
STAGE_RANK = sa.case({"final": 0, "repeat": 1}, value=_M.stage, else_=2)


class Measurements(Database):
    """The store's measurements and claims."""

    def add_measurement(self, m: Measurement, *, replace: bool = False) -> bool:
        """Store a measurement and drop the claim on it, in one transaction.

        Args:
            replace: overwrite this candidate's existing measurement at this stage, for one that was disturbed.

        Returns:
            False if this candidate already has a measurement at this stage, which is not changed.

        Raises:
            ValueError: its workload, device or environment was not stored before, or an ok one has no latency.
        """
        config = config_key(m.config)
        values = measurement_values(m, config, time.time())
        with self.referring(f"the workload, device and environment of {m.key}", "its measurements") as c:
            c.execute(self._new_config, {"fingerprint": config, "params": m.config})
            insert = self.upsert(_M, values, _CANDIDATE) if replace else self._new_measurement
            added = self.changed(c, insert, values)
            c.execute(_DROP_CLAIM, _at(values))
            return added

    # SQLAlchemy takes longer to build a statement than a database to execute it: those of each candidate are built
    # once, with parameters.

    @cached_property
    def _new_config(self) -> Any:
        return self.insert(ConfigRow).on_conflict_do_nothing()

    @cached_property
    def _new_measurement(self) -> Any:
        """Only a second measurement of the candidate is ignored: other conflicts are errors."""
        return self.insert(_M).on_conflict_do_nothing(index_elements=list(_CANDIDATE))

    @cached_property
    def _new_claim(self) -> Any:
        return self.insert(ClaimRow).on_conflict_do_nothing()

    def get_measurement(self, key: Key, config: Config, stage: str) -> Measurement | None:
        """The measurement of one candidate at one stage, or None."""
        values = _at({**key_values(key), "config": config_key(config), "stage": stage})
        return next(iter(self.made(_candidate(), measurement_from, _name, values)), None)

    def measurements(
        self,
        workload: str | None = None,
        device: str | None = None,
        environment: str | None = None,
        policy: str | None = None,
        stage: str | None = None,
        status: Status | str | None = None,
        limit: int | None = None,
    ) -> list[Measurement]:
        """Measurements that match all given arguments (fingerprints, stage, status), oldest first.

        Args:
            limit: maximum number; the newest are returned.
        """
        given = {"workload": workload, "device": device, "environment": environment, "policy": policy,
                 "stage": stage, "status": None if status is None else str(status)}  # fmt: skip
        values = {name: value for name, value in given.items() if value is not None}
        query = _listing(tuple(values)).limit(limit)
        return self.made(query, measurement_from, _name, _at(values))[::-1]

    def measured_keys(self) -> list[Key]:
        """The keys under which candidates were measured, in the order of their first measurement."""
        columns = (_M.workload, _M.device, _M.environment, _M.policy)
        query = sa.select(*columns).where(_M.stage == "screen").group_by(*columns).order_by(sa.func.min(_M.id))
        with self.reading() as c:
            return [Key(*row) for row in c.execute(query)]

    def best(self, key: Key, n: int = 1) -> list[Measurement]:
        """The ``n`` fastest ok candidates, fastest first, each once, without those that failed at any stage.

        Each has the latency of its latest stage, so that a repetition corrects a lucky first timing.
        """
        rank = sa.func.row_number().over(partition_by=_M.config, order_by=(STAGE_RANK, _M.latency_us)).label("place")
        ranked = sa.select(_M.id, rank).where(*_key_is(key), *sound()).subquery()
        best = _joined().join(ranked, ranked.c.id == _M.id).where(ranked.c.place == 1)
        with self.reading() as c:
            rows = c.execute(best.order_by(_M.latency_us, _M.id).limit(n + _SPARE)).all()
        return list(islice(self.sound(rows, measurement_from, _name), n))

    def status_counts(self, key: Key) -> dict[str, int]:
        """Candidates by status, each counted once, with the status of its latest stage."""
        rank = sa.func.row_number().over(partition_by=_M.config, order_by=STAGE_RANK).label("place")
        ranked = sa.select(_M.status, rank).where(*_key_is(key)).subquery()
        counts = sa.select(ranked.c.status, sa.func.count()).where(ranked.c.place == 1).group_by(ranked.c.status)
        with self.reading() as c:
            return {str(status): int(count) for status, count in c.execute(counts)}

    def neighbours(
        self, family: str, device: str, exclude: str = "", *, extent: int | None = None, limit: int = 8
    ) -> list[tuple[Workload, Measurement]]:
        """The best measured candidate of each other workload of a family, as starting points of a new search.

        Any device is accepted, since good configurations often carry over. One measured on ``device`` is preferred,
        then one of a later stage, then the fastest.

        Args:
            family: the family's fingerprint; empty finds nothing.
            device: fingerprint of the device to be searched on.
            exclude: fingerprint of the workload to be searched.
            extent: its row extent; neighbours come nearest first (by ratio), and without it in order of latency.
        """
        if not family:
            return []
        values = {"family": family, "here": device, "exclude": exclude}
        made = self.made(_best_of_family(), lambda r: (workload_from(r), measurement_from(r)), _name, values)
        found = [(workload, m, m.key.device != device) for workload, m in made]
        if extent is not None:
            found.sort(key=lambda f: (f[2], extent_ratio(f[0].extent, extent)))
        return [(workload, measurement) for workload, measurement, _ in found[:limit]]

    def under_other_keys(self, key: Key, best: int) -> list[Measurement]:
        """The best few of a workload's candidates under each other key: another device, other software, or another
        policy. The best ones of all keys come first, then the second best. Candidates that failed at any stage under
        the key are excluded."""
        values = {**_at(key_values(key)), "places": 3 * best}  # a candidate has a measurement for each stage
        return self.made(_best_elsewhere(), measurement_from, _name, values)

    def claim(self, key: Key, config: Config, stage: str, owner: str, lease_s: float) -> bool:
        """Claim the exclusive right to measure ``config`` at ``stage`` for ``lease_s`` seconds. Atomic.

        Another claim by ``owner`` renews the lease.

        Args:
            owner: the claiming owner, from :func:`owner_name`. A claim of a dead process of this host counts as
                expired.

        Returns:
            False if it is measured already, or another owner's lease is valid.
        """
        row = {**key_values(key), "config": config_key(config), "stage": stage}
        new = {"owner": owner, "expires": time.time() + lease_s}
        with self.writing() as c:
            if not self._take(c, row, new):
                return False
            # Look for a measurement after claiming: no process that follows the protocol can add one now.
            if c.execute(_MEASURED, _at(row)).first() is None:
                return True
            c.execute(_DROP_CLAIM, _at(row))
            return False

    def _take(self, c: sa.Connection, row: dict[str, Any], new: dict[str, Any]) -> bool:
        held = _same(ClaimRow, row)
        while not self.changed(c, self._new_claim, {**row, **new}):
            other = c.execute(sa.select(ClaimRow.owner, ClaimRow.expires).where(*held).with_for_update()).first()
            if other is None:  # released between the two statements
                continue
            if other.owner != new["owner"] and _is_live(other.expires) and not owner_is_dead(str(other.owner)):
                return False
            c.execute(sa.update(ClaimRow).where(*held).values(**new))
            return True
        return True

    def release(self, key: Key, config: Config, stage: str, owner: str) -> bool:
        """Release a claim without a measurement. False if ``owner`` does not hold it."""
        row = {**key_values(key), "config": config_key(config), "stage": stage, "owner": owner}
        with self.writing() as c:
            return self.changed(c, sa.delete(ClaimRow).where(*_same(ClaimRow, row)))

    def release_all(self, owner: str) -> int:
        """Release every claim of ``owner``; returns their number."""
        with self.writing() as c:
            return int(c.execute(sa.delete(ClaimRow).where(ClaimRow.owner == owner)).rowcount)

    def renew(self, owner: str, lease_s: float) -> int:
        """Extend every claim of ``owner`` to ``lease_s`` seconds from now; returns the number of its claims."""
        with self.writing() as c:
            update = sa.update(ClaimRow).where(ClaimRow.owner == owner).values(expires=time.time() + lease_s)
            return int(c.execute(update).rowcount)


# Labelled, since a measurement's row and a workload's are read in one select.
_WORKLOAD = ("fingerprint", "kind", "spec", "family", "extent", "label", "source")
WORKLOAD_COLUMNS = tuple(getattr(WorkloadRow, n).label(f"w_{n}") for n in _WORKLOAD)


def _name(row: Any) -> str:
    return f"measurement {row.id}"


def _joined(*more: Any) -> sa.Select[Any]:
    query = sa.select(_M.__table__, ConfigRow.params, *more).select_from(_M)
    return query.join(ConfigRow, ConfigRow.fingerprint == _M.config)


def _at(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of statements whose conditions are of :func:`_bound`."""
    return {f"at_{name}": values[name] for name in values if name in _NAMES}


def _bound(model: Any, names: Iterable[str]) -> list[Any]:
    """The conditions of :func:`_same`, with parameters for the values."""
    return [getattr(model, name) == sa.bindparam(f"at_{name}") for name in names]


_KEY = _CANDIDATE[:4]
_NAMES = frozenset({*_CANDIDATE, "status"})
_DROP_CLAIM = sa.delete(ClaimRow).where(*_bound(ClaimRow, _CANDIDATE))
_MEASURED = sa.select(_M.id).where(*_bound(_M, _CANDIDATE))


@cache
def _candidate() -> Any:
    return _joined().where(*_bound(_M, _CANDIDATE))


@cache
def _listing(names: tuple[str, ...]) -> Any:
    """Measurements by these columns, newest first."""
    return _joined().where(*_bound(_M, names)).order_by(_M.id.desc())


@cache
def _best_of_family() -> Any:
    """The query of :meth:`Measurements.neighbours`; its parameters are "family", "here" (a device) and "exclude"."""
    away = sa.case((_M.device == sa.bindparam("here"), 0), else_=1)
    order = (away, STAGE_RANK, _M.latency_us, _M.id)
    rank = sa.func.row_number().over(partition_by=_M.workload, order_by=order).label("place")
    ranked = (
        sa.select(_M.id, rank)
        .join(WorkloadRow, WorkloadRow.fingerprint == _M.workload)
        .where(WorkloadRow.family == sa.bindparam("family"), _M.workload != sa.bindparam("exclude"), *sound())
        .subquery()
    )
    return (
        _joined(*WORKLOAD_COLUMNS)
        .join(WorkloadRow, WorkloadRow.fingerprint == _M.workload)
        .join(ranked, ranked.c.id == _M.id)
        .where(ranked.c.place == 1)
        .order_by(away, _M.latency_us)
    )


@cache
def _best_elsewhere() -> Any:
    """The query of :meth:`Measurements.under_other_keys`; its parameters are a key and "places"."""
    places = (_M.device, _M.environment, _M.policy)
    rank = sa.func.row_number().over(partition_by=places, order_by=(STAGE_RANK, _M.latency_us, _M.id))
    own = sa.and_(*_bound(_M, _KEY))
    of_workload = _M.workload == sa.bindparam("at_workload")
    ranked = sa.select(_M.id, rank.label("place")).where(of_workload, ~own, *sound()).subquery()
    query = _joined().join(ranked, ranked.c.id == _M.id).where(ranked.c.place <= sa.bindparam("places"))
    return query.order_by(ranked.c.place, _M.id)


def _key_is(key: Key) -> list[Any]:
    return _same(_M, key_values(key))


def sound() -> list[Any]:
    """An ok measurement of a candidate that failed at no other stage."""
    other = aliased(MeasurementRow)
    same = [getattr(other, n) == getattr(_M, n) for n in _CANDIDATE if n != "stage"]
    failed = sa.exists().where(*same, other.status != str(Status.OK))
    return [_M.status == str(Status.OK), ~failed, *readable()]


def dated(column: Any) -> Any:
    """True for a time with a valid date. Damaged times would come first in aggregates and orders."""
    return column.between(0.0, LATEST)


def costed(column: Any) -> Any:
    """True for a latency in the range of ``damage.cost``; False for a text or bytes."""
    return column.between(LEAST_COST, MOST_COST)


def readable() -> list[Any]:
    """Measurements that SQL may aggregate: their time and, if ok, their latency are numbers in range."""
    return [dated(_M.created), (_M.status != str(Status.OK)) | costed(_M.latency_us)]


def name_unreadable(database: Database, c: sa.Connection, *where: Any) -> None:
    """Report the measurements that :func:`readable` excludes."""
    rows = c.execute(_joined().where(*where, sa.and_(*readable()).is_not(sa.true())).limit(_SPARE)).all()
    list(database.sound(rows, measurement_from, _name))


def _is_live(expires: Any) -> bool:
    """True for a lease that has not expired; a damaged one has."""
    return isinstance(expires, (int, float)) and time.time() < expires <= LATEST


def _same(model: Any, values: dict[str, Any]) -> list[Any]:
    return [getattr(model, name) == value for name, value in values.items()]
