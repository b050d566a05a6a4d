"""Adding a snapshot, or a bundle, to a database: all of it or nothing, and the better of two schedules stays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from autotune.errors import UserError, printable
from autotune.store.bundles.archive import Bundle
from autotune.store.bundles.bundle import Code, write_tables
from autotune.store.bundles.rows import SCHEDULE_KEY, Tables, schedule_row, verdict_row
from autotune.store.codec import artifact_blobs, artifact_id, artifact_json
from autotune.store.health.damage import BROKEN, why
from autotune.store.models import MeasurementRow, ScheduleRow
from autotune.store.records import Calibration
from autotune.store.snapshots.form import is_database, is_snapshot
from autotune.store.snapshots.packaged import path_of
from autotune.store.snapshots.reader import Snapshot
from autotune.store.store import Store
from autotune.store.tables.schedules import contest
from autotune.store.tables.workloads import batches


@dataclass(frozen=True)
class Imported:
    """What an import came to.

    Attributes:
        schedules: in the file.
        stored: of them, those that are new in the database, or take the place of one there.
        conflicts: where file and database have different schedules for one key, a line each: which stays.
    """

    schedules: int
    stored: int
    conflicts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


@dataclass(frozen=True)
class Incoming:
    """A snapshot or a bundle of which everything was checked."""

    path: Path
    tables: Tables
    code: Code
    calibrations: Sequence[Calibration] = ()

    def into(self, store: Store) -> Imported:
        """Add the schedules to ``store``, in one transaction.

        Where both have a schedule for one key, the faster stays, unless it failed when it was deployed. The other's
        latency is kept as a measurement of its configuration. Importing twice changes nothing.

        Raises:
            UserError: the database does not take them. Nothing is changed then.
        """
        lost, conflicts = _conflicts(store, self.tables)
        try:
            stored = store.outlast(lambda: write_tables(store, self.tables, self.code))
        except (sa.exc.DataError, sa.exc.IntegrityError, OverflowError, UnicodeError) as e:
            first = " ".join(str(getattr(e, "orig", None) or e).split())
            where = f"the database {store.name}"
            raise UserError(f"{self.path} does not fit into {where} ({first}): nothing was changed") from e
        with store.writing() as c:
            for values in lost:
                c.execute(store.insert(MeasurementRow).values(**values).on_conflict_do_nothing())
        for calibration in self.calibrations:
            known = store.get_calibration(calibration.device, calibration.kind)
            if known is None or known.when < calibration.when:
                store.put_calibration(calibration)
        return Imported(len(self.tables.schedules), stored, tuple(conflicts))


@contextmanager
def checked(file: str | os.PathLike[str], *, key: str | None = None) -> Iterator[Incoming]:
    """A snapshot or a bundle, read and checked as a whole before any database is opened for it.

    Args:
        key: a public key that a snapshot must be signed with.

    Raises:
        UserError: the file cannot be read, is neither, is of a later form, is damaged anywhere, or is not signed so.
    """
    path = Path(path_of(file))
    if is_snapshot(path):
        snapshot = Snapshot(path, key=key)
        try:
            snapshot.check()
            tables, code = _tables(snapshot)
            calibrations = snapshot.calibrations()
        finally:
            snapshot.close()
        yield Incoming(path, tables, code, calibrations)
        return
    if is_database(path):
        raise UserError(f"{path} is a database, neither a snapshot nor a bundle: autotune db merge takes it")
    if key is not None:
        raise UserError(f"{path} is no snapshot, which alone can be signed, and a key is pinned: not imported")
    with Bundle(path) as bundle:
        yield Incoming(path, bundle.tables(), bundle)


class _Code:
    """Code by SHA-256, as a bundle gives it."""

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self._blobs = blobs

    def code(self, sha256: str) -> bytes:
        return self._blobs[sha256]


def _tables(snapshot: Snapshot) -> tuple[Tables, _Code]:
    """A snapshot's rows, each checked as a bundle's."""
    tables, blobs = Tables(), dict[str, bytes]()
    try:
        schedules = list(snapshot.schedules(artifacts=True))
        verdicts = snapshot.verdicts()
        names = {s.key.workload for s in schedules}
        workloads = snapshot.get_workloads(names)
        if snapshot.lost or len(workloads) < len(names):
            raise UserError(snapshot.lost or f"the snapshot {snapshot.name} lacks a workload: export it again")
        artifacts: dict[str, Any] = {}
        rows = []
        for s in schedules:
            name = None
            if s.artifact is not None:
                data = artifact_json(s.artifact)
                name = artifact_id(data)
                artifacts[name] = data
                blobs.update(artifact_blobs(s.artifact))
            rows.append(schedule_row(s, name))
        parts = (
            ("workloads", [w.to_json() for w in workloads.values()]),
            ("devices", [d.to_json() for d in snapshot.devices]),
            ("environments", [e.to_json() for e in snapshot.environments]),
            ("artifacts", list(artifacts.values())),
            ("schedules", rows),
            ("verdicts", [verdict_row(v) for v in verdicts]),
        )
        for table, listed in parts:
            for row in listed:
                tables.add(table, row, blobs)
    except BROKEN as e:
        raise UserError(f"the snapshot {snapshot.name} is damaged ({why(e)}): export it again") from None
    return tables, _Code(blobs)


def _differing(c: sa.Connection, tables: Tables) -> list[dict[str, Any]]:
    """The schedules of whose keys the database has another one, found by a statement for hundreds of them."""
    own = [getattr(ScheduleRow, name) for name in (*SCHEDULE_KEY, "config", "winner")]
    known: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for part in batches(sorted({row["workload"] for row in tables.schedules}), 500):
        for row in c.execute(sa.select(*own).where(ScheduleRow.workload.in_(part))):
            known[tuple(row[:4])] = tuple(row[4:])
    keys = [(row, tuple(row[name] for name in SCHEDULE_KEY)) for row in tables.schedules]
    return [row for row, key in keys if key in known and known[key] != (row["config"], row["winner"])]


def _conflicts(store: Store, tables: Tables) -> tuple[list[dict[str, Any]], list[str]]:
    """What loses against another schedule of its key, as rows of measurements; and a line for each such pair."""
    labels = {w["fingerprint"]: w["label"] for w in tables.workloads}
    lost, lines = [], []
    with store.reading() as c:
        for row in _differing(c, tables):
            met = contest(c, row)
            if met is None:
                continue
            if values := met.measurement("imported"):
                lost.append(values)
            name = row["workload"]
            stays = "the file's takes its place" if met.gives_way else "the database's stays"
            lines.append(
                f"conflict: {printable(labels.get(name) or name[:12])} ({name[:12]}):"
                f" {met.here['latency_us']:.4g} us in the database, {row['latency_us']:.4g} us in the file: {stays}"
            )
    return lost, lines
