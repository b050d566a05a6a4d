"""Runs of searches, the progress of workloads, misses to search next, calibrations, and counts of deployed steps."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from autotune.errors import UserError, printable
from autotune.store.codec import calibration_from, calibration_values, finite_json, key_from, key_values
from autotune.store.connection.engine import Database
from autotune.store.damage import Damaged, integer, mapping, moment, number
from autotune.store.models import CalibrationRow, ClaimRow, EffortRow, MissRow, RunRow, SavingRow
from autotune.store.records import Calibration, Effort, Key, Miss, Run, Saving
from autotune.store.tables.measurements import dated, owner_is_dead, owner_name
from autotune.store.tables.workloads import Workloads
from autotune.workload import Workload

T = TypeVar("T")
log = logging.getLogger(__name__)


class Runs(Workloads):
    """The store's runs, misses, efforts and calibrations."""

    def start_run(self, command: str, *, owner: str | None = None) -> Run:
        """Record the start of a search, and set runs of killed searches to "interrupted".

        Args:
            owner: the owner's name in claims (:func:`autotune.store.owner_name`); None makes one.
        """
        run = Run(id=uuid.uuid4().hex, command=printable(command), started=time.time())
        with self.writing() as c:
            c.execute(sa.delete(ClaimRow).where(ClaimRow.expires < time.time()))
            running = sa.select(RunRow.id, RunRow.owner).where(RunRow.state == "running")
            dead = [r.id for r in c.execute(running) if owner_is_dead(r.owner)]
            if dead:
                swept = sa.update(RunRow).where(RunRow.id.in_(dead), RunRow.state == "running")
                c.execute(swept.values(state="interrupted", finished=time.time()))
            c.execute(self.insert(RunRow).values(**vars(run), owner=owner or owner_name()))
        return run

    def finish_run(self, id: str, state: str = "done", summary: Mapping[str, Any] | None = None) -> None:
        """Record the end of a run: "done", "interrupted" or "failed", with a summary as JSON."""
        values = {"state": state, "finished": time.time(), "summary": finite_json(dict(summary or {}))}
        with self.writing() as c:
            c.execute(sa.update(RunRow).where(RunRow.id == id).values(**values))

    def runs(self, limit: int | None = None) -> list[Run]:
        """Runs, newest first."""
        return self._runs(run_from, limit, RunRow.started.desc())

    def _runs(self, make: Callable[[Any], T], limit: int | None, *order: Any) -> list[T]:
        query, has_date = sa.select(RunRow.__table__).limit(limit), dated(RunRow.started)
        with self.reading() as c:
            rows = [*c.execute(query.where(has_date).order_by(*order))]
            rows += c.execute(query.where(has_date.is_not(sa.true())))  # read to report them as damaged
        return list(self.sound(rows, make, lambda r: f"run {str(r.id)[:12]}"))

    def add_miss(self, workload: Workload, device: str, reason: str = "") -> bool:
        """Record that no schedule fits ``workload`` on ``device`` (a fingerprint); counts repeated misses.

        Deployment calls this, so it never raises: it returns False if the database cannot be written.
        """
        if self.readonly:
            return False
        news = {"reason": reason, "created": time.time()}
        insert = self.insert(MissRow).values(workload=workload.fingerprint, device=device, count=1, **news)
        upsert = insert.on_conflict_do_update(
            index_elements=["workload", "device"], set_={"count": MissRow.count + 1, **news}
        )
        try:
            with self.writing() as c:
                self._put_workload(c, workload)
                c.execute(upsert)
        except UserError as e:
            log.info("a miss was not recorded: %s", e)
            return False
        return True

    def misses(self, device: str | None = None) -> list[Miss]:
        """Misses to search, the most frequent first."""
        where = [] if device is None else [MissRow.device == device]
        query = sa.select(MissRow.__table__, MissRow.count.label("times")).where(*where)
        query = query.order_by(MissRow.count.desc(), MissRow.created.desc())
        return self.made(query, miss_from, lambda r: f"miss of workload {str(r.workload)[:12]}")

    def clear_miss(self, workload: str, device: str) -> bool:
        """Delete a miss (fingerprints); False if there was none. Storing a schedule deletes it too."""
        with self.writing() as c:
            gone = sa.delete(MissRow).where(MissRow.workload == workload, MissRow.device == device)
            return self.changed(c, gone)

    def captured(self, signature: str, newest: int = 50) -> list[tuple[Workload, int]] | None:
        """The workloads that one of the ``newest`` runs captured for a signature.

        A run has them in ``summary["capture"]``, or for several targets in the list ``summary["captures"]``.

        Returns:
            Workloads with their numbers of occurrences; None if no run captured them or a workload is not stored.
        """
        for run in self.runs(limit=newest):
            several = run.summary.get("captures")
            every = [run.summary.get("capture"), *(several if isinstance(several, list) else [])]
            noted = next((n for n in every if isinstance(n, dict) and n.get("signature") == signature), None)
            if noted is None:
                continue
            try:
                counts = [(str(fingerprint), int(count)) for fingerprint, count in noted["workloads"]]
            except (KeyError, TypeError, ValueError):
                return None
            known = self.get_workloads(fingerprint for fingerprint, _ in counts)
            found = [(known[fingerprint], count) for fingerprint, count in counts if fingerprint in known]
            return found if len(found) == len(counts) else None
        return None

    def add_effort(self, effort: Effort) -> None:
        """Record a search: its seconds are added, the larger grant is kept, and all other fields are replaced.

        Raises:
            ValueError: its workload, device or environment was not stored before.
        """
        key = {**key_values(effort.key), "scope": effort.scope}
        news = {"settled": effort.settled, "stop": effort.stop, "created": effort.when or time.time()}
        insert = self.insert(EffortRow).values(**key, **news, seconds=effort.seconds, granted=effort.granted)
        new = insert.excluded
        sums = {
            "seconds": EffortRow.seconds + new.seconds,
            "granted": sa.case((EffortRow.granted > new.granted, EffortRow.granted), else_=new.granted),
        }
        with self.referring(f"the workload, device and environment of {effort.key}", "its effort") as c:
            c.execute(insert.on_conflict_do_update(index_elements=list(key), set_={**news, **sums}))

    def get_effort(self, key: Key, scope: str) -> Effort | None:
        """The progress of a workload's search within a scope; None without one."""
        where = [getattr(EffortRow, name) == value for name, value in key_values(key).items()]
        query = sa.select(EffortRow.__table__).where(*where, EffortRow.scope == scope)
        return next(iter(self.made(query, effort_from, lambda r: f"effort on workload {key.workload[:12]}")), None)

    def put_calibration(self, calibration: Calibration) -> None:
        """Store the results of a calibration, which replace earlier ones of the device.

        Raises:
            ValueError: the device was not stored before.
        """
        values = calibration_values(calibration, time.time())
        with self.referring(f"the device {calibration.device[:12]}", "its calibration") as c:
            c.execute(self.upsert(CalibrationRow, values, ("device", "kind")).values(**values))

    def get_calibration(self, device: str, kind: str) -> Calibration | None:
        """The calibration of a device (fingerprint) for a domain, or None."""
        query = sa.select(CalibrationRow.__table__).where(CalibrationRow.device == device, CalibrationRow.kind == kind)
        return next(iter(self.made(query, calibration_from, lambda r: f"calibration of device {device[:12]}")), None)


