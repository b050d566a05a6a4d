"""What is in the database at a glance: the lines of ``autotune show`` and the sums of ``autotune db stats``.

Candidates are counted and compared by the database; what is read of it is a row for each line that is shown.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from autotune.errors import printable
from autotune.store.health.damage import Damaged, cost, figures, latencies, number
from autotune.store.models import SCHEMA_REVISION, Base, ClaimRow, DeviceRow, MeasurementRow, ScheduleRow
from autotune.store.records import BUSY
from autotune.store.tables.measurements import STAGE_RANK, dated, name_unreadable, readable, sound
from autotune.store.tables.schedules import name_unreadable_schedules, readable_schedule
from autotune.store.tables.workloads import Workloads, batches
from autotune.task import REFERENCE, Status

_M, _S = MeasurementRow, ScheduleRow
_CANDIDATE = (_M.workload, _M.device, _M.environment, _M.policy, _M.config)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Overview:
    """What is known of one workload on one device: a line of ``autotune show``.

    Attributes:
        workload, device: fingerprints; ``label`` and ``device_name`` are for people.
        measured: candidates with a measurement; ``failed`` counts, by status, those that are not ok.
        best_us: latency of the stored schedule, else of the fastest candidate measured so far; None without either.
        winner: who won the final comparison; None where there was none yet.
        baselines: name to latency in microseconds, from that comparison.
        speedup: fastest baseline over ``best_us``; None without a final comparison.
        metrics: the domain's own figures of what is deployed.
        busy: whether other processes disturbed that comparison too much to trust it.
        when: time of the newest schedule or measurement, in seconds since the epoch.
    """

    workload: str
    label: str
    kind: str
    device: str
    device_name: str
    measured: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    best_us: float | None = None
    winner: str | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    speedup: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    busy: bool = False
    when: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Deployed:
    """The fastest schedule of a workload on a device, as far as it is shown."""

    pair: Pair
    latency_us: float
    winner: str
    baselines: dict[str, float]
    busy: bool
    metrics: dict[str, float]

    @property
    def speedup(self) -> float | None:
        best = min(self.baselines.values(), default=None)
        return best / self.latency_us if best else None


class Overviews(Workloads):
    """The store's overview and statistics."""

    def tuned_count(self) -> int:
        """Pairs of a workload and a device of which something is known: how long :meth:`overview` is."""
        measured = sa.select(_M.workload, _M.device).where(dated(_M.created))
        pairs = sa.union(measured, sa.select(_S.workload, _S.device).where(dated(_S.created))).subquery()
        with self.reading() as c:
            return int(c.scalar(sa.select(sa.func.count()).select_from(pairs)) or 0)

    def overview(self, limit: int | None = None) -> list[Overview]:
        """What is in the database, one entry for each workload and device, newest first.

        Args:
            limit: at most so many; the newest.
        """
        times = sa.union_all(
            sa.select(_M.workload, _M.device, sa.func.max(_M.created).label("at"))
            .where(dated(_M.created))
            .group_by(_M.workload, _M.device),
            sa.select(_S.workload, _S.device, sa.func.max(_S.created))
            .where(dated(_S.created))
            .group_by(_S.workload, _S.device),
        ).subquery()
        newest = sa.func.max(times.c.at)
        query = sa.select(times.c.workload, times.c.device, newest).group_by(times.c.workload, times.c.device)
        with self.reading() as c:
            name_unreadable(self, c)
            found = c.execute(query.order_by(newest.desc(), times.c.workload, times.c.device).limit(limit)).all()
        when: dict[Pair, float] = {(r[0], r[1]): r[2] for r in found}
        out: list[Overview] = []
        for part in batches(list(when), 500):
            out += self._overview(part, when)
        return out

    def _overview(self, pairs: Sequence[Pair], when: dict[Pair, float]) -> Iterator[Overview]:
        workloads = sorted({workload for workload, _ in pairs}, key=str)
        # A candidate is ok if it is so at every stage; the largest of "" and the names of its failures tells.
        failure = sa.func.max(sa.case((_M.status != str(Status.OK), _M.status), else_="")).label("failure")
        own = _M.workload.in_(workloads)
        fate = sa.select(_M.workload, _M.device, failure).where(own, *readable()).group_by(*_CANDIDATE).subquery()
        groups = (fate.c.workload, fate.c.device, fate.c.failure)
        place = sa.func.row_number().over(partition_by=_CANDIDATE, order_by=(STAGE_RANK, _M.latency_us)).label("place")
        latest = sa.select(_M.workload, _M.device, _M.latency_us, place).where(own, *sound()).subquery()
        ends = (latest.c.workload, latest.c.device)
        fastest = sa.select(*ends, sa.func.min(latest.c.latency_us)).where(latest.c.place == 1).group_by(*ends)
        with self.reading() as c:
            tally = c.execute(sa.select(*groups, sa.func.count()).group_by(*groups)).all()
            best = {(w, d): us for w, d, us in c.execute(fastest)}
        deployed = {d.pair: d for d in self._deployed(_S.workload.in_(workloads))}
        measured: dict[Pair, int] = defaultdict(int)
        failed: dict[Pair, dict[str, int]] = defaultdict(dict)
        for workload, device, status, count in tally:
            measured[workload, device] += count
            if status:
                failed[workload, device][printable(str(status))] = count
        names = self.names(workloads)
        devices = self._device_names({device for _, device in pairs})
        for pair in pairs:
            schedule = deployed.get(pair)
            label, kind = names.get(pair[0], ("", ""))
            yield Overview(
                workload=printable(str(pair[0])),  # a damaged row may name anything
                label=label,
                kind=kind,
                device=printable(str(pair[1])),
                device_name=devices.get(pair[1], ""),
                measured=measured[pair],
                failed=dict(sorted(failed[pair].items())),
                best_us=schedule.latency_us if schedule else best.get(pair),
                winner=schedule.winner if schedule else None,
                baselines=schedule.baselines if schedule else {},
                speedup=schedule.speedup if schedule else None,
                metrics=schedule.metrics if schedule else {},
                busy=schedule.busy if schedule else False,
                when=when[pair],
            )

    def _device_names(self, fingerprints: set[str]) -> dict[str, str]:
        columns = (DeviceRow.fingerprint, DeviceRow.name)
        rows = self._each(sa.select(*columns), DeviceRow.fingerprint, fingerprints)
        return {r.fingerprint: printable(str(r.name)) for r in rows}

    def _deployed(self, *where: Any) -> Iterator[_Deployed]:
        """The fastest schedule of each workload and device."""
        order = (_S.latency_us, _S.created.desc())
        place = sa.func.row_number().over(partition_by=(_S.workload, _S.device), order_by=order).label("place")
        columns = (_S.workload, _S.device, _S.latency_us, _S.winner, _S.baselines, _S.others)
        candidate = (getattr(_M, column.key) == getattr(_S, column.key) for column in _CANDIDATE)
        final = sa.and_(*candidate, _M.stage == "final")
        own = (*where, *readable_schedule())
        ranked = sa.select(*columns, _M.metrics, place).outerjoin_from(_S, _M, final).where(*own).subquery()
        with self.reading() as c:
            name_unreadable_schedules(self, c, *where)
            rows = c.execute(sa.select(ranked).where(ranked.c.place == 1)).all()

        def made(row: Any) -> _Deployed:
            others = 0.0 if row.others is None else number(row.others, "number of busy processors")
            rivals = {n: us for n, us in latencies(row.baselines).items() if not n.startswith(REFERENCE)}
            us = cost(row.latency_us)
            own: dict[str, float] = {}
            with contextlib.suppress(Damaged):  # they are a measurement's, on which the schedule does not depend
                own = {printable(name): figure for name, figure in figures(row.metrics or {}).items()}
            return _Deployed((row.workload, row.device), us, printable(str(row.winner)), rivals, others > BUSY, own)

        return self.sound(rows, made, lambda r: f"schedule of workload {str(r.workload)[:12]} (search it again)")

    def stats(self) -> dict[str, Any]:
        """Sizes and results as JSON: rows by table, bytes on disk, measurements by status, speedups of schedules.

        Speedups leave out ``busy`` schedules, whose comparison other processes disturbed too much to be trusted.
        """
        tables = Base.metadata.sorted_tables
        with self.reading() as c:
            rows = {t.name: int(c.scalar(sa.select(sa.func.count()).select_from(t)) or 0) for t in tables}
            statuses = c.execute(sa.select(_M.status, sa.func.count()).group_by(_M.status)).all()
            live = c.scalar(sa.select(sa.func.count()).where(ClaimRow.expires > time.time()))
            size = self._size(c, [t.name for t in tables])
        compared = [d for d in self._deployed() if d.speedup]
        speedups = [d.speedup for d in compared if d.speedup and not d.busy]
        return {
            "database": self.name,
            "revision": SCHEMA_REVISION,
            "bytes": size,
            "rows": rows,
            "measurements": {printable(str(s)): int(n) for s, n in statuses},
            "claims": int(live or 0),
            "schedules": len(compared),
            "busy": len(compared) - len(speedups),
            "speedup_geomean": exp(sum(map(log, speedups)) / len(speedups)) if speedups else None,
            "speedup_best": max(speedups, default=None),
        }

    def _size(self, c: sa.Connection, tables: list[str]) -> int:
        if c.dialect.name == "sqlite":
            path = Path(str(self._url.database))
            return sum(p.stat().st_size for p in (path, path.with_name(path.name + "-wal")) if p.exists())
        return sum(int(c.scalar(sa.select(sa.func.pg_total_relation_size(t))) or 0) for t in tables)
