"""What searches are doing, from what they store as they go: any process that reads the database can watch them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa

from autotune.errors import printable
from autotune.store.models import DeviceRow, MeasurementRow, RunRow
from autotune.store.tables.claims import owner_is_dead
from autotune.store.tables.measurements import dated, name_unreadable, readable
from autotune.store.tables.runs import run_from
from autotune.store.tables.workloads import Workloads
from autotune.task import Status

RATE_S = 60.0
"""Seconds back from now over which the rate of a run is told."""

_M = MeasurementRow


@dataclass(frozen=True)
class WorkloadActivity:
    """What a run has done of one workload.

    Attributes:
        measured: candidates, each once; ``failed`` of them did not work.
        best_us: the fastest timing of a candidate in this run; None where none worked.
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
    """A run as it stands.

    Attributes:
        state: as stored ("running", "done", "interrupted", "failed"), or "lost" for one whose process has died.
        host: where it runs.
        rate: candidates a minute over the last :data:`RATE_S` seconds, or since it began.
        workloads: those it has begun, the latest last.
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


class Activities(Workloads):
    """The store's view of running searches."""

    def activity(self, newest: int = 20) -> list[Activity]:
        """Runs that are running, newest first; where there are none, the newest run.

        Args:
            newest: at most so many.
        """
        running = sa.case((RunRow.state == "running", 0), else_=1)
        order = (running, RunRow.started.desc())
        with self.reading() as c:
            query = sa.select(RunRow.__table__)
            rows = [*c.execute(query.where(dated(RunRow.started)).order_by(*order).limit(newest))]
            rows += c.execute(query.where(dated(RunRow.started).is_not(sa.true())).limit(newest))  # to be named
        found = list(self.sound(rows, self._activity, lambda r: f"run {str(r.id)[:12]}"))
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
            best = {
                (w, d): us
                for w, d, us in c.execute(
                    sa.select(*groups, sa.func.min(_M.latency_us))
                    .where(*own, _M.status == str(Status.OK))
                    .group_by(*groups)
                )
            }
            names = (DeviceRow.fingerprint, DeviceRow.name)
            devices = {f: printable(str(n)) for f, n in c.execute(sa.select(*names))}
        labels = self.names(r[0] for r in done)
        return Activity(
            run=run.id,
            command=run.command,
            state=state,
            host=printable(owner.partition(":")[0].partition("/")[0]),
            started=run.started,
            finished=run.finished,
            rate=60.0 * lately / max(1.0, min(RATE_S, now - run.started)) if state == "running" else 0.0,
            workloads=tuple(
                WorkloadActivity(
                    printable(str(w)),
                    *labels.get(w, ("", "")),
                    devices.get(d, ""),
                    int(n),
                    int(bad),
                    best.get((w, d)),
                    last,
                )
                for w, d, n, bad, last in done
            ),
        )
