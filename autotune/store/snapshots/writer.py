"""Writing a snapshot of a database: what deployment reads, and nothing else."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.device import DeviceIdentity, Environment
from autotune.errors import UserError
from autotune.outputs import check_output, whole_file
from autotune.store.codec import artifact_blobs, artifact_id, artifact_json
from autotune.store.health.damage import BROKEN, Damaged, why
from autotune.store.records import Calibration, Schedule, Verdict
from autotune.store.snapshots.form import APPLICATION, TABLES, VERSION, Seal, digests_of, holds_snapshot, root_of
from autotune.store.snapshots.reader import packed, sealed
from autotune.store.snapshots.sign import private_key, signed
from autotune.store.store import Store
from autotune.workload import Workload

_SOURCE = ("default",)
"""Of what a workload came from: the configuration that the baseline of this name was. The program stays at home."""
_RECORD = ("mode", "compile_us", "attention_us", "all_us", "autotune_us", "ratio", "train", "numerics", "families")
"""Of a verdict's record: figures. What command found it, and of which program, stays at home."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        schedules, verdicts: how many.
        root: the digest of the file's contents, as its seal has it.
        bytes: the file's size.
        left_out: why schedules were left out, a line each.
    """

    schedules: int
    verdicts: int
    root: str
    bytes: int
    left_out: tuple[str, ...]


def export_snapshot(
    store: Store,
    file: str | os.PathLike[str],
    *,
    device: Callable[[DeviceIdentity], bool] = lambda device: True,
    domain: str | None = None,
    only_best: bool = False,
    key: str | os.PathLike[str] | None = None,
    refuse: Callable[[Schedule, Workload, DeviceIdentity], str] = lambda schedule, workload, device: "",
) -> Exported:
    """Write a snapshot of ``store``. The file appears whole or not at all; equal contents give equal rows.

    Args:
        device: which devices' schedules are wanted.
        domain: that of the workloads wanted; None for all.
        only_best: only what a look-up on an equal device would take: for each workload, device and environment what
            the policy that decided last found fastest.
        key: file of a private key to sign with.
        refuse: why a schedule is not to be exported, "" where it is.

    Raises:
        UserError: nothing is left to export, the file cannot be written or is none of ours, or ``key`` is no key.
    """
    path = Path(file)
    check_output(path, f"cannot write the snapshot {path}")
    if path.exists() and not holds_snapshot(path):
        raise UserError(f"{path} is there and is no snapshot of autotune's: name a new file, or remove it first")
    if key is not None:
        private_key(key)  # told before the work
    known = len(store.problems)
    contents, refused = _chosen(store, device, domain, only_best, refuse)
    left_out = (*list(store.problems)[known:], *refused)
    if not contents.schedules:
        why_none = f"; {len(left_out)} were left out, the first: {left_out[0]}" if left_out else ""
        raise UserError(f"the database {store.name} has no such schedule to export{why_none}")
    seal = write_snapshot(path, contents, key=key)
    size = path.stat().st_size
    return Exported(len(contents.schedules), len(contents.verdicts), seal.root.hex(), size, left_out)


@dataclass(frozen=True)
class Contents:
    """What goes into a snapshot; workloads, devices and environments by fingerprint."""

    schedules: Sequence[Schedule]
    workloads: Mapping[str, Workload]
    devices: Mapping[str, DeviceIdentity]
    environments: Mapping[str, Environment]
    verdicts: Sequence[Verdict] = ()
    calibrations: Sequence[Calibration] = ()


def write_snapshot(path: Path, contents: Contents, *, key: str | os.PathLike[str] | None = None) -> Seal:
    """Write a snapshot, whole or not at all; raises UserError."""
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".autotune-") as folder:
            pages = Path(folder) / "pages"
            with closing(sqlite3.connect(pages, isolation_level=None)) as connection:
                _write(connection, contents)
            with open(pages, "rb") as body, whole_file(path) as out:
                length = os.fstat(body.fileno()).st_size
                digests = digests_of(body, length)
                seal = Seal(length, root_of(digests))
                seal = seal if key is None else signed(seal, key)
                body.seek(0)
                while part := body.read(1 << 20):
                    out.write(part)
                out.write(digests)
                out.write(seal.packed())
            return seal
    except (OSError, sqlite3.Error) as e:
        raise UserError(f"cannot write the snapshot {path}: {getattr(e, 'strerror', None) or e}") from None


def _chosen(
    store: Store,
    device: Callable[[DeviceIdentity], bool],
    domain: str | None,
    only_best: bool,
    refuse: Callable[[Schedule, Workload, DeviceIdentity], str],
) -> tuple[Contents, list[str]]:
    """What of a database goes into a snapshot, and why schedules are left out."""
    every = store.schedules(artifacts=True)
    known = store.get_devices(s.key.device for s in every)
    devices = {name: d for name, d in known.items() if device(d)}
    environments = store.get_environments(s.key.environment for s in every)
    every = [s for s in every if s.key.device in devices or s.key.device not in known]
    workloads = store.get_workloads(s.key.workload for s in every)
    if domain is not None:
        kinds = store.names(s.key.workload for s in every)
        every = [s for s in every if kinds.get(s.key.workload, ("", ""))[1] == domain]
    chosen: list[Schedule] = []
    left_out: list[str] = []
    for s in _best(every) if only_best else every:
        try:
            for what, name, found in (
                ("workload", s.key.workload, workloads),
                ("device", s.key.device, devices),
                ("environment", s.key.environment, environments),
            ):
                if name not in found:
                    raise Damaged(f"its {what} {name[:12]} is missing or damaged")
            if s.artifact is None and s.config is not None:
                raise Damaged("its artifact is missing")
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
    mine = {s.key.workload: workloads[s.key.workload] for s in chosen}
    pairs = sorted({(place, w.kind) for place in places for w in mine.values()})
    contents = Contents(
        chosen,
        mine,
        {name: d for name, d in devices.items() if name in places},
        {name: e for name, e in environments.items() if name in used},
        verdicts,
        [c for c in (store.get_calibration(*pair) for pair in pairs) if c is not None],
    )
    return contents, left_out


def _speaks_of(verdict: Verdict, schedules: Sequence[Schedule]) -> bool:
    """Whether every schedule that a verdict speaks of is there."""
    listed = verdict.record.get("families")
    families = listed if isinstance(listed, list) else []
    needed = {*verdict.left, *(str(f.get("workload")) for f in families if isinstance(f, dict))}
    return bool(needed) and needed <= {s.key.workload for s in schedules if s.key.device == verdict.device}


def _best(schedules: Iterable[Schedule]) -> list[Schedule]:
    """What a look-up takes of each workload, device and environment; see ``Store.get_schedule``."""
    groups: dict[tuple[str, str, str], list[Schedule]] = {}
    for s in schedules:
        groups.setdefault((s.key.workload, s.key.device, s.key.environment), []).append(s)
    best = []
    for group in groups.values():
        policy = max(group, key=lambda s: s.when).key.policy
        best.append(min((s for s in group if s.key.policy == policy), key=lambda s: (s.latency_us, -s.when)))
    return best


def _write(connection: sqlite3.Connection, chosen: Contents) -> None:
    for pragma in (f"application_id = {APPLICATION}", f"user_version = {VERSION}", "journal_mode = OFF",
                   "synchronous = OFF"):  # fmt: skip
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN")
    for table in TABLES:
        connection.execute(table)
    put = connection.execute
    devices = {name: n for n, name in enumerate(sorted(chosen.devices), 1)}
    environments = {name: n for n, name in enumerate(sorted(chosen.environments), 1)}
    for name, n in devices.items():
        put("INSERT INTO devices VALUES (?, ?, ?)", (n, name, sealed(chosen.devices[name].to_json())[0]))
    for name, n in environments.items():
        put("INSERT INTO environments VALUES (?, ?, ?)", (n, name, sealed(chosen.environments[name].to_json())[0]))
    for name, w in sorted(chosen.workloads.items()):
        data = {**w.to_json(), "source": {key: w.source[key] for key in _SOURCE if key in w.source}}
        put("INSERT INTO workloads VALUES (?, ?)", (name, packed(data)))
    for s in sorted(chosen.schedules, key=lambda s: tuple(vars(s.key).values())):
        artifact = None if s.artifact is None else _put_artifact(put, s)
        text, sha256 = sealed(_row(s, artifact))
        key = (s.key.workload, devices[s.key.device], environments[s.key.environment], s.key.policy)
        put("INSERT INTO schedules VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*key, s.family, s.extent, text, sha256))
    for v in sorted(chosen.verdicts, key=lambda v: (v.graph, v.device, v.environment, v.mode)):
        record = {name: v.record[name] for name in _RECORD if name in v.record}
        own = [v.graph, v.device, v.environment, v.mode]
        text, sha256 = sealed({"key": own, "left": list(v.left), "record": record, "created": v.when})
        place = (v.graph, devices[v.device], environments[v.environment], v.mode)
        put("INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", (*place, text, sha256))
    for c in chosen.calibrations:
        text, sha256 = sealed({"key": [c.device, c.kind], "figures": dict(c.figures), "created": c.when})
        put("INSERT INTO calibrations VALUES (?, ?, ?, ?)", (devices[c.device], c.kind, text, sha256))
    for name, value in _about(chosen).items():
        put("INSERT INTO about VALUES (?, ?)", (name, value))
    connection.execute("COMMIT")
    connection.execute("VACUUM")


def _put_artifact(put: Callable[..., Any], schedule: Schedule) -> str:
    assert schedule.artifact is not None
    data = artifact_json(schedule.artifact)
    name = artifact_id(data)
    put("INSERT OR IGNORE INTO artifacts VALUES (?, ?)", (name, packed(data)))
    for sha256, code in sorted(artifact_blobs(schedule.artifact).items()):
        put("INSERT OR IGNORE INTO code VALUES (?, ?)", (sha256, code))
    return name


def _row(s: Schedule, artifact: str | None) -> Mapping[str, Any]:
    return {
        "key": [*vars(s.key).values(), s.family, s.extent],
        "config": s.config,
        "artifact": artifact,
        "latency_us": s.latency_us,
        "baselines": dict(s.baselines),
        "winner": s.winner,
        "others": s.others,
        "space": s.space,
        "created": s.when,
    }


def _about(chosen: Contents) -> dict[str, str]:
    """Where the schedules come from, for people."""

    def listed(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value}))

    environments = chosen.environments.values()
    return {
        "autotune": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "schedules": str(len(chosen.schedules)),
        "devices": listed(d.label for d in chosen.devices.values()),
        "generator": listed(s.artifact.generator for s in chosen.schedules if s.artifact),
        **{name: listed(getattr(e, name) for e in environments) for name in ("torch", "numba", "numba_cuda", "cuda",
                                                                            "driver")},
    }  # fmt: skip
