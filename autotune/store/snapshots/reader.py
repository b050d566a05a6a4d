"""A snapshot, open for look-ups: plain ``sqlite3``, read-only, every value checked before it is used."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from autotune.device import DeviceIdentity, Environment
from autotune.errors import UserError, printable, told
from autotune.store.codec import artifact_from, config_from
from autotune.store.health.damage import (
    BROKEN,
    Damaged,
    cost,
    from_json_text,
    latencies,
    mapping,
    moment,
    number,
    whole,
    why,
)
from autotune.store.health.step_record import left_of, step_record
from autotune.store.reading import Match, Near
from autotune.store.records import Calibration, Key, Schedule, Verdict
from autotune.store.snapshots.form import LARGEST_VALUE, TABLES, opened
from autotune.store.snapshots.pages import Connection, Pages, can_compare, compare_all
from autotune.store.snapshots.sign import check_signature
from autotune.task import Artifact, config_key
from autotune.workload import Workload, canonical_json

log = logging.getLogger("autotune")

_PRAGMAS = ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON", "temp_store = MEMORY")
_compared: set[tuple[int, int, int, int]] = set()
"""Files that were as their seals say when this process opened them."""
_FAILED = (*BROKEN, sqlite3.Error, zlib.error, MemoryError)


class Snapshot:
    """A snapshot, open; see :class:`autotune.store.reading.Reader` for what it is asked.

    Opening compares the whole file with its seal, once in a process. With ``key`` the seal's signature is checked.
    Where the package ``apsw`` is installed, opening then reads a few pages, and every page is compared with what was
    signed when it is read. Each row is compared with its checksum when it is read. The first mismatch condemns the
    file: one warning, and nothing more is read of it.

    Safe to share among threads, and with forked processes.

    Attributes:
        lost: why the file is not used any more; empty while it is.
    """

    readonly = True

    def __init__(self, path: str | os.PathLike[str], *, key: str | None = None) -> None:
        """Open ``path``.

        Args:
            key: file of a public key (PEM), or its text, that the file must be signed with.

        Raises:
            UserError: in one line: it is not there, no snapshot, of another version, damaged, or not signed so.
        """
        self._path = Path(os.path.abspath(path))
        self._lock = threading.Lock()
        self.lost = ""
        self.problems: list[str] = []
        file, self._seal = opened(self._path)
        with file:
            self._pages: Pages | None = None
            if key is not None:
                check_signature(self._path, self._seal, key)
            self._inode = _identity(os.fstat(file.fileno()))
            if key is not None and can_compare():
                self._pages = Pages(self._path, file, self._seal)
            elif self._inode not in _compared:
                # No checksum of a row shows that rows are missing: two swapped pages look like an empty table.
                compare_all(self._path, file, self._seal)
                _compared.add(self._inode)
            self.trusted = key is not None
            try:
                self._connect()
                self._read_dictionary()
            except _FAILED as e:
                raise self._damaged(e) from None

    def _damaged(self, error: BaseException) -> UserError:
        text = printable(" ".join(str(error).split()))[:200]
        return UserError(f"the snapshot {self._path} is damaged ({text}): copy or export it again")

    def _connect(self) -> None:
        connection: sqlite3.Connection | Connection
        if self._pages is not None:
            connection = Connection(self._pages)
        else:
            # immutable: no locks, and no look for a journal that somebody may have put beside the file.
            uri = f"file:{quote(os.fsencode(self._path))}?mode=ro&immutable=1"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
            found = {row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
            if found != set(TABLES):
                raise Damaged("its tables are others")
            if self._pages is None and _identity(os.stat(self._path)) != self._inode:
                raise Damaged("it was replaced while it was opened")
        except BaseException:
            connection.close()
            raise
        self._sqlite, self._pid = connection, os.getpid()

    def _read_dictionary(self) -> None:
        self.about = {str(name): str(value) for name, value in self._sqlite.execute("SELECT name, value FROM about")}
        self._devices: dict[int, DeviceIdentity] = {}
        self._environments: dict[int, Environment] = {}
        for row, fingerprint, text in self._sqlite.execute("SELECT number, fingerprint, identity FROM devices"):
            self._devices[row] = device = DeviceIdentity.from_json(mapping(_json(text), "identity"))
            if device.fingerprint != fingerprint:
                raise Damaged("a device does not match its SHA-256")
        for row, fingerprint, text in self._sqlite.execute("SELECT number, fingerprint, versions FROM environments"):
            self._environments[row] = environment = Environment.from_json(mapping(_json(text), "versions"))
            if environment.strict != fingerprint:
                raise Damaged("an environment does not match its SHA-256")
        self._numbers = {device.fingerprint: n for n, device in self._devices.items()}

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self._path)

    @property
    def signed(self) -> bool:
        """Whether anybody signed it; ``trusted`` says whether that was who is pinned."""
        return self._seal.signed

    @property
    def devices(self) -> tuple[DeviceIdentity, ...]:
        """Those that it has schedules for."""
        return tuple(self._devices.values())

    @property
    def environments(self) -> tuple[Environment, ...]:
        """The software that its schedules were tuned with."""
        return tuple(self._environments.values())

    def state(self) -> str:
        """The digest of all of it: a snapshot never changes."""
        return "condemned" if self.lost else self._seal.root.hex()

    def check(self) -> None:
        """Read all of it: every digest, SQLite's own structure, and every row.

        Raises:
            UserError: anything is damaged, in one line.
        """
        with open(self._path, "rb") as file:
            compare_all(self._path, file, self._seal)
        try:
            (found,) = next(iter(self._sqlite.execute("PRAGMA integrity_check(1)")))
            if found != "ok":
                raise Damaged(found)
            for _ in self.schedules(artifacts=True):
                pass
            for _ in self.verdicts():
                pass
            for _ in self.calibrations():
                pass
            for (fingerprint,) in list(self._sqlite.execute("SELECT fingerprint FROM workloads")):
                self._workload(fingerprint)
        except _FAILED as e:
            raise self._damaged(e) from None

    def close(self) -> None:
        """Close the file. The snapshot may not be used afterwards."""
        with self._lock:
            self._sqlite.close()
            if self._pages is not None:
                self._pages.close()

    # What look-ups ask. None of it raises for damage: the file is condemned, and nothing is found.

    def get_schedule(
        self, workload: str, device: str, environment: Environment | str | None = None, *, match: Match = "strict"
    ) -> Schedule | None:
        """As ``Store.get_schedule``."""
        where = "workload = ? AND device = ?"
        with _Condemning(self):
            found = self._schedules(where, (workload, self._numbers.get(device, -1)), environment, match)
            return self._whole(*found[0]) if found else None
        return None

    def family_schedules(
        self,
        family: str,
        device: str,
        environment: Environment | str | None = None,
        *,
        match: Match = "strict",
        artifacts: bool = True,
        extents: tuple[float, float] | None = None,
    ) -> list[Schedule]:
        """As ``Store.family_schedules``."""
        if not family:
            return []
        low, high = (0, 2**63 - 1) if extents is None else (math.ceil(extents[0]), math.floor(extents[1]))
        where = "family = ? AND device = ? AND extent BETWEEN ? AND ?"
        best: dict[str, Schedule] = {}
        with _Condemning(self):
            values = (family, self._numbers.get(device, -1), low, high)
            for s, artifact in self._schedules(where, values, environment, match):
                if s.key.workload not in best:
                    best[s.key.workload] = self._whole(s, artifact) if artifacts else s
            return sorted(best.values(), key=lambda s: s.extent)
        return []

    def nearest(
        self, family: str, device: str, environment: Environment, extent: int, *, match: Match = "strict", limit: int
    ) -> list[Near]:
        """As ``Store.nearest``."""
        fits = [n for n, e in self._environments.items() if _fit(e, environment, match) is not None]
        number = self._numbers.get(device)
        if not family or number is None or not fits:
            return []
        query = (
            "SELECT DISTINCT extent, workload FROM schedules WHERE device = ? AND family = ? AND"
            f" environment IN ({','.join(map(str, fits))}) AND extent"
        )
        with _Condemning(self):
            above = self._rows(f"{query} >= ? ORDER BY extent, workload LIMIT ?", (number, family, extent, limit))
            down = f"{query} < ? ORDER BY extent DESC, workload DESC LIMIT ?"
            below, when = self._rows(down, (number, family, extent, limit)), float(int(self._seal.root.hex()[:12], 16))
            found = [Near(str(w), whole(e, "number of rows"), when) for e, w in (*above, *below)]
            return sorted(found, key=lambda n: abs(math.log(max(n.extent, 1) / max(extent, 1))))[:limit]
        return []

    def places(self, workload: str) -> list[tuple[str, str]]:
        """As ``Reader.places``."""
        with _Condemning(self):
            rows = self._rows("SELECT DISTINCT device, environment FROM schedules WHERE workload = ?", (workload,))
            return [(self._devices[d].fingerprint, self._environments[e].strict) for d, e in rows]
        return []

    def get_workload(self, fingerprint: str) -> Workload | None:
        """The workload with this fingerprint; of the program it came from, the default that was compared."""
        with _Condemning(self):
            return self._workload(fingerprint)
        return None

    def get_workloads(self, fingerprints: Iterable[str]) -> dict[str, Workload]:
        """Those of the workloads that are there, by fingerprint."""
        found = {name: self.get_workload(name) for name in set(fingerprints)}
        return {name: workload for name, workload in found.items() if workload is not None}

    def fingerprints(self, prefix: str, limit: int) -> list[str]:
        """As ``Reader.fingerprints``."""
        query = "SELECT fingerprint FROM workloads WHERE fingerprint >= ? AND fingerprint < ? ORDER BY 1 LIMIT ?"
        with _Condemning(self):
            return [str(name) for (name,) in self._rows(query, (prefix, f"{prefix}g", limit))]
        return []

    def get_device(self, fingerprint: str) -> DeviceIdentity | None:
        number = self._numbers.get(fingerprint)
        return None if number is None else self._devices[number]

    def get_environment(self, fingerprint: str) -> Environment | None:
        return next((e for e in self._environments.values() if e.strict == fingerprint), None)

    def get_verdict(
        self, graph: str, device: str, environment: Environment, mode: str, *, match: Match = "loose"
    ) -> Verdict | None:
        """As ``Store.get_verdict``."""
        where = "graph = ? AND device = ? AND mode = ?"
        with _Condemning(self):
            found = []
            for verdict, near in self._verdicts(
                where, (graph, self._numbers.get(device, -1), mode), environment, match
            ):
                found.append((near, -verdict.when, verdict))
            return min(found, key=lambda f: f[:2])[2] if found else None
        return None

    # Everything, for `autotune show`, `autotune import` and `check`. These raise UserError for damage.

    def schedules(
        self, device: str | None = None, *, workload: str | None = None, artifacts: bool = False
    ) -> list[Schedule]:
        """As ``Store.schedules``, in no order; all of the file's where neither is given."""
        given = {"device": None if device is None else self._numbers.get(device, -1), "workload": workload}
        named = {name: value for name, value in given.items() if value is not None}
        where = " AND ".join(["1", *(f"{name} = ?" for name in named)])
        try:
            found = self._each(where, tuple(named.values()))
            return [self._whole(schedule, artifact) if artifacts else schedule for schedule, artifact in found]
        except _FAILED as e:
            raise self._damaged(e) from None

    def verdicts(self) -> list[Verdict]:
        """Every verdict."""
        try:
            return [verdict for verdict, _ in self._verdicts("1", (), None, "ignore")]
        except _FAILED as e:
            raise self._damaged(e) from None

    def calibrations(self) -> list[Calibration]:
        """Every calibration."""
        try:
            return list(self._calibrations())
        except _FAILED as e:
            raise self._damaged(e) from None

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if self.lost:
            return []
        with self._lock:
            if self._pid != os.getpid():  # SQLite's connections do not live on in a forked process
                self._connect()
            return list(self._sqlite.execute(query, values))

    def _schedules(
        self, where: str, values: Sequence[Any], environment: Environment | str | None, match: Match
    ) -> list[tuple[Schedule, str | None]]:
        """Schedules, and the names of their artifacts, in the order in which they are preferred; see
        ``Store.get_schedule``."""
        found: list[tuple[int, Schedule, str | None]] = []
        wanted = self.get_environment(environment) if isinstance(environment, str) else environment
        for schedule, artifact in self._each(where, values):
            have = self.get_environment(schedule.key.environment)
            near = 0 if environment is None else None if wanted is None or have is None else _fit(have, wanted, match)
            if near is not None:
                found.append((near, schedule, artifact))
        latest: dict[tuple[str, str], float] = {}
        for _, s, _ in found:
            latest[s.key.workload, s.key.policy] = max(s.when, latest.get((s.key.workload, s.key.policy), -math.inf))
        found.sort(key=lambda f: (f[0], -latest[f[1].key.workload, f[1].key.policy], f[1].latency_us, -f[1].when))
        return [(schedule, artifact) for _, schedule, artifact in found]

    def _whole(self, schedule: Schedule, artifact: str | None) -> Schedule:
        return schedule if artifact is None else replace(schedule, artifact=self._artifact(artifact))

    def _each(self, where: str, values: Sequence[Any]) -> Iterator[tuple[Schedule, str | None]]:
        columns = "workload, device, environment, policy, family, extent, data, sha256"
        for row in self._rows(f"SELECT {columns} FROM schedules WHERE {where}", values):
            workload, device, environment, policy, family, extent, text, sha256 = row
            data = _sealed(text, sha256, "schedule")
            key = Key(workload, self._devices[device].fingerprint, self._environments[environment].strict, policy)
            if data["key"] != [*vars(key).values(), family, extent] or not _texts(workload, policy, family):
                raise Damaged("a schedule is not under its own key")
            named = data["artifact"]
            schedule = _schedule(key, family, whole(extent, "number of rows"), data)
            yield schedule, None if named is None else str(named)

    def _artifact(self, fingerprint: str) -> Artifact:
        rows = self._rows("SELECT data FROM artifacts WHERE fingerprint = ?", (fingerprint,))
        if not rows:
            raise Damaged(f"artifact {fingerprint[:12]} is missing")
        data = mapping(_unpacked(rows[0][0]), "artifact")
        return artifact_from(fingerprint, data, self._code(data))

    def _code(self, data: Mapping[str, Any]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for kernel in data["kernels"]:
            sha256 = kernel["sha256"]
            if sha256 is not None and sha256 not in found:
                for (code,) in self._rows("SELECT bytes FROM code WHERE sha256 = ?", (sha256,)):
                    found[sha256] = code if isinstance(code, bytes) else b""
        return found

    def _workload(self, fingerprint: str) -> Workload | None:
        rows = self._rows("SELECT data FROM workloads WHERE fingerprint = ?", (fingerprint,))
        if not rows:
            return None
        data = mapping(_unpacked(rows[0][0]), "workload")
        spec = mapping(data["spec"], "spec")
        found = Workload(
            str(data["kind"]), spec, str(data["family"]), whole(data["extent"], "number of rows"),
            printable(str(data["label"])), mapping(data.get("source", {}), "source"),
        )  # fmt: skip
        if found.fingerprint != fingerprint:
            raise Damaged(f"workload {str(fingerprint)[:12]} does not match its SHA-256")
        return found

    def _verdicts(
        self, where: str, values: Sequence[Any], environment: Environment | None, match: Match
    ) -> Iterator[tuple[Verdict, int]]:
        columns = "graph, device, environment, mode, data, sha256"
        for graph, device, env, mode, text, sha256 in self._rows(
            f"SELECT {columns} FROM verdicts WHERE {where}", values
        ):
            data = _sealed(text, sha256, "verdict")
            place, have = self._devices[device], self._environments[env]
            if data["key"] != [graph, place.fingerprint, have.strict, mode]:
                raise Damaged("a verdict is not under its own key")
            near = 0 if environment is None else _fit(have, environment, match)
            if near is not None:
                left, record, when = left_of(data["left"]), step_record(data["record"]), moment(data["created"])
                yield Verdict(graph, place.fingerprint, have.strict, mode, left, record, when), near

    def _calibrations(self) -> Iterator[Calibration]:
        for device, kind, text, sha256 in self._rows("SELECT device, kind, data, sha256 FROM calibrations", ()):
            data = _sealed(text, sha256, "calibration")
            place = self._devices[device].fingerprint
            if data["key"] != [place, kind]:
                raise Damaged("a calibration is not under its own key")
            figures = {str(k): number(v, str(k)) for k, v in mapping(data["figures"], "figures").items()}
            yield Calibration(place, str(kind), figures, moment(data["created"]))


class _Condemning:
    """While open, whatever damage shows condemns the snapshot, and is told once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, _FAILED):
            return False
        text = told(f"the snapshot {self._snapshot.name} is damaged ({why(error)}): nothing of it is used", 500)
        if not self._snapshot.lost:
            self._snapshot.problems.append(text)
            log.warning("autotune: %s", text)
        self._snapshot.lost = text
        return True


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _fit(have: Environment, wanted: Environment, match: Match) -> int | None:
    """How well software fits: 0 equal, 1 equal minor versions, 2 neither; None where ``match`` does not allow it."""
    if have.strict == wanted.strict:
        return 0
    if match == "strict":
        return None
    return 1 if have.loose == wanted.loose else 2 if match == "ignore" else None


def _json(text: Any) -> Any:
    found = from_json_text(text) if isinstance(text, (str, bytes)) else None
    if found is None:
        raise Damaged("a value is no JSON")
    return found


def _unpacked(data: Any) -> Any:
    if not isinstance(data, bytes):
        raise Damaged("a value is no compressed JSON")
    unpack = zlib.decompressobj()
    text = unpack.decompress(data, LARGEST_VALUE)
    if not unpack.eof:
        raise Damaged("a value is cut short, or far too large")
    return _json(text)


def _sealed(text: Any, sha256: Any, what: str) -> dict[str, Any]:
    """The JSON object of a row with a checksum; raises Damaged."""
    if not isinstance(text, str) or hashlib.sha256(text.encode(errors="replace")).hexdigest() != sha256:
        raise Damaged(f"a {what} fails its SHA-256")
    return mapping(_json(text), what)


def _schedule(key: Key, family: str, extent: int, data: Mapping[str, Any]) -> Schedule:
    config, others = data["config"], data["others"]
    return Schedule(
        key=key,
        config=None if config is None else config_from(config, config_key(mapping(config, "configuration"))),
        latency_us=cost(data["latency_us"]),
        baselines=latencies(data["baselines"]),
        winner=printable(str(data["winner"])),
        family=family,
        extent=extent,
        when=moment(data["created"]),
        others=None if others is None else number(others, "number of busy processors"),
        space=str(data["space"]),
    )


def sealed(data: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a row's ``data``, and its SHA-256."""
    text = canonical_json(data)
    return text, hashlib.sha256(text.encode()).hexdigest()


def packed(data: Mapping[str, Any]) -> bytes:
    """JSON, compressed."""
    return zlib.compress(canonical_json(data).encode(), 6)
