"""Overviews of a database and of running searches: `autotune show`, `watch` and `db stats`.

The database counts and compares candidates; one row is read for each line of the output.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, log
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from autotune.errors import printable
from autotune.store.damage import Damaged, cost, figures, latencies, number
from autotune.store.models import SCHEMA_REVISION, Base, ClaimRow, DeviceRow, MeasurementRow, RunRow, ScheduleRow
from autotune.store.records import BUSY
from autotune.store.tables.measurements import STAGE_RANK, dated, name_unreadable, owner_is_dead, readable, sound
from autotune.store.tables.runs import Runs, run_from
from autotune.store.tables.schedules import name_unreadable_schedules, readable_schedule
from autotune.store.tables.workloads import batches
from autotune.task import REFERENCE, Status

_M, _S = MeasurementRow, ScheduleRow
_CANDIDATE = (_M.workload, _M.device, _M.environment, _M.policy, _M.config)
Pair = tuple[str, str]
RATE_S = 60.0
"""Seconds up to now over which the rate of a run is computed."""


@dataclass(frozen=True)
class Overview:
    """One workload on one device: a line of ``autotune show``.

    Attributes:
        workload, device: fingerprints; ``label`` and ``device_name`` are readable names.
        measured: candidates with a measurement; ``failed`` counts, by status, those that are not ok.
        best_us: latency of the stored schedule, else of the fastest candidate measured so far; None without either.
        winner: winner of the final comparison; None without one yet.
        baselines: name to latency in microseconds, from that comparison.
        speedup: fastest baseline over ``best_us``; None without a final comparison.
        metrics: the domain's own metrics of the schedule.
        busy: True if other processes disturbed that comparison too much to trust it.
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
class WorkloadActivity:
    """One workload's part in a run.

    Attributes:
        measured: number of candidates, of which ``failed`` failed.
        best_us: the fastest timing of a candidate in this run; None if none worked.
        last: time of the newest measurement, in seconds since the epoch.
    """

    workload: str
    label: str
    kind: str
    device: str
    measured: int
    failed: int
    best_us: float | None
    last: float


@dataclass(frozen=True)
class Activity:
    """The present state of a run.

    Attributes:
        state: as stored ("running", "done", "interrupted", "failed"), or "lost" for one whose process has died.
        host: the host that it runs on.
        rate: candidates a minute over the last :data:`RATE_S` seconds, or since its beginning.
        workloads: those begun, the latest last.
    """

    run: str
    command: str
    state: str
    host: str
    started: float
    finished: float | None
    rate: float = 0.0
    workloads: tuple[WorkloadActivity, ...] = field(default=())

    @property
    def measured(self) -> int:
        return sum(w.measured for w in self.workloads)

    @property
    def failed(self) -> int:
        return sum(w.failed for w in self.workloads)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "measured": self.measured, "failed": self.failed}


