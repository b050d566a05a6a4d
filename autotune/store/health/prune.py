"""Removing what no search and no deployment asks for any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from autotune.store.models import (
    ArtifactRow,
    BlobRow,
    ConfigRow,
    MeasurementRow,
    MissRow,
    RunRow,
    ScheduleRow,
)
from autotune.store.store import Store
from autotune.task import Status

_M, _S = MeasurementRow, ScheduleRow
_LOCKED = "autotune_configs, autotune_measurements, autotune_schedules, autotune_artifacts, autotune_blobs"


@dataclass(frozen=True)
class Limits:
    """What is to go. Times are in seconds since the epoch; None keeps all of a kind.

    Attributes:
        runs: runs that have ended and of which the same command was run again later.
        failures: measurements of failures from before then.
        candidates: measurements from before then under the key of a schedule, except its own configuration's.
        misses: misses that came up last before then.
    """

    runs: bool = False
    failures: float | None = None
    candidates: float | None = None
    misses: float | None = None


def prune(store: Store, limits: Limits, *, dry: bool) -> dict[str, int]:
    """Remove what ``limits`` say, all in one transaction, and then what nothing refers to any more.

    Schedules, verdicts, efforts and calibrations stay, and so do artifacts and configurations that something refers to.

    Args:
        dry: remove nothing; the counts are those that would go, without what nothing refers to then.

    Returns:
        Rows by kind: "runs", "failures", "candidates", "misses", "configurations", "artifacts", "kernels".

    Raises:
        UserError: the database failed.
    """
    chosen = _chosen(limits)

    def counted() -> dict[str, int]:
        with store.reading() as c:
            return {
                name: int(c.scalar(sa.select(sa.func.count()).select_from(model).where(*where)) or 0)
                for name, model, where in chosen
            }

    def removed() -> dict[str, int]:
        with store.writing() as c:
            if c.dialect.name == "postgresql":
                # A search writes a configuration, and then what refers to it: none may go in between.
                c.execute(sa.text(f"LOCK TABLE {_LOCKED} IN SHARE ROW EXCLUSIVE MODE"))
            found = {name: c.execute(sa.delete(model).where(*where)).rowcount for name, model, where in chosen}
            for name, model, where in _unused():
                found[name] = c.execute(sa.delete(model).where(*where)).rowcount
            listed = _listed(c)
            names = [n for n in c.scalars(sa.select(BlobRow.sha256)) if n not in listed]
            for at in range(0, len(names), 500):
                c.execute(sa.delete(BlobRow).where(BlobRow.sha256.in_(names[at : at + 500])))
            return {**found, "kernels": len(names)}

    action: Callable[[], dict[str, int]] = counted if dry else removed
    return store.outlast(action)


def _chosen(limits: Limits) -> list[tuple[str, Any, list[Any]]]:
    found: list[tuple[str, Any, list[Any]]] = []
    if limits.runs:
        later = aliased(RunRow)
        again = sa.exists().where(later.command == RunRow.command, later.started > RunRow.started)
        found.append(("runs", RunRow, [RunRow.state != "running", again]))
    if limits.failures is not None:
        found.append(("failures", _M, [_M.status != str(Status.OK), _M.created < limits.failures]))
    if limits.candidates is not None:
        key = [getattr(_S, n) == getattr(_M, n) for n in ("workload", "device", "environment", "policy")]
        decided = sa.exists().where(*key)
        own = sa.exists().where(*key, _S.config == _M.config)
        found.append(("candidates", _M, [_M.created < limits.candidates, decided, ~own]))
    if limits.misses is not None:
        found.append(("misses", MissRow, [MissRow.created < limits.misses]))
    return found


def _unused() -> list[tuple[str, Any, list[Any]]]:
    measured = sa.exists().where(_M.config == ConfigRow.fingerprint)
    deployed = sa.exists().where(_S.config == ConfigRow.fingerprint)
    launched = sa.exists().where(_S.artifact == ArtifactRow.fingerprint)
    return [("configurations", ConfigRow, [~measured, ~deployed]), ("artifacts", ArtifactRow, [~launched])]


def _listed(c: sa.Connection) -> set[str]:
    """SHA-256 of the code that artifacts name; of a damaged one whatever can be read."""
    found = set()
    for kernels in c.scalars(sa.select(ArtifactRow.kernels)):
        for kernel in kernels if isinstance(kernels, list) else ():
            if isinstance(kernel, dict):
                found.add(str(kernel.get("sha256")))
    return found
