"""Workloads, devices and environments: what the fingerprints in every other table stand for."""

from __future__ import annotations

import time

import sqlalchemy as sa

from autotune.device import DeviceIdentity, Environment
from autotune.store.engine import Database
from autotune.store.measurements import WORKLOAD_COLUMNS, workload_from
from autotune.store.models import DeviceRow, EnvironmentRow, WorkloadRow
from autotune.workload import Workload


class Workloads(Database):
    """The store's dictionary of fingerprints."""

    def put_workload(self, workload: Workload) -> str:
        """Store a workload, or the newer label and source of a known one; returns its fingerprint."""
        with self.writing() as c:
            self._put_workload(c, workload)
        return workload.fingerprint

    def _put_workload(self, c: sa.Connection, workload: Workload) -> None:
        values = workload.to_json()
        insert = self.insert(WorkloadRow).values(fingerprint=workload.fingerprint, created=time.time(), **values)
        news = {name: values[name] for name in ("label", "source") if values[name]}
        if news:
            c.execute(insert.on_conflict_do_update(index_elements=["fingerprint"], set_=news))
        else:
            c.execute(insert.on_conflict_do_nothing())

    def get_workload(self, fingerprint: str) -> Workload | None:
        """The workload with this (whole) fingerprint, or None."""
        found = self._workloads(WorkloadRow.fingerprint == fingerprint)
        return found[0] if found else None

    def find_workloads(self, text: str = "", *, kind: str | None = None) -> list[Workload]:
        """Workloads whose fingerprint begins with ``text`` or whose label contains it, oldest first; "" finds all."""
        match = WorkloadRow.fingerprint.startswith(text.lower(), autoescape=True) | WorkloadRow.label.icontains(
            text, autoescape=True
        )
        return self._workloads(match, *([WorkloadRow.kind == kind] if kind is not None else []))

    def family(self, family: str) -> list[Workload]:
        """Every workload of a family, oldest first; none for the empty family."""
        return self._workloads(WorkloadRow.family == family) if family else []

    def _workloads(self, *where: sa.ColumnElement[bool]) -> list[Workload]:
        order = (WorkloadRow.created, WorkloadRow.fingerprint)
        with self.reading() as c:
            rows = c.execute(sa.select(*WORKLOAD_COLUMNS).where(*where).order_by(*order)).all()
        return [workload_from(r) for r in rows]

    def put_device(self, device: DeviceIdentity) -> str:
        """Store a device's identity; returns its fingerprint."""
        row = {"kind": device.kind, "name": device.name, "identity": device.to_json(), "created": time.time()}
        with self.writing() as c:
            c.execute(self.insert(DeviceRow).values(fingerprint=device.fingerprint, **row).on_conflict_do_nothing())
        return device.fingerprint

    def get_device(self, fingerprint: str) -> DeviceIdentity | None:
        """The device with this fingerprint, or None."""
        with self.reading() as c:
            data = c.scalar(sa.select(DeviceRow.identity).where(DeviceRow.fingerprint == fingerprint))
        return DeviceIdentity.from_json(data) if data else None

    def put_environment(self, environment: Environment) -> str:
        """Store an environment; returns its (strict) fingerprint."""
        row = {"loose": environment.loose, "versions": environment.to_json(), "created": time.time()}
        insert = self.insert(EnvironmentRow).values(fingerprint=environment.strict, **row)
        with self.writing() as c:
            c.execute(insert.on_conflict_do_nothing())
        return environment.strict

    def get_environment(self, fingerprint: str) -> Environment | None:
        """The environment with this strict fingerprint, or None."""
        with self.reading() as c:
            data = c.scalar(sa.select(EnvironmentRow.versions).where(EnvironmentRow.fingerprint == fingerprint))
        return Environment.from_json(data) if data else None
