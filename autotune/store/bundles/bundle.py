"""Taking schedules from one database to another, as one file.

A bundle is a zip archive: ``manifest.json`` (form, version, and the SHA-256 of every other member), ``schedules.jsonl``
with what they refer to in ``workloads.jsonl``, ``devices.jsonl``, ``environments.jsonl`` and ``artifacts.jsonl``,
``verdicts.jsonl`` on the steps of which every schedule is there, and code as ``code/<sha256>``. JSON and bytes only:
reading one runs nothing. The same schedules give the same bytes.

Checksums guard against damage, not against malice: a schedule's code runs when it is deployed, so import only what
comes from someone you would take a program from.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from autotune.errors import UserError
from autotune.outputs import check_output, whole_file
from autotune.store.bundles.archive import FORM, VERSION, is_bundle
from autotune.store.bundles.rows import (
    TABLES,
    VERDICT_KEY,
    Tables,
    schedule_from,
    schedule_row,
    verdict_from,
    verdict_row,
)
from autotune.store.codec import artifact_blobs, artifact_id, artifact_json, key_values
from autotune.store.health.damage import BROKEN, Damaged, why
from autotune.store.models import (
    ArtifactRow,
    Base,
    BlobRow,
    ConfigRow,
    DeviceRow,
    EnvironmentRow,
    MissRow,
    ScheduleRow,
    VerdictRow,
    WorkloadRow,
)
from autotune.store.records import Schedule
from autotune.store.store import Store
from autotune.store.tables.schedules import better
from autotune.store.tables.workloads import batches
from autotune.workload import canonical_json

_BATCH = 1000


def export_bundle(store: Store, file: str | os.PathLike[str], schedules: Iterable[Schedule] | None = None) -> int:
    """Write ``schedules`` (None: all in the store) and everything they need to ``file``; returns how many there are.

    Damaged schedules, and those whose workload, device or environment is, are left out; ``store.problems`` says which.
    The file appears whole or not at all.

    Raises:
        UserError: there is nothing to export, or the file cannot be written: it is there and no bundle, say.
    """
    path = Path(file)
    check_output(path, f"cannot write the bundle {path}")
    if path.exists() and not is_bundle(path):
        raise UserError(f"{path} is there and is no bundle of autotune's: name a new file, or remove it first")
    chosen = list(store.schedules(artifacts=True) if schedules is None else schedules)
    if not chosen:
        raise UserError(f"the database {store.name} has no schedules to export: run a search first")
    members, count = _members(store, chosen)
    if not count:
        raise UserError(f"the database {store.name} has no sound schedule: `autotune db verify` tells why")
    manifest = {
        "form": FORM,
        "version": VERSION,
        "members": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(members.items())},
    }
    try:
        with whole_file(path) as out, zipfile.ZipFile(out, "w") as archive:
            _add(archive, "manifest.json", canonical_json(manifest).encode())
            for name in sorted(members):
                _add(archive, name, members[name])
    except OSError as e:
        raise UserError(f"cannot write the bundle {path}: {e.strerror}") from None
    return count


class Code(Protocol):
    """Whatever has the code of rows."""

    def code(self, sha256: str) -> bytes: ...


def write_tables(store: Store, tables: Tables, bundle: Code) -> int:
    """Insert checked rows in one transaction; returns how many schedules are new, or take the place of one there."""
    with store.writing() as c:

        def put(model: type[Base], rows: Iterable[dict[str, Any]], key: str = "", **where: Any) -> int:
            insert: Any = store.insert(model)
            if key:  # storing anew mends what was damaged on disk
                keys = key.split()
                news = {n.name: insert.excluded[n.name] for n in model.__table__.c if n.name not in keys}
                insert = insert.on_conflict_do_update(index_elements=keys, set_=news, **where)
            else:
                insert = insert.on_conflict_do_nothing()
            changed = 0
            for part in batches(list(rows), _BATCH):
                done = c.execute(insert, list(part), execution_options={"preserve_rowcount": True})
                changed += max(done.rowcount, 0)
            return changed

        put(WorkloadRow, tables.workloads)  # a label given here is not replaced by the sender's
        put(DeviceRow, tables.devices)
        put(EnvironmentRow, tables.environments)
        put(ConfigRow, tables.configs)
        for names in batches(sorted(tables.code), 32):
            put(BlobRow, [{"sha256": sha256, "code": bundle.code(sha256)} for sha256 in names], "sha256")
        put(ArtifactRow, tables.artifacts, "fingerprint")
        rule = better(store.insert(ScheduleRow).excluded)
        stored = put(ScheduleRow, tables.schedules, "workload device environment policy", where=rule)
        newer = store.insert(VerdictRow).excluded.created > VerdictRow.created
        put(VerdictRow, tables.verdicts, " ".join(VERDICT_KEY), where=newer)
        misses = sa.delete(MissRow).where(
            MissRow.workload == sa.bindparam("the_workload"), MissRow.device == sa.bindparam("the_device")
        )
        pairs = sorted({(s["workload"], s["device"]) for s in tables.schedules})
        for part in batches([{"the_workload": w, "the_device": d} for w, d in pairs], _BATCH):
            c.execute(misses, list(part))
        return stored


def _members(store: Store, schedules: Iterable[Schedule]) -> tuple[dict[str, bytes], int]:
    """The members of a bundle by name, and how many schedules they hold."""
    chosen = list(schedules)
    workloads = store.get_workloads(s.key.workload for s in chosen)
    devices = store.get_devices(s.key.device for s in chosen)
    environments = store.get_environments(s.key.environment for s in chosen)
    rows: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in TABLES}
    code: dict[str, bytes] = {}
    for s in chosen:
        key = s.key
        try:
            for found, name, what in (
                (workloads, key.workload, "workload"),
                (devices, key.device, "device"),
                (environments, key.environment, "environment"),
            ):
                if name not in found:
                    raise Damaged(f"its {what} {name[:12]} is missing or damaged")
            artifact = None if s.artifact is None else artifact_json(s.artifact)
            row = schedule_row(s, None if artifact is None else artifact_id(artifact))
            schedule_from(row)
        except BROKEN as e:
            store.problem(f"schedule of workload {key.workload[:12]} left out: {why(e)}")
            continue
        rows["workloads"][key.workload] = workloads[key.workload].to_json()
        rows["devices"][key.device] = devices[key.device].to_json()
        rows["environments"][key.environment] = environments[key.environment].to_json()
        if artifact is not None and s.artifact is not None:
            rows["artifacts"][row["artifact"]] = artifact
            code.update({f"code/{sha256}": blob for sha256, blob in artifact_blobs(s.artifact).items()})
        rows["schedules"]["/".join(key_values(key).values())] = row
    tables = {
        f"{name}.jsonl": "".join(canonical_json(dict(table[k])) + "\n" for k in sorted(table)).encode()
        for name, table in rows.items()
    }
    if verdicts := _verdicts(store, rows):
        tables["verdicts.jsonl"] = verdicts
    return {**tables, **code}, len(rows["schedules"])


def _verdicts(store: Store, rows: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The verdicts on steps of which every schedule is among ``rows``, a line each."""
    found = []
    for v in store.verdicts():
        row = verdict_row(v)
        try:
            verdict_from(row)
            needed = {*v.left, *(str(family["workload"]) for family in v.record.get("families", ()))}
        except BROKEN as e:
            store.problem(f"verdict on graph {v.graph[:12]} left out: {why(e)}")
            continue
        known = v.device in rows["devices"] and v.environment in rows["environments"]
        if known and needed <= rows["workloads"].keys():
            found.append(canonical_json(row) + "\n")
    return "".join(sorted(found)).encode()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))  # no clock: equal contents, equal bytes
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)
