"""Writing a snapshot of a database, to deploy from or to import."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.device import DeviceIdentity, Environment
from autotune.errors import UserError
from autotune.files import check_output, whole_file
from autotune.store import codec
from autotune.store.damage import BROKEN, Damaged, why
from autotune.store.models import ScheduleRow, WorkloadRow, fits
from autotune.store.records import Calibration, Schedule, Verdict
from autotune.store.snapshot import packed, sealed
from autotune.store.snapshot_form import (
    APPLICATION,
    KEYS,
    TABLES,
    VERSION,
    Seal,
    checksum,
    kind_of,
    private_key,
    signed,
)
from autotune.store.store import Store
from autotune.task import Artifact
from autotune.workload import Workload, canonical_json

_SOURCE = ("default",)
"""Exported field of a workload's source: the configuration of the baseline of this name. The program is omitted."""
_RECORD = ("mode", "compile_us", "attention_us", "all_us", "autotune_us", "ratio", "train", "numerics", "families")
"""Exported fields of a verdict's record: figures. The command and the program are omitted."""


@dataclass(frozen=True)
class Exported:
    """A written snapshot: counts, the checksum in its seal, its size, and the reasons for omitted schedules."""

    schedules: int
    verdicts: int
    checksum: str
    bytes: int
    left_out: tuple[str, ...]


def export_snapshot(
    store: Store,
    file: str | os.PathLike[str],
    *,
    device: Callable[[DeviceIdentity], bool] = lambda device: True,
    domain: str | None = None,
    only_best: bool = False,
    programs: bool = False,
    key: str | os.PathLike[str] | None = None,
    refuse: Callable[[Schedule, Workload, DeviceIdentity], str] = lambda schedule, workload, device: "",
) -> Exported:
    """Write a snapshot of ``store``. The file appears complete or not at all; equal contents give equal rows.

    Args:
        device: predicate for the devices to export.
        domain: of the workloads to export; None for all.
        only_best: only schedules that a look-up on an equal device would return: for each workload, device and
            environment the fastest one of the policy with the newest decision.
        programs: also export the programs of workloads, and the targets and commands of verdicts.
        key: file of a private key to sign with.
        refuse: returns the reason not to export a schedule, or "".

    Raises:
        UserError: no schedules to export, an existing file that is not a snapshot or cannot be written, or an invalid
            ``key``.
    """
    path = Path(file)
    check_output(path, f"cannot write the snapshot {path}")
    if kind_of(path) not in ("snapshot", "missing"):
        raise UserError(f"{path} exists and is not a snapshot: name a new file, or remove this one")
    if key is not None:
        private_key(key)  # raises UserError for an invalid key before the work
    known = len(store.problems)
    contents, refused = _chosen(store, device, domain, only_best, refuse)
    contents = contents if programs else _without_programs(contents)
    left_out = (*list(store.problems)[known:], *refused)
    if not contents.schedules:
        why_none = f"; {len(left_out)} were left out, the first: {left_out[0]}" if left_out else ""
        raise UserError(f"the database {store.name} has no matching schedule to export{why_none}")
    seal = write_snapshot(path, contents, key=key)
    size = path.stat().st_size
    return Exported(len(contents.schedules), len(contents.verdicts), seal.checksum.hex(), size, left_out)


@dataclass(frozen=True)
class Contents:
    """The contents of a snapshot; workloads, devices and environments by fingerprint."""

    schedules: Sequence[Schedule]
    workloads: Mapping[str, Workload]
    devices: Mapping[str, DeviceIdentity]
    environments: Mapping[str, Environment]
    verdicts: Sequence[Verdict] = ()
    calibrations: Sequence[Calibration] = ()


