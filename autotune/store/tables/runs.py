"""Runs (what was searched when) and misses (what should be searched next)."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from autotune.errors import UserError, printable
from autotune.store.codec import finite_json
from autotune.store.health.damage import mapping, moment, whole
from autotune.store.models import ClaimRow, MissRow, RunRow
from autotune.store.records import Miss, Run
from autotune.store.tables.claims import owner_is_dead, owner_name
from autotune.store.tables.measurements import dated
from autotune.store.tables.workloads import Workloads
from autotune.workload import Workload

log = logging.getLogger(__name__)


class Runs(Workloads):
    """The store's runs and misses."""

    def start_run(self, command: str, *, owner: str | None = None) -> Run:
        """Record the start of a search. Sweeps up after killed ones: their runs become "interrupted".

        Args:
            owner: the name it claims candidates under (:func:`autotune.store.owner_name`); None makes one.
        """
        run = Run(id=uuid.uuid4().hex, command=printable(command), started=time.time())
        with self.writing() as c:
            c.execute(sa.delete(ClaimRow).where(ClaimRow.expires < time.time()))
            running = sa.select(RunRow.id, RunRow.owner).where(RunRow.state == "running")
            dead = [r.id for r in c.execute(running) if owner_is_dead(r.owner)]
            if dead:
                swept = sa.update(RunRow).where(RunRow.id.in_(dead), RunRow.state == "running")
                c.execute(swept.values(state="interrupted", finished=time.time()))
            row = self.insert(RunRow).values(
                id=run.id,
                command=run.command,
                state=run.state,
                owner=owner or owner_name(),
                started=run.started,
                finished=None,
                summary={},
            )
            c.execute(row)
        return run

    def finish_run(self, id: str, state: str = "done", summary: Mapping[str, Any] | None = None) -> None:
        """Record how a run ended: "done", "interrupted" or "failed", and any JSON worth keeping about it."""
        values = {"state": state, "finished": time.time(), "summary": finite_json(dict(summary or {}))}
        with self.writing() as c:
            c.execute(sa.update(RunRow).where(RunRow.id == id).values(**values))

    def runs(self, limit: int | None = None) -> list[Run]:
        """Runs, newest first."""
        with self.reading() as c:
            query = sa.select(RunRow.__table__)
            rows = [*c.execute(query.where(dated(RunRow.started)).order_by(RunRow.started.desc()).limit(limit))]
            rows += c.execute(query.where(dated(RunRow.started).is_not(sa.true())).limit(limit))  # to be named
        return list(self.sound(rows, run_from, lambda r: f"run {str(r.id)[:12]}"))

    def add_miss(self, workload: Workload, device: str, reason: str = "") -> bool:
        """Record that nothing stored fitted ``workload`` on ``device`` (a fingerprint); counts repeated misses.

        Called while a model is deployed, so it never fails: where the database cannot be written now, it returns False.
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
        """Misses waiting to be searched, the most frequent first."""
        where = [] if device is None else [MissRow.device == device]
        order = (MissRow.count.desc(), MissRow.created.desc())
        with self.reading() as c:
            rows = c.execute(
                sa.select(MissRow.__table__, MissRow.count.label("times")).where(*where).order_by(*order)
            ).all()
        return list(self.sound(rows, miss_from, lambda r: f"miss of workload {str(r.workload)[:12]}"))

    def clear_miss(self, workload: str, device: str) -> bool:
        """Forget a miss (fingerprints); False when there was none. Storing a schedule does so by itself."""
        with self.writing() as c:
            gone = sa.delete(MissRow).where(MissRow.workload == workload, MissRow.device == device)
            return self.changed(c, gone)

    def captured(self, signature: str, newest: int = 50) -> list[tuple[Workload, int]] | None:
        """What a run among the ``newest`` noted under ``summary["capture"]``, or in the list ``summary["captures"]``
        of a run of several targets, for this signature.

        Returns:
            Workloads and how often each occurs; None where no run did, or a workload is not stored.
        """
        for run in self.runs(limit=newest):
            several = run.summary.get("captures")
            every = [run.summary.get("capture"), *(several if isinstance(several, list) else [])]
            noted = next((n for n in every if isinstance(n, dict) and n.get("signature") == signature), None)
            if noted is None:
                continue
            try:
                found = [(self.get_workload(str(fingerprint)), int(count)) for fingerprint, count in noted["workloads"]]
            except (KeyError, TypeError, ValueError):
                return None
            known = [(workload, count) for workload, count in found if workload is not None]
            return known if len(known) == len(found) else None
        return None


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
    return Miss(str(row.workload), str(row.device), whole(row.times, "count"), reason, moment(row.created))
