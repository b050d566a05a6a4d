"""Measurements: every one is kept, and "the best" is a query over them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from autotune.store.codec import key_values, measurement_from, measurement_values, workload_from
from autotune.store.connection.engine import Database
from autotune.store.health.damage import LATEST, LEAST_COST, MOST_COST
from autotune.store.models import ClaimRow, ConfigRow, MeasurementRow, WorkloadRow
from autotune.store.records import Key, Measurement
from autotune.store.tables.claims import Claims
from autotune.task import Config, Status, config_key
from autotune.workload import Workload

_M = MeasurementRow
_CANDIDATE = ("workload", "device", "environment", "policy", "config", "stage")
_SPARE = 32  # rows read beyond those asked for, in the place of damaged ones
# A later stage is the better evidence: "final" is interleaved with the baselines, "screen" is a first glance.
STAGE_RANK = sa.case({"final": 0, "repeat": 1}, value=_M.stage, else_=2)


class Measurements(Claims):
    """The store's measurements."""

    def add_measurement(self, m: Measurement, *, replace: bool = False) -> bool:
        """Store a measurement and drop the claim on it, in one transaction.

        Args:
            replace: overwrite this candidate's measurement at this stage, if there is one; right where that one is
                known to be disturbed.

        Returns:
            False when this candidate has a measurement at this stage already, which then stays as it is.

        Raises:
            ValueError: its workload, device or environment was not put before, or an ok one has no latency.
        """
        config = config_key(m.config)
        values = measurement_values(m, config, time.time())
        try:
            with self.writing() as c:
                c.execute(self.insert(ConfigRow).values(fingerprint=config, params=m.config).on_conflict_do_nothing())
                # Only a second measurement of the candidate may be passed over: other conflicts are mistakes.
                insert = self.insert(_M).values(**values)
                if replace:
                    insert = insert.on_conflict_do_update(index_elements=list(_CANDIDATE), set_=values)
                else:
                    insert = insert.on_conflict_do_nothing(index_elements=list(_CANDIDATE))
                added = self.changed(c, insert)
                c.execute(sa.delete(ClaimRow).where(*(getattr(ClaimRow, n) == values[n] for n in _CANDIDATE)))
                return added
        except IntegrityError as e:
            raise ValueError(f"put the workload, device and environment of {m.key} before its measurements") from e

    def get_measurement(self, key: Key, config: Config, stage: str) -> Measurement | None:
        """The measurement of one candidate at one stage, or None."""
        where = [*_key_is(key), _M.config == config_key(config), _M.stage == stage]
        with self.reading() as c:
            rows = c.execute(_joined().where(*where)).all()
        return next(self._made(rows), None)

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
        """Measurements that match every argument given (fingerprints, stage, status), oldest first.

        Args:
            limit: at most so many; the newest are kept.
        """
        given = {"workload": workload, "device": device, "environment": environment, "policy": policy,
                 "stage": stage, "status": None if status is None else str(status)}  # fmt: skip
        where = [getattr(_M, name) == value for name, value in given.items() if value is not None]
        with self.reading() as c:
            rows = c.execute(_joined().where(*where).order_by(_M.id.desc()).limit(limit)).all()
        return list(self._made(reversed(rows)))

    def _made(self, rows: Iterable[Any]) -> Iterator[Measurement]:
        return self.sound(rows, measurement_from, _name)

    def measured_keys(self) -> list[Key]:
        """The keys under which candidates were measured, in the order of their first."""
        columns = (_M.workload, _M.device, _M.environment, _M.policy)
        query = sa.select(*columns).where(_M.stage == "screen").group_by(*columns).order_by(sa.func.min(_M.id))
        with self.reading() as c:
            return [Key(*row) for row in c.execute(query)]

    def best(self, key: Key, stage: str | None = None, n: int = 1) -> list[Measurement]:
        """The ``n`` fastest ok candidates, fastest first, each once. One that failed at any stage does not count.

        Args:
            stage: compare latencies of this stage only. With None each candidate counts with its latest stage, so that
                a lucky first timing does not outlive the repetition that corrected it.
        """
        where = [*_key_is(key), *sound()]
        if stage is not None:
            where.append(_M.stage == stage)
        rank = sa.func.row_number().over(partition_by=_M.config, order_by=(STAGE_RANK, _M.latency_us)).label("place")
        ranked = sa.select(_M.id, rank).where(*where).subquery()
        best = _joined().join(ranked, ranked.c.id == _M.id).where(ranked.c.place == 1)
        with self.reading() as c:
            rows = c.execute(best.order_by(_M.latency_us, _M.id).limit(n + _SPARE)).all()
        return list(islice(self._made(rows), n))

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
        """The best measured candidate of each other workload of a family: what a new search may begin with.

        Any device counts, since a good configuration often travels; one measured on ``device`` is preferred, then one
        of a later stage, then the fastest.

        Args:
            family: the family's fingerprint; empty finds nothing.
            device: fingerprint of the device to be searched on.
            exclude: fingerprint of the workload that asks.
            extent: its row extent; neighbours come nearest first (by ratio), and without it in order of latency.
        """
        if not family:
            return []
        away = sa.case((_M.device == device, 0), else_=1)
        order = (away, STAGE_RANK, _M.latency_us, _M.id)
        rank = sa.func.row_number().over(partition_by=_M.workload, order_by=order).label("place")
        ranked = (
            sa.select(_M.id, rank)
            .join(WorkloadRow, WorkloadRow.fingerprint == _M.workload)
            .where(WorkloadRow.family == family, _M.workload != exclude, *sound())
            .subquery()
        )
        best = (
            _joined(*WORKLOAD_COLUMNS)
            .join(WorkloadRow, WorkloadRow.fingerprint == _M.workload)
            .join(ranked, ranked.c.id == _M.id)
            .where(ranked.c.place == 1)
            .order_by(away, _M.latency_us)
        )
        with self.reading() as c:
            rows = c.execute(best).all()
        made = self.sound(rows, lambda r: (workload_from(r), measurement_from(r), r.device != device), _name)
        found = list(made)
        if extent is not None:
            found.sort(key=lambda f: (f[2], _distance(f[0].extent, extent)))
        return [(workload, measurement) for workload, measurement, _ in found[:limit]]

    def elsewhere(self, key: Key, best: int) -> list[Measurement]:
        """The best few of a workload's candidates in each other place: on another device, with other software, or
        measured by another policy. The best of each place come first, then the second best. A candidate that failed at
        any stage there does not count."""
        places = (_M.device, _M.environment, _M.policy)
        rank = sa.func.row_number().over(partition_by=places, order_by=(STAGE_RANK, _M.latency_us, _M.id))
        own = sa.and_(*_key_is(key))
        ranked = sa.select(_M.id, rank.label("place")).where(_M.workload == key.workload, ~own, *sound()).subquery()
        # A candidate has a measurement for each stage.
        query = _joined().join(ranked, ranked.c.id == _M.id).where(ranked.c.place <= 3 * best)
        with self.reading() as c:
            return list(self._made(c.execute(query.order_by(ranked.c.place, _M.id)).all()))