def run_from(row: Any) -> Run:
    """A run from its row; raises Damaged."""
    finished = None if row.finished is None else moment(row.finished, "end")
    started = moment(row.started, "beginning")
    return Run(
        str(row.id), printable(str(row.command)), str(row.state), started, finished, mapping(row.summary, "summary")
    )


def miss_from(row: Any) -> Miss:
    """A miss from its row, whose count is ``times``; raises Damaged."""
    reason = printable(str(row.reason))
    return Miss(str(row.workload), str(row.device), integer(row.times, "count"), reason, moment(row.created))


def effort_from(row: Any) -> Effort:
    """An effort from its row; raises Damaged."""
    seconds, granted = number(row.seconds, "seconds"), number(row.granted, "granted seconds")
    return Effort(
        key_from(row), str(row.scope), seconds, granted, bool(row.settled), str(row.stop), moment(row.created)
    )


_KEY = ("process", "graph", "device", "environment", "mode", "week")


class Savings(Database):
    """The store's counts of steps."""

    def put_savings(self, counted: Sequence[Saving]) -> None:
        """Store the counts of a process so far, all or none.

        A count replaces a smaller one of its key. So a repeated write counts no step twice, and concurrent processes
        lose no counts, since they share no rows.

        Raises:
            ValueError: a device or an environment was not stored before.
        """
        with self.referring("the device and the environment of a count", "it") as c:
            for one in counted:
                values = {**vars(one), "created": time.time()}
                upsert = self.upsert(SavingRow, values, _KEY, lambda new: new.steps > SavingRow.steps)
                c.execute(upsert.values(**values))

    def savings(self) -> list[Saving]:
        """All counts, by week."""
        query = sa.select(SavingRow.__table__).order_by(SavingRow.week, SavingRow.program, SavingRow.graph)
        return self.made(query, saving_from, lambda row: f"count of steps of graph {str(row.graph)[:12]}")


def saving_from(row: Any) -> Saving:
    """A count from its row; raises Damaged."""
    moment(row.created)
    try:
        time.strptime(row.week, "%Y-%m-%d")
    except (TypeError, ValueError):
        raise Damaged(f"its week is {ascii(row.week)[:40]}") from None
    return Saving(
        **{name: str(getattr(row, name)) for name in _KEY},
        program=printable(str(row.program)),
        steps=integer(row.steps, "number of steps", 0),
        alone_us=number(row.alone_us, "time saved"),
    )
