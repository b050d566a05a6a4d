"""Forgetting failures, so that their candidates are tried again: what failed may have been the machine."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from autotune.errors import UserError
from autotune.store.models import EffortRow, MeasurementRow, ScheduleRow
from autotune.store.records import Key
from autotune.store.store import Store
from autotune.store.tables.schedules import DEPLOYED, TOUCH
from autotune.task import Status

FAILURES = (Status.COMPILE_ERROR, Status.LAUNCH_ERROR, Status.WRONG_RESULT, Status.TIMEOUT, Status.CRASHED)
"""What can be forgotten: an ok measurement is no failure, and an invalid candidate is one on every machine."""

_M = MeasurementRow
_LATER = ScheduleRow.created + TOUCH


def forget_failures(
    store: Store, statuses: Collection[Status] = FAILURES, *, workload: str = "", reason: str = ""
) -> dict[Key, int]:
    """Delete the measurements of these statuses, and how far workloads were searched on their devices.

    The latter since a workload that has nothing left to do would not be begun again, nor would one that has the failed
    candidate's workload for a part. Schedules, and whatever was measured, stay.

    Args:
        workload: fingerprint, or the beginning of one, or a part of a label; empty for all.
        reason: a part of the reason that was stored; empty for any.

    Returns:
        How many measurements were forgotten under each key.

    Raises:
        UserError: there is no such workload; a status is no failure.
    """
    if wrong := [str(status) for status in statuses if status not in FAILURES]:
        raise UserError(f"{wrong[0]!r} is no failure: there is {', '.join(FAILURES)}")
    where: list[sa.ColumnElement[bool]] = [_M.status.in_([str(status) for status in statuses])]
    if workload:
        found = [w.fingerprint for w in store.find_workloads(workload)]
        if not found:
            raise UserError(f"no workload of {store.name} is called {workload!r} (`autotune show` lists them)")
        where.append(_M.workload.in_(found))
    if reason:
        where.append(_M.reason.contains(reason, autoescape=True))
    columns = (_M.workload, _M.device, _M.environment, _M.policy)
    with store.writing() as c:
        counts = c.execute(sa.select(*columns, sa.func.count()).where(*where).group_by(*columns)).all()
        failed = sa.select(_M.workload).where(*where, _M.stage == DEPLOYED)  # their schedules are deployed again
        c.execute(sa.update(ScheduleRow).where(ScheduleRow.workload.in_(failed)).values(created=_LATER))
        c.execute(sa.delete(_M).where(*where))
        devices = {row[1] for row in counts}
        c.execute(sa.delete(EffortRow).where(EffortRow.device.in_(devices)))
    return {Key(*row[:4]): int(row[4]) for row in counts}