class Overviews(Runs):
    """The store's overview, its statistics, and its view of running searches."""

    def tuned_count(self) -> int:
        """The length of :meth:`overview`: pairs of a workload and a device with a measurement or a schedule."""
        measured = sa.select(_M.workload, _M.device).where(dated(_M.created))
        pairs = sa.union(measured, sa.select(_S.workload, _S.device).where(dated(_S.created))).subquery()
        with self.reading() as c:
            return int(c.scalar(sa.select(sa.func.count()).select_from(pairs)) or 0)

    def overview(self, limit: int | None = None) -> list[Overview]:
        """One entry for each workload and device, newest first.

        Args:
            limit: maximum number; the newest are returned.
        """
        times = sa.union_all(*(
            sa.select(t.workload, t.device, sa.func.max(t.created).label("at"))
            .where(dated(t.created))
            .group_by(t.workload, t.device)
            for t in (_M, _S)
        )).subquery()  # fmt: skip
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
        # A candidate is ok if it is ok at every stage: then the largest of "" and the names of its failures is "".
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
        deployed = dict(self._deployed(_S.workload.in_(workloads)))
        measured: dict[Pair, int] = defaultdict(int)
        failed: dict[Pair, dict[str, int]] = defaultdict(dict)
        for workload, device, status, count in tally:
            measured[workload, device] += count
            if status:
                failed[workload, device][printable(str(status))] = count
        names = self.names(workloads)
        devices = self._device_names({device for _, device in pairs})
        for pair in pairs:
            label, kind = names.get(pair[0], ("", ""))
            found = deployed.get(pair, Overview("", "", "", "", "", best_us=best.get(pair)))
            yield replace(
                found,
                workload=printable(str(pair[0])),  # a damaged row may have any value
                label=label,
                kind=kind,
                device=printable(str(pair[1])),
                device_name=devices.get(pair[1], ""),
                measured=measured[pair],
                failed=dict(sorted(failed[pair].items())),
                when=when[pair],
            )

    def _device_names(self, fingerprints: Iterable[str]) -> dict[str, str]:
        columns = (DeviceRow.fingerprint, DeviceRow.name)
        rows = self._each(sa.select(*columns), DeviceRow.fingerprint, fingerprints)
        return {r.fingerprint: printable(str(r.name)) for r in rows}

    def _deployed(self, *where: Any) -> Iterator[tuple[Pair, Overview]]:
        """The fastest schedule of each workload and device, without names and counts."""
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

        def made(row: Any) -> tuple[Pair, Overview]:
            others = 0.0 if row.others is None else number(row.others, "number of busy processors")
            rivals = {n: us for n, us in latencies(row.baselines).items() if not n.startswith(REFERENCE)}
            us, least = cost(row.latency_us), min(rivals.values(), default=0.0)
            own: dict[str, float] = {}
            with contextlib.suppress(Damaged):  # metrics are a measurement's; the schedule is valid without them
                own = {printable(name): figure for name, figure in figures(row.metrics or {}).items()}
            pair = (row.workload, row.device)
            return pair, Overview(
                row.workload, "", "", row.device, "", best_us=us, winner=printable(str(row.winner)), baselines=rivals,
                speedup=least / us if least else None, metrics=own, busy=others > BUSY,
            )  # fmt: skip

        return self.sound(rows, made, lambda r: f"schedule of workload {str(r.workload)[:12]} (search it again)")

    def stats(self) -> dict[str, Any]:
        """Sizes and results as JSON: rows by table, bytes on disk, measurements by status, speedups of schedules.

        Speedups exclude ``busy`` schedules, whose comparison other processes disturbed too much to trust it.
        """
        tables = Base.metadata.sorted_tables
        with self.reading() as c:
            rows = {t.name: int(c.scalar(sa.select(sa.func.count()).select_from(t)) or 0) for t in tables}
            statuses = c.execute(sa.select(_M.status, sa.func.count()).group_by(_M.status)).all()
            live = c.scalar(sa.select(sa.func.count()).where(ClaimRow.expires > time.time()))
            size = self._size(c, [t.name for t in tables])
        compared = [d for _, d in self._deployed() if d.speedup]
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

    def activity(self) -> list[Activity]:
        """Active runs, newest first; without any, the newest run."""
        running = sa.case((RunRow.state == "running", 0), else_=1)
        found = self._runs(self._activity, 20, running, RunRow.started.desc())
        return [a for a in found if a.state == "running"] or found[:1]

    def _activity(self, row: Any) -> Activity:
        state, owner = printable(str(row.state)), str(row.owner)
        if state == "running" and owner_is_dead(owner):
            state = "lost"
        run = run_from(row)
        now = time.time()
        first = _M.stage == "screen"
        failed = sa.func.count(sa.distinct(sa.case((_M.status != str(Status.OK), _M.config))))
        counts = (sa.func.count(sa.distinct(_M.config)), failed, sa.func.max(_M.created))
        groups = (_M.workload, _M.device)
        own = (_M.run == row.id, *readable())
        every = sa.select(*groups, *counts).where(*own).group_by(*groups).order_by(sa.func.max(_M.created))
        recent = sa.select(sa.func.count()).where(*own, first, _M.created > now - RATE_S)
        with self.reading() as c:
            name_unreadable(self, c, _M.run == row.id)
            done = c.execute(every).all()
            lately = int(c.scalar(recent) or 0)
            fastest = sa.select(*groups, sa.func.min(_M.latency_us)).where(*own, _M.status == str(Status.OK))
            best = {(w, d): us for w, d, us in c.execute(fastest.group_by(*groups))}
        labels, devices = self.names(row[0] for row in done), self._device_names(row[1] for row in done)

        def named(workload: Any, device: Any) -> tuple[str, str, str, str]:
            return printable(str(workload)), *labels.get(workload, ("", "")), devices.get(device, "")

        return Activity(
            run=run.id,
            command=run.command,
            state=state,
            host=printable(owner.partition(":")[0].partition("/")[0]),
            started=run.started,
            finished=run.finished,
            rate=60.0 * lately / max(1.0, min(RATE_S, now - run.started)) if state == "running" else 0.0,
            workloads=tuple(
                WorkloadActivity(*named(w, d), int(n), int(bad), best.get((w, d)), last) for w, d, n, bad, last in done
            ),
        )
