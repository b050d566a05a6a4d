"""Workloads, devices and environments, which the other tables reference by fingerprint."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from autotune.device import DeviceIdentity, Environment
from autotune.errors import printable
from autotune.store.codec import (
    device_from,
    device_values,
    environment_from,
    environment_values,
    workload_from,
    workload_values,
)
from autotune.store.connection.engine import Database
from autotune.store.models import DeviceRow, EnvironmentRow, ScheduleRow, WorkloadRow
from autotune.store.tables.measurements import WORKLOAD_COLUMNS
from autotune.store.tables.schedules import TOUCH
from autotune.workload import Workload

T = TypeVar("T")


class Workloads(Database):
    """The store's dictionary of fingerprints."""

    def put_workload(self, workload: Workload) -> str:
        """Store a workload, or the newer label and source of a known one; returns its fingerprint.

        A workload from an earlier version without a family gets one, and so do its schedules.
        """
        with self.writing() as c:
            self._put_workload(c, workload)
            self._give_family(c, workload)
        return workload.fingerprint

    def _put_workload(self, c: sa.Connection, workload: Workload) -> None:
        values = workload_values(workload, time.time())
        insert = self.insert(WorkloadRow).values(**values)
        news = {name: values[name] for name in ("label", "source") if values[name]}
        if news:
            c.execute(insert.on_conflict_do_update(index_elements=["fingerprint"], set_=news))
        else:
            c.execute(insert.on_conflict_do_nothing())

    def _give_family(self, c: sa.Connection, workload: Workload) -> None:
        """Separate from ``_put_workload``, since a deployment that records a miss may not write schedules."""
        if not workload.family:
            return
        found = {"family": workload.family, "extent": workload.extent}
        known = (WorkloadRow.fingerprint == workload.fingerprint, WorkloadRow.family == "")
        c.execute(sa.update(WorkloadRow).where(*known).values(found))
        decided = (ScheduleRow.workload == workload.fingerprint, ScheduleRow.family == "")
        c.execute(sa.update(ScheduleRow).where(*decided).values(**found, created=ScheduleRow.created + TOUCH))

    def get_workloads(self, fingerprints: Iterable[str]) -> dict[str, Workload]:
        rows = self._each(sa.select(*WORKLOAD_COLUMNS), WorkloadRow.fingerprint, fingerprints)
        return {w.fingerprint: w for w in self.sound(rows, workload_from, _workload)}

    def fingerprints(self, prefix: str, limit: int) -> list[str]:
        column = WorkloadRow.fingerprint
        query = sa.select(column).where(column >= prefix, column < f"{prefix}g").order_by(column).limit(limit)
        with self.reading() as c:
            return [str(name) for name in c.scalars(query)]

    def names(self, fingerprints: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Label and kind of workloads, by fingerprint."""
        columns = (WorkloadRow.fingerprint, WorkloadRow.label, WorkloadRow.kind)
        rows = self._each(sa.select(*columns), WorkloadRow.fingerprint, fingerprints)
        return {r.fingerprint: (printable(str(r.label)), str(r.kind)) for r in rows}

    def _each(self, query: Any, column: Any, values: Iterable[str]) -> Iterator[Any]:
        """The rows of ``query`` where ``column`` is one of ``values``, in several queries."""
        names = {value for value in values if isinstance(value, str)}  # a damaged row may have any value
        for part in batches(sorted(names), 500):
            with self.reading() as c:
                rows = c.execute(query.where(column.in_(part))).all()
            yield from rows

    def find_workloads(self, text: str = "") -> list[Workload]:
        """Workloads whose fingerprint begins with ``text`` or whose label contains it, oldest first; "" for all."""
        match = WorkloadRow.fingerprint.startswith(text.lower(), autoescape=True) | WorkloadRow.label.icontains(
            text, autoescape=True
        )
        query = sa.select(*WORKLOAD_COLUMNS).where(match)
        return self.made(query.order_by(WorkloadRow.created, WorkloadRow.fingerprint), workload_from, _workload)

    def put_device(self, device: DeviceIdentity) -> str:
        """Store a device's identity; returns its fingerprint."""
        insert = self.insert(DeviceRow).values(**device_values(device, time.time()))
        with self.writing() as c:
            c.execute(insert.on_conflict_do_nothing())
        return device.fingerprint

    def get_devices(self, fingerprints: Iterable[str]) -> dict[str, DeviceIdentity]:
        rows = self._each(sa.select(DeviceRow.fingerprint, DeviceRow.identity), DeviceRow.fingerprint, fingerprints)
        made = self.sound(rows, lambda r: device_from(r.fingerprint, r.identity), functools.partial(_named, "device"))
        return {d.fingerprint: d for d in made}

    def put_environment(self, environment: Environment) -> str:
        """Store an environment; returns its (strict) fingerprint."""
        insert = self.insert(EnvironmentRow).values(**environment_values(environment, time.time()))
        with self.writing() as c:
            c.execute(insert.on_conflict_do_nothing())
        return environment.strict

    def get_environments(self, fingerprints: Iterable[str]) -> dict[str, Environment]:
        columns = (EnvironmentRow.fingerprint, EnvironmentRow.versions)
        rows = self._each(sa.select(*columns), EnvironmentRow.fingerprint, fingerprints)
        named = functools.partial(_named, "environment")
        return {e.strict: e for e in self.sound(rows, lambda r: environment_from(r.fingerprint, r.versions), named)}


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """``items`` in chunks of ``size``, since a statement has a maximum number of parameters."""
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _workload(row: Any) -> str:
    return f"workload {str(row.w_fingerprint)[:12]}"


def _named(kind: str, row: Any) -> str:
    return f"{kind} {str(row.fingerprint)[:12]}"