# Labelled, since a measurement's row and a workload's are read in one select.
_WORKLOAD = ("fingerprint", "kind", "spec", "family", "extent", "label", "source")
WORKLOAD_COLUMNS = tuple(getattr(WorkloadRow, n).label(f"w_{n}") for n in _WORKLOAD)


def _name(row: Any) -> str:
    return f"measurement {row.id}"


def _joined(*more: Any) -> sa.Select[Any]:
    query = sa.select(_M.__table__, ConfigRow.params, *more).select_from(_M)
    return query.join(ConfigRow, ConfigRow.fingerprint == _M.config)


def _key_is(key: Key) -> list[Any]:
    return [getattr(_M, name) == value for name, value in key_values(key).items()]


def sound() -> list[Any]:
    """An ok measurement of a candidate that failed at no other stage."""
    other = aliased(MeasurementRow)
    same = [getattr(other, n) == getattr(_M, n) for n in _CANDIDATE if n != "stage"]
    failed = sa.exists().where(*same, other.status != str(Status.OK))
    return [_M.status == str(Status.OK), ~failed, *readable()]


def dated(column: Any) -> Any:
    """True for a time that has a date. An aggregate or an order over damaged times would prefer them."""
    return column.between(0.0, LATEST)


def costed(column: Any) -> Any:
    """True for a latency in the range of ``damage.cost``; a text or bytes are beyond it."""
    return column.between(LEAST_COST, MOST_COST)


def readable() -> list[Any]:
    """Measurements that SQL may aggregate: their time and, where they are ok, their latency are numbers in range."""
    return [dated(_M.created), (_M.status != str(Status.OK)) | costed(_M.latency_us)]


def name_unreadable(database: Database, c: sa.Connection, *where: Any) -> None:
    """Name the measurements that :func:`readable` leaves out."""
    rows = c.execute(_joined().where(*where, sa.and_(*readable()).is_not(sa.true())).limit(_SPARE)).all()
    list(database.sound(rows, measurement_from, _name))


def _distance(a: int, b: int) -> float:
    """How far apart two extents are, as a ratio (1 is equal)."""
    low, high = sorted((max(a, 1), max(b, 1)))
    return high / low
