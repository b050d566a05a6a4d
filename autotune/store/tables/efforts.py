"""How far workloads have been searched, and what is known of devices: what a search asks before it begins."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.store.codec import key_from, key_values
from autotune.store.connection.engine import Database
from autotune.store.health.damage import mapping, moment, number
from autotune.store.models import CalibrationRow, EffortRow
from autotune.store.records import Calibration, Effort, Key

_KEY = ["workload", "device", "environment", "policy", "scope"]


class Efforts(Database):
    """The store's efforts and calibrations."""

    def add_effort(self, effort: Effort) -> None:
        """Note a search: its seconds are added to what is stored, the larger grant stays, all else is replaced.

        Raises:
            ValueError: its workload, device or environment was not put before.
        """
        values = {**key_values(effort.key), "scope": effort.scope}
        news = {"settled": effort.settled, "stop": effort.stop, "created": effort.when or time.time()}
        insert = self.insert(EffortRow).values(**values, **news, seconds=effort.seconds, granted=effort.granted)
        new = insert.excluded
        sums = {
            "seconds": EffortRow.seconds + new.seconds,
            "granted": sa.case((EffortRow.granted > new.granted, EffortRow.granted), else_=new.granted),
        }
        try:
            with self.writing() as c:
                c.execute(insert.on_conflict_do_update(index_elements=_KEY, set_={**news, **sums}))
        except IntegrityError as e:
            raise ValueError(f"put the workload, device and environment of {effort.key} before its effort") from e

    def get_effort(self, key: Key, scope: str) -> Effort | None:
        """How far a workload was searched within a scope; None if it never was."""
        where = [getattr(EffortRow, name) == value for name, value in key_values(key).items()]
        with self.reading() as c:
            rows = c.execute(sa.select(EffortRow.__table__).where(*where, EffortRow.scope == scope)).all()
        return next(self.sound(rows, effort_from, lambda r: f"effort on workload {key.workload[:12]}"), None)

    def put_calibration(self, calibration: Calibration) -> None:
        """Store what a calibration found; it replaces an earlier one of the device.

        Raises:
            ValueError: the device was not put before.
        """
        news = {"figures": dict(calibration.figures), "created": calibration.when or time.time()}
        insert = self.insert(CalibrationRow).values(device=calibration.device, kind=calibration.kind, **news)
        try:
            with self.writing() as c:
                c.execute(insert.on_conflict_do_update(index_elements=["device", "kind"], set_=news))
        except IntegrityError as e:
            raise ValueError(f"put the device {calibration.device[:12]} before its calibration") from e

    def get_calibration(self, device: str, kind: str) -> Calibration | None:
        """The calibration of a device (fingerprint) for a domain, or None."""
        where = (CalibrationRow.device == device, CalibrationRow.kind == kind)
        with self.reading() as c:
            rows = c.execute(sa.select(CalibrationRow.__table__).where(*where)).all()
        return next(self.sound(rows, calibration_from, lambda r: f"calibration of device {device[:12]}"), None)


def effort_from(row: Any) -> Effort:
    """An effort from its row; raises Damaged."""
    seconds, granted = number(row.seconds, "seconds"), number(row.granted, "granted seconds")
    return Effort(
        key_from(row), str(row.scope), seconds, granted, bool(row.settled), str(row.stop), moment(row.created)
    )


def calibration_from(row: Any) -> Calibration:
    """A calibration from its row; raises Damaged."""
    figures = {str(name): number(value, str(name)) for name, value in mapping(row.figures, "figures").items()}
    return Calibration(str(row.device), str(row.kind), figures, moment(row.created))
