"""The store: one object for everything that is kept."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from autotune.errors import UserError
from autotune.store.efforts import Efforts
from autotune.store.engine import create_engine, parse_url, revision, show_url
from autotune.store.measurements import STAGE_RANK, Measurements, sound
from autotune.store.models import SCHEMA_REVISION, Base, ClaimRow, DeviceRow, MeasurementRow, WorkloadRow
from autotune.store.records import Schedule
from autotune.store.runs import Runs
from autotune.store.schedules import Schedules
from autotune.task import Status


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
    busy: bool = False
    when: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Store(Measurements, Schedules, Runs, Efforts):
    """Everything learnt, in one SQL database. Open it with :meth:`open`; safe to share among threads.

    Every method raises UserError, in one line, when the database fails (locked for too long, disk full, server gone).
    Fingerprints are those of :class:`~autotune.workload.Workload`, :class:`~autotune.device.DeviceIdentity` and
    :class:`~autotune.device.Environment` (strict).
    """

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | None = None,
        *,
        migrate: bool = True,
        readonly: bool = False,
        timeout_s: float = 30.0,
    ) -> Store:
        """Open a database.

        Args:
            url: a file name, ``sqlite:///FILE`` or ``postgresql://USER@HOST/NAME``; None for $AUTOTUNE_DB, or else
                ``autotune.db`` in the user's data folder.
            migrate: create or upgrade the tables first; safe when many processes do so at once.
            readonly: write nothing, ever; a file on a read-only medium can be opened so.
            timeout_s: how long to wait for a lock that another process holds.

        Raises:
            UserError: no such database, not reachable, not writable, not a database, or (without ``migrate``) tables
                of another version.
        """
        parsed = parse_url(url)
        engine = create_engine(parsed, readonly=readonly, timeout_s=timeout_s)
        store = cls(parsed, engine, readonly=readonly)
        try:
            found = revision(engine, parsed)
            if found != SCHEMA_REVISION:
                if readonly or not migrate:
                    raise UserError(_wrong_revision(show_url(parsed), found))
                from autotune.store.migrate import upgrade_engine

                upgrade_engine(engine, parsed)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def attach(cls, url: str | os.PathLike[str] | None = None, *, timeout_s: float = 1.0) -> Store | None:
        """Open a database for deployment: it is never created or upgraded, and read only where it cannot be written.

        Returns:
            None when ``url`` means an SQLite file that is not there: nothing was ever tuned.

        Raises:
            UserError: there is a database, but it cannot be used.
        """
        parsed = parse_url(url)
        readonly = False
        if parsed.get_backend_name() == "sqlite":
            path = Path(str(parsed.database))
            if not path.exists():
                return None
            readonly = not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
        return cls.open(url, migrate=False, readonly=readonly, timeout_s=timeout_s)

    @property
    def optuna_url(self) -> str:
        """The same database as ``optuna.storages.RDBStorage`` takes it; the tables' names do not collide."""
        return self.url

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def overview(self) -> list[Overview]:
        """What is in the database, one entry for each workload and device, newest first."""
        m = MeasurementRow
        candidate = (m.workload, m.device, m.environment, m.policy, m.config)
        # A candidate is ok if it is so at every stage; min() over "is ok" and the name of a failure, if any.
        fate = (
            sa.select(
                m.workload,
                m.device,
                sa.func.max(sa.case((m.status != str(Status.OK), m.status), else_="")).label("failure"),
                sa.func.max(m.created).label("newest"),
            )
            .group_by(*candidate)
            .subquery()
        )
        counts = sa.select(fate.c.workload, fate.c.device, fate.c.failure, sa.func.count(), sa.func.max(fate.c.newest))
        place = sa.func.row_number().over(partition_by=candidate, order_by=(STAGE_RANK, m.latency_us)).label("place")
        latest = sa.select(m.workload, m.device, m.latency_us, place).where(*sound()).subquery()
        fastest = (
            sa.select(latest.c.workload, latest.c.device, sa.func.min(latest.c.latency_us))
            .where(latest.c.place == 1)
            .group_by(latest.c.workload, latest.c.device)
        )
        with self.reading() as c:
            names = {r.fingerprint: (r.label, r.kind) for r in c.execute(
                sa.select(WorkloadRow.fingerprint, WorkloadRow.label, WorkloadRow.kind))}  # fmt: skip
            devices = {r.fingerprint: r.name for r in c.execute(sa.select(DeviceRow.fingerprint, DeviceRow.name))}
            tally = c.execute(counts.group_by(fate.c.workload, fate.c.device, fate.c.failure)).all()
            best = {(w, d): us for w, d, us in c.execute(fastest)}
        deployed: dict[tuple[str, str], Schedule] = {}
        for s in self.schedules():
            deployed.setdefault((s.key.workload, s.key.device), s)
        measured: dict[tuple[str, str], int] = defaultdict(int)
        failed: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        newest: dict[tuple[str, str], float] = {pair: s.when for pair, s in deployed.items()}
        for workload, device, failure, count, when in tally:
            pair = (workload, device)
            measured[pair] += count
            newest[pair] = max(newest.get(pair, 0.0), when)
            if failure:
                failed[pair][failure] = count
        out = []
        for pair in sorted(newest, key=lambda p: -newest[p]):
            schedule = deployed.get(pair)
            label, kind = names.get(pair[0], ("", ""))
            out.append(
                Overview(
                    workload=pair[0],
                    label=label,
                    kind=kind,
                    device=pair[1],
                    device_name=devices.get(pair[1], ""),
                    measured=measured[pair],
                    failed=dict(sorted(failed[pair].items())),
                    best_us=schedule.latency_us if schedule else best.get(pair),
                    winner=schedule.winner if schedule else None,
                    baselines=schedule.rivals if schedule else {},
                    speedup=_speedup(schedule) if schedule else None,
                    busy=schedule.busy if schedule else False,
                    when=newest[pair],
                )
            )
        return out

    def stats(self) -> dict[str, Any]:
        """Sizes and results as JSON: rows by table, bytes on disk, measurements by status, speedups of schedules.

        Speedups leave out ``busy`` schedules, whose comparison other processes disturbed too much to be trusted.
        """
        tables = Base.metadata.sorted_tables
        m = MeasurementRow
        with self.reading() as c:
            rows = {t.name: int(c.scalar(sa.select(sa.func.count()).select_from(t)) or 0) for t in tables}
            statuses = {str(s): int(n) for s, n in c.execute(sa.select(m.status, sa.func.count()).group_by(m.status))}
            live = c.scalar(sa.select(sa.func.count()).where(ClaimRow.expires > time.time()))
            size = self._size(c, [t.name for t in tables])
        compared = [o for o in self.overview() if o.speedup]
        speedups = [o.speedup for o in compared if o.speedup and not o.busy]
        return {
            "database": self.name,
            "revision": SCHEMA_REVISION,
            "bytes": size,
            "rows": rows,
            "measurements": statuses,
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


def _speedup(schedule: Schedule) -> float | None:
    baseline = min(schedule.rivals.values(), default=None)
    return baseline / schedule.latency_us if baseline and schedule.latency_us else None


def _wrong_revision(name: str, found: str | None) -> str:
    if found is None:
        return f"the database {name} has no autotune tables: run `autotune db upgrade --db {name}`"
    if found > SCHEMA_REVISION:
        return f"the database {name} is at revision {found}, made by a newer autotune ({SCHEMA_REVISION}): upgrade that"
    return f"the database {name} is at revision {found}, not {SCHEMA_REVISION}: run `autotune db upgrade --db {name}`"