def write_snapshot(path: Path, contents: Contents, *, key: str | os.PathLike[str] | None = None) -> Seal:
    """Write a snapshot, completely or not at all; raises UserError."""
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".autotune-") as folder:
            pages = Path(folder) / "pages"
            with closing(sqlite3.connect(pages, isolation_level=None)) as connection:
                _write(connection, contents)
            with open(pages, "rb") as body, whole_file(path) as out:
                length = os.fstat(body.fileno()).st_size
                seal = Seal(length, checksum(body, length))
                seal = seal if key is None else signed(seal, key)
                body.seek(0)
                while part := body.read(1 << 20):
                    out.write(part)
                out.write(seal.packed())
            return seal
    except (OSError, sqlite3.Error) as e:
        raise UserError(f"cannot write the snapshot {path}: {getattr(e, 'strerror', None) or e}") from None


def _without_programs(contents: Contents) -> Contents:
    workloads = {
        name: replace(w, source={key: w.source[key] for key in _SOURCE if key in w.source})
        for name, w in contents.workloads.items()
    }
    verdicts = [
        replace(v, record={name: v.record[name] for name in _RECORD if name in v.record}) for v in contents.verdicts
    ]
    return replace(contents, workloads=workloads, verdicts=verdicts)


def _chosen(
    store: Store,
    device: Callable[[DeviceIdentity], bool],
    domain: str | None,
    only_best: bool,
    refuse: Callable[[Schedule, Workload, DeviceIdentity], str],
) -> tuple[Contents, list[str]]:
    """A snapshot's contents, and a line for each omitted schedule."""
    every = store.schedules(artifacts=True)
    devices = store.get_devices(s.key.device for s in every)
    every = [s for s in every if s.key.device not in devices or device(devices[s.key.device])]
    environments = store.get_environments(s.key.environment for s in every)
    workloads = store.get_workloads(s.key.workload for s in every)
    if domain is not None:
        kinds = store.names(s.key.workload for s in every)
        every = [s for s in every if kinds.get(s.key.workload, ("", ""))[1] == domain]
    known = {*workloads, *devices, *environments}
    chosen: list[Schedule] = []
    left_out: list[str] = []
    for s in _best(every) if only_best else every:
        try:
            for what in ("workload", "device", "environment"):
                if (name := getattr(s.key, what)) not in known:
                    raise Damaged(f"its {what} {name[:12]} is missing or damaged")
            if s.artifact is None and s.config is not None:
                raise Damaged("its artifact is missing")
            fits(ScheduleRow, codec.schedule_values(s, None, 0.0))
            fits(WorkloadRow, codec.workload_values(workloads[s.key.workload], 0.0))
            if text := refuse(s, workloads[s.key.workload], devices[s.key.device]):
                raise Damaged(text)
            chosen.append(s)
        except BROKEN as e:
            left_out.append(f"schedule of workload {s.key.workload[:12]}: {why(e)}")
    verdicts = [v for v in store.verdicts() if _speaks_of(v, chosen)]
    environments |= store.get_environments(v.environment for v in verdicts)
    verdicts = [v for v in verdicts if v.environment in environments]
    used = {s.key.environment for s in chosen} | {v.environment for v in verdicts}
    places = {s.key.device for s in chosen}
    chosen_workloads = {s.key.workload: workloads[s.key.workload] for s in chosen}
    pairs = sorted({(place, w.kind) for place in places for w in chosen_workloads.values()})
    contents = Contents(
        chosen,
        chosen_workloads,
        {name: d for name, d in devices.items() if name in places},
        {name: e for name, e in environments.items() if name in used},
        verdicts,
        [c for c in (store.get_calibration(*pair) for pair in pairs) if c is not None],
    )
    return contents, left_out


def _speaks_of(verdict: Verdict, schedules: Sequence[Schedule]) -> bool:
    """Return True if a verdict is about exported schedules, and all that its step ran are exported.

    A region that it leaves to Inductor may have no schedule: a search in a program leaves all regions of a graph.
    """
    listed = verdict.record.get("families")
    families = listed if isinstance(listed, list) else []
    named = {*verdict.left, *(str(f.get("workload")) for f in families if isinstance(f, dict))}
    exported = {s.key.workload for s in schedules if s.key.device == verdict.device}
    return bool(named & exported) and named - {*verdict.left} <= exported


