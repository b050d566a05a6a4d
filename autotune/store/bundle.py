"""Taking schedules from one database to another, as one file.

A bundle is a zip archive: ``manifest.json`` (form, version, and the SHA-256 of every other member), ``schedules.jsonl``
with what they refer to in ``workloads.jsonl``, ``devices.jsonl``, ``environments.jsonl`` and ``artifacts.jsonl``, and
code as ``code/<sha256>``. JSON and bytes only: reading one runs nothing. The same schedules give the same bytes.

Checksums guard against damage, not against malice: a schedule's code runs when it is deployed, so import only what
comes from someone you would take a program from.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.device import DeviceIdentity, Environment
from autotune.errors import UserError
from autotune.store.codec import Damaged, artifact_blobs, artifact_from, artifact_id, artifact_json, config_from
from autotune.store.records import Key, Schedule
from autotune.store.store import Store
from autotune.workload import Workload, canonical_json

_FORM, _VERSION = "autotune-bundle", 1
_LARGEST = 4 << 30  # bytes, unpacked: more is no bundle but an accident or an attack
_NOT_OURS = (
    zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, AttributeError, EOFError, NotImplementedError,
    RuntimeError,
)  # fmt: skip
"""What zipfile and json raise for files that are something else, cut short or encrypted."""
_TABLES = ("workloads", "devices", "environments", "artifacts", "schedules")


def export_bundle(store: Store, file: str | os.PathLike[str], schedules: Iterable[Schedule] | None = None) -> int:
    """Write ``schedules`` (None: all in the store) and everything they need to ``file``; returns how many there are.

    Damaged schedules are left out; ``store.problems`` says which. The file appears whole or not at all.

    Raises:
        UserError: there is nothing to export, or the file cannot be written.
    """
    chosen = list(store.schedules(artifacts=True) if schedules is None else schedules)
    if not chosen:
        raise UserError(f"the database {store.name} has no schedules to export: run a search first")
    members = _members(store, chosen)
    manifest = {
        "form": _FORM,
        "version": _VERSION,
        "members": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(members.items())},
    }
    path = Path(file)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=path.name + ".")
        try:
            with os.fdopen(handle, "wb") as out, zipfile.ZipFile(out, "w") as archive:
                _add(archive, "manifest.json", canonical_json(manifest).encode())
                for name in sorted(members):
                    _add(archive, name, members[name])
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as e:
        raise UserError(f"cannot write the bundle {path}: {e.strerror}") from None
    return len(chosen)


def import_bundle(store: Store, file: str | os.PathLike[str]) -> dict[str, int]:
    """Add a bundle's schedules to ``store``. The whole bundle is checked before the first row is written.

    A schedule meets a stored one of its key by the rule of :meth:`Store.put_schedule`; importing twice changes nothing.

    Returns:
        ``schedules`` in the bundle, and how many of them were ``stored`` (new, or faster than what was there).

    Raises:
        UserError: the file cannot be read, is no bundle, is of a later form, or fails a checksum.
    """
    path = Path(file)
    members = _read(path)
    try:
        tables = {name: _rows(members[f"{name}.jsonl"]) for name in _TABLES}
        blobs = {n.removeprefix("code/"): data for n, data in members.items() if n.startswith("code/")}
        workloads = [Workload.from_json(r) for r in tables["workloads"]]
        devices = [DeviceIdentity.from_json(r) for r in tables["devices"]]
        environments = [Environment.from_json(r) for r in tables["environments"]]
        artifacts = {artifact_id(r): artifact_from(artifact_id(r), r, blobs) for r in tables["artifacts"]}
        schedules = [_schedule(r, artifacts) for r in tables["schedules"]]
        known = {w.fingerprint for w in workloads}, {d.fingerprint for d in devices}, {e.strict for e in environments}
        for s in schedules:
            if not (s.key.workload in known[0] and s.key.device in known[1] and s.key.environment in known[2]):
                raise Damaged(f"the schedule of {s.key.workload[:12]} refers to what the bundle does not hold")
    except (KeyError, TypeError, ValueError, AttributeError, Damaged) as e:
        what = f"{type(e).__name__}: {e}" if not isinstance(e, Damaged) else str(e)
        raise UserError(f"{path} is a damaged bundle ({what}): export it again") from e
    for w in workloads:
        if store.get_workload(w.fingerprint) is None:  # a label given here is not replaced by the sender's
            store.put_workload(w)
    for d in devices:
        store.put_device(d)
    for environment in environments:
        store.put_environment(environment)
    return {"schedules": len(schedules), "stored": sum(store.put_schedule(s) for s in schedules)}


def _members(store: Store, schedules: Iterable[Schedule]) -> dict[str, bytes]:
    rows: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in _TABLES}
    code: dict[str, bytes] = {}
    for s in schedules:
        workload, device = store.get_workload(s.key.workload), store.get_device(s.key.device)
        environment = store.get_environment(s.key.environment)
        if workload is None or device is None or environment is None:
            raise ValueError(f"{s.key} is not in the database")
        rows["workloads"][workload.fingerprint] = workload.to_json()
        rows["devices"][device.fingerprint] = device.to_json()
        rows["environments"][environment.strict] = environment.to_json()
        artifact = None
        if s.artifact is not None:
            data = artifact_json(s.artifact)
            artifact = artifact_id(data)
            rows["artifacts"][artifact] = data
            code.update({f"code/{sha256}": blob for sha256, blob in artifact_blobs(s.artifact).items()})
        rows["schedules"]["/".join((s.key.workload, s.key.device, s.key.environment, s.key.policy))] = {
            "workload": s.key.workload,
            "device": s.key.device,
            "environment": s.key.environment,
            "policy": s.key.policy,
            "config": s.config,
            "latency_us": s.latency_us,
            "baselines": dict(s.baselines),
            "artifact": artifact,
            "winner": s.winner,
            "family": s.family,
            "extent": s.extent,
            "when": s.when,
            "others": s.others,
            "space": s.space,
        }
    tables = {
        f"{name}.jsonl": "".join(canonical_json(dict(table[k])) + "\n" for k in sorted(table)).encode()
        for name, table in rows.items()
    }
    return {**tables, **code}


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))  # no clock: equal contents, equal bytes
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


def _read(path: Path) -> dict[str, bytes]:
    """The members that the manifest names, each checked. Nothing is unpacked to disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(i.file_size for i in archive.infolist()) > _LARGEST:
                raise UserError(f"{path} would unpack to more than {_LARGEST >> 30} GiB: that is no bundle of ours")
            manifest = json.loads(archive.read("manifest.json"))
            if manifest.get("form") != _FORM:
                raise UserError(f"{path} is not an autotune bundle: `autotune db export FILE` writes one")
            if manifest.get("version") != _VERSION:
                version = manifest.get("version")
                raise UserError(f"{path} is a bundle of version {version}, this autotune reads {_VERSION}: upgrade it")
            members = {str(name): archive.read(name) for name in manifest["members"]}
    except OSError as e:
        raise UserError(f"cannot read the bundle {path}: {e.strerror}") from None
    except _NOT_OURS as e:
        raise UserError(f"{path} is not an autotune bundle, or is damaged ({e}): export it again") from e
    for name, data in members.items():
        if hashlib.sha256(data).hexdigest() != manifest["members"][name]:
            raise UserError(f"{path} is damaged: its member {name} fails its SHA-256; export it again")
    return members


def _rows(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode().splitlines()]


def _schedule(row: Mapping[str, Any], artifacts: Mapping[str, Any]) -> Schedule:
    latency, others = float(row["latency_us"]), row.get("others")
    if not (math.isfinite(latency) and latency > 0):
        raise Damaged(f"the schedule of {row['workload'][:12]} has no usable latency")
    return Schedule(
        key=Key(str(row["workload"]), str(row["device"]), str(row["environment"]), str(row["policy"])),
        config=None if row["config"] is None else config_from(row["config"]),
        latency_us=latency,
        baselines={str(k): float(v) for k, v in row["baselines"].items()},
        artifact=None if row["artifact"] is None else artifacts[row["artifact"]],
        winner=str(row["winner"]),
        family=str(row["family"]),
        extent=int(row["extent"]),
        when=float(row["when"]),
        others=None if others is None else float(others),
        space=str(row.get("space", "")),
    )