def _best(schedules: Iterable[Schedule]) -> list[Schedule]:
    """The schedule that a look-up returns for each workload, device and environment; see ``Reader.get_schedule``."""
    groups: dict[tuple[str, str, str], list[Schedule]] = {}
    for s in schedules:
        groups.setdefault((s.key.workload, s.key.device, s.key.environment), []).append(s)
    best = []
    for every in groups.values():
        group = [s for s in every if not s.predicted] or every
        policy = max(group, key=lambda s: s.when).key.policy
        best.append(min((s for s in group if s.key.policy == policy), key=lambda s: (s.latency_us, -s.when)))
    return best


def _write(connection: sqlite3.Connection, chosen: Contents) -> None:
    settings = {"application_id": APPLICATION, "user_version": VERSION, "journal_mode": "OFF", "synchronous": "OFF"}
    for name, setting in settings.items():
        connection.execute(f"PRAGMA {name} = {setting}")
    connection.execute("BEGIN")
    for table in TABLES:
        connection.execute(table)
    put = connection.execute
    devices = {name: n for n, name in enumerate(sorted(chosen.devices), 1)}
    environments = {name: n for n, name in enumerate(sorted(chosen.environments), 1)}
    for name, n in devices.items():
        put("INSERT INTO devices VALUES (?, ?, ?)", (n, name, canonical_json(chosen.devices[name].to_json())))
    for name, n in environments.items():
        put("INSERT INTO environments VALUES (?, ?, ?)", (n, name, canonical_json(chosen.environments[name].to_json())))
    for name, w in sorted(chosen.workloads.items()):
        put("INSERT INTO workloads VALUES (?, ?)", (name, packed(w.to_json())))
    rows: list[tuple[str, dict[str, Any]]] = []
    for s in chosen.schedules:
        artifact = None if s.artifact is None else _put_artifact(put, s.artifact)
        rows.append(("schedules", {**codec.schedule_values(s, artifact, 0.0), "config": s.config}))
    rows += [("verdicts", codec.verdict_values(v, 0.0)) for v in chosen.verdicts]
    rows += [("calibrations", codec.calibration_values(c, 0.0)) for c in chosen.calibrations]
    for table, values in sorted(rows, key=lambda row: (row[0], [row[1][name] for name in KEYS[row[0]]])):
        key = {name: values.pop(name) for name in KEYS[table]}
        text, sha256 = sealed({**values, "key": list(key.values())})
        key["device"] = devices[key["device"]]
        if "environment" in key:
            key["environment"] = environments[key["environment"]]
        marks = ", ".join("?" * (len(key) + 2))
        put(f"INSERT INTO {table} VALUES ({marks})", (*key.values(), text, sha256))
    for name, value in _about(chosen).items():
        put("INSERT INTO about VALUES (?, ?)", (name, value))
    connection.execute("COMMIT")
    connection.execute("VACUUM")


def _put_artifact(put: Callable[..., Any], artifact: Artifact) -> str:
    data = codec.artifact_json(artifact)
    name = codec.artifact_id(data)
    put("INSERT OR IGNORE INTO artifacts VALUES (?, ?)", (name, packed(data)))
    for sha256, code in sorted(codec.artifact_blobs(artifact).items()):
        put("INSERT OR IGNORE INTO code VALUES (?, ?)", (sha256, code))
    return name


def _about(chosen: Contents) -> dict[str, str]:
    """Description of the schedules' origin."""

    def listed(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value}))

    software = ("torch", "numba", "numba_cuda", "cuda", "driver")
    return {
        "autotune": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "schedules": str(len(chosen.schedules)),
        "devices": listed(d.label for d in chosen.devices.values()),
        "generator": listed(s.artifact.generator for s in chosen.schedules if s.artifact),
        **{name: listed(getattr(e, name) for e in chosen.environments.values()) for name in software},
    }
