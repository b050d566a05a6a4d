"""A snapshot, open for look-ups: plain ``sqlite3``, read-only, every value checked before it is used."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import IO, Any
from urllib.parse import quote

from autotune.device import DeviceIdentity, Environment
from autotune.errors import UserError, printable, safe_line
from autotune.store.codec import (
    artifact_from,
    calibration_from,
    device_from,
    environment_from,
    schedule_from,
    verdict_from,
    workload_from,
)
from autotune.store.damage import BROKEN, Damaged, from_json_text, integer, mapping, text, why
from autotune.store.reading import Listed, Reader, Scope, Where
from autotune.store.records import Calibration, Schedule, Verdict
from autotune.store.snapshot_form import KEYS, LARGEST_VALUE, TABLES, Seal, check_signature, checksum, opened
from autotune.task import config_key
from autotune.workload import Workload, canonical_json

log = logging.getLogger("autotune")

_PRAGMAS = ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON", "temp_store = MEMORY")
_compared: set[tuple[int, int, int, int]] = set()
"""Files that matched their seals when this process opened them."""
_FAILED = (*BROKEN, sqlite3.Error, zlib.error, MemoryError)


class Snapshot(Reader):
    """A snapshot, open; :class:`autotune.store.reading.Reader` has the look-ups.

    Opening compares the whole file with its seal, once in a process, and the seal's signature with ``key``, each time.
    Each row is compared with its checksum when it is read. After the first mismatch, with one warning, the file is not
    used any more.

    Safe to share among threads, and with forked processes.

    Attributes:
        lost: the reason why the file is not used any more; empty while it is used.
    """

    readonly = True

    def __init__(self, path: str | os.PathLike[str], *, key: str | None = None) -> None:
        """Open ``path``.

        Args:
            key: file of a public key (PEM), or its text, that the file must be signed with.

        Raises:
            UserError: missing, not a snapshot, of another version, damaged, or not signed with the key; one line.
        """
        self._path = Path(os.path.abspath(path))
        self._lock = threading.Lock()
        self.lost = ""
        self.problems: list[str] = []
        file, self._seal = opened(self._path)
        with file:
            if key is not None:
                check_signature(self._path, self._seal, key)
            self._inode = _identity(os.fstat(file.fileno()))
            if key is not None or self._inode not in _compared:
                # Row checksums do not detect missing rows: two swapped pages look like an empty table.
                compare(self._path, file, self._seal)
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
        # immutable: no locks, and no journal, which another user may have put into the same folder.
        uri = f"file:{quote(os.fsencode(self._path))}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
            found = {row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
            if found != set(TABLES):
                raise Damaged("its tables are others")
            if _identity(os.stat(self._path)) != self._inode:
                raise Damaged("it was replaced while it was opened")
        except BaseException:
            connection.close()
            raise
        self._sqlite, self._pid = connection, os.getpid()

    def _read_dictionary(self) -> None:
        self.about = {str(name): str(value) for name, value in self._sqlite.execute("SELECT name, value FROM about")}
        self._devices: dict[int, DeviceIdentity] = {}
        self._environments: dict[int, Environment] = {}
        for number, fingerprint, json in self._sqlite.execute("SELECT number, fingerprint, identity FROM devices"):
            self._devices[number] = device_from(fingerprint, _json(json))
        for number, fingerprint, json in self._sqlite.execute("SELECT number, fingerprint, versions FROM environments"):
            self._environments[number] = environment_from(fingerprint, _json(json))
        self._numbers = {device.fingerprint: n for n, device in self._devices.items()}
        strict = {environment.strict for environment in self._environments.values()}
        if len(self._numbers) < len(self._devices) or len(strict) < len(self._environments):
            raise Damaged("a device or an environment is there twice")

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def signed(self) -> bool:
        """True for a signed file; ``trusted`` is True if it was signed with the pinned key."""
        return self._seal.signed

    @property
    def devices(self) -> tuple[DeviceIdentity, ...]:
        """The devices of its schedules."""
        return tuple(self._devices.values())

    @property
    def environments(self) -> tuple[Environment, ...]:
        """The software that its schedules were tuned with."""
        return tuple(self._environments.values())

    def state(self, scope: Scope | None = None) -> str:
        """The digest of the whole file, since a snapshot never changes."""
        return "condemned" if self.lost else self._seal.checksum.hex()

    def check(self) -> None:
        """Check the whole file: the pages, SQLite's structure, and every row.

        Raises:
            UserError: any part is damaged; one line.
        """
        if self.lost:
            raise UserError(self.lost)
        with open(self._path, "rb") as file:
            compare(self._path, file, self._seal)
        (found,) = next(iter(self._sqlite.execute("PRAGMA integrity_check(1)")))
        if found != "ok":
            raise Damaged(found)
        self.schedules(artifacts=True), self.verdicts(), self.calibrations()
        for (fingerprint,) in self._rows("SELECT fingerprint FROM workloads"):
            self._workload(fingerprint)

    def close(self) -> None:
        """Close the file. The snapshot must not be used afterwards."""
        with self._lock:
            self._sqlite.close()

    def tuned_under(self, workload: str) -> list[tuple[str, str]]:
        rows = self._rows("SELECT DISTINCT device, environment FROM schedules WHERE workload = ?", (workload,))
        return [(self._devices[d].fingerprint, self._environments[e].strict) for d, e in rows]

    def get_workloads(self, fingerprints: Iterable[str]) -> dict[str, Workload]:
        # The source programs usually only have the default that was compared.
        found = {name: self._workload(name) for name in set(fingerprints)}
        return {name: workload for name, workload in found.items() if workload is not None}

    def _workload(self, fingerprint: str) -> Workload | None:
        rows = self._rows("SELECT data FROM workloads WHERE fingerprint = ?", (fingerprint,))
        if not rows:
            return None
        named = {f"w_{name}": value for name, value in mapping(_unpacked(rows[0][0]), "workload").items()}
        return workload_from(SimpleNamespace(**{"w_source": {}, **named, "w_fingerprint": fingerprint}))

    def fingerprints(self, prefix: str, limit: int) -> list[str]:
        query = "SELECT fingerprint FROM workloads WHERE fingerprint >= ? AND fingerprint < ? ORDER BY 1 LIMIT ?"
        return [str(name) for (name,) in self._rows(query, (prefix, f"{prefix}g", limit))]

    def get_devices(self, fingerprints: Iterable[str]) -> dict[str, DeviceIdentity]:
        wanted = set(fingerprints)
        return {d.fingerprint: d for d in self.devices if d.fingerprint in wanted}

    def get_environments(self, fingerprints: Iterable[str]) -> dict[str, Environment]:
        wanted = set(fingerprints)
        return {e.strict: e for e in self.environments if e.strict in wanted}

    def calibrations(self) -> list[Calibration]:
        return [calibration_from(row) for row in self._sealed("calibrations", {})]

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if self.lost:
            return []
        with self._lock:
            if self._pid != os.getpid():  # SQLite's connections are not valid in a forked process
                self._connect()
            return list(self._sqlite.execute(query, values))

    def _condition(self, where: Where) -> tuple[str, list[Any]]:
        parts, values = ["1"], list[Any]()
        for name, value in where.items():
            if name == "extents":
                parts.append("extent BETWEEN ? AND ?")
                values += value
            elif name in ("loose", "environment"):
                fits = [n for n, e in self._environments.items() if value == (e.loose if name == "loose" else e.strict)]
                parts.append(f"environment IN ({','.join(map(str, fits))})")
            else:
                parts.append(f"{name} = ?")
                values.append(self._numbers.get(value, -1) if name == "device" else value)
        return " AND ".join(parts), values

    def _sealed(self, table: str, where: Where) -> Iterator[Any]:
        """Rows whose data match their checksum and their key."""
        condition, values = self._condition(where)
        names = KEYS[table]
        query = f"SELECT {', '.join(names)}, data, sha256 FROM {table} WHERE {condition}"
        for *columns, json, sha256 in self._rows(query, values):
            key = dict(zip(names, columns, strict=True))
            key["device"] = self._devices[key["device"]].fingerprint
            if "environment" in key:
                key["environment"] = self._environments[key["environment"]].strict
            if not isinstance(json, str) or hashlib.sha256(json.encode(errors="replace")).hexdigest() != sha256:
                raise Damaged(f"a row of {table} fails its SHA-256")
            data = mapping(_json(json), "data")
            if data.pop("key") != list(key.values()):
                raise Damaged(f"a row of {table} is not under its own key")
            yield SimpleNamespace(**{**data, **key})

    def _listed(self, where: Where, environment: Environment | None = None, *, artifacts: bool = True) -> list[Listed]:
        found = []
        for row in self._sealed("schedules", where):
            row.params = row.config
            row.config = None if row.params is None else config_key(mapping(row.params, "configuration"))
            for name in ("workload", "policy", "family"):
                text(getattr(row, name), name)
            found.append(Listed(schedule_from(row), row.artifact))
        return found

    def _loaded(self, listed: Listed) -> Schedule:
        if listed.artifact is None:
            return listed.schedule
        fingerprint = str(listed.artifact)
        rows = self._rows("SELECT data FROM artifacts WHERE fingerprint = ?", (fingerprint,))
        if not rows:
            raise Damaged(f"artifact {fingerprint[:12]} is missing")
        data = mapping(_unpacked(rows[0][0]), "artifact")
        code: dict[str, bytes] = {}
        for sha256 in {kernel["sha256"] for kernel in data["kernels"]} - {None}:
            for (found,) in self._rows("SELECT bytes FROM code WHERE sha256 = ?", (sha256,)):
                code[sha256] = found if isinstance(found, bytes) else b""
        return replace(listed.schedule, artifact=artifact_from(fingerprint, data, code))

    def _around(self, where: Where, extent: int, limit: int) -> list[tuple[int, str]]:
        condition, values = self._condition(where)
        query = f"SELECT DISTINCT extent, workload FROM schedules WHERE {condition} AND extent"
        above = self._rows(f"{query} >= ? ORDER BY extent, workload LIMIT ?", (*values, extent, limit))
        down = f"{query} < ? ORDER BY extent DESC, workload DESC LIMIT ?"
        below = self._rows(down, (*values, extent, limit))
        return [(integer(rows, "number of rows"), str(workload)) for rows, workload in (*above, *below)]

    def _decided(self, workloads: Sequence[str]) -> Mapping[str, float]:
        return dict.fromkeys(workloads, float(int(self._seal.checksum.hex()[:12], 16)))

    def _verdicts(self, where: Where) -> list[Verdict]:
        return [verdict_from(row) for row in self._sealed("verdicts", where)]

    def _condemn(self, error: BaseException) -> None:
        """Stop using the file, and warn once."""
        text = safe_line(f"the snapshot {self.name} is damaged ({why(error)}) and is not used", 500)
        if not self.lost:
            self.problems.append(text)
            log.warning("autotune: %s", text)
        self.lost = text


def _guarded(method: Callable[..., Any], nothing: Callable[[], Any] | None) -> Callable[..., Any]:
    """Wrap ``method``: on damage, give the snapshot up and return ``nothing()``, or raise UserError if it is None."""

    @functools.wraps(method)
    def asked(self: Snapshot, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except _FAILED as e:
            if nothing is None:
                raise self._damaged(e) from None
            self._condemn(e)
            return nothing()

    return asked


_ASKED: dict[str, Callable[[], Any] | None] = {
    "get_schedule": NoneType, "family_schedules": list, "nearest": list, "tuned_under": list, "get_workloads": dict,
    "fingerprints": list, "get_verdict": NoneType,
    "schedules": None, "verdicts": None, "calibrations": None, "check": None,
}  # fmt: skip
"""Methods of look-ups with their results in a damaged snapshot; then those that show, import or check the file."""
for _name, _nothing in _ASKED.items():
    setattr(Snapshot, _name, _guarded(getattr(Snapshot, _name), _nothing))


def compare(path: Path, file: IO[bytes], seal: Seal) -> None:
    """Compare the pages of a snapshot with its seal; raises UserError if they differ."""
    if checksum(file, seal.length, seal.form) != seal.checksum:
        raise UserError(f"the snapshot {path} is not used: it does not match its seal, since it is damaged or changed")


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _json(text: Any) -> Any:
    found = from_json_text(text) if isinstance(text, (str, bytes)) else None
    if found is None:
        raise Damaged("a value is not JSON")
    return found


def _unpacked(data: Any) -> Any:
    if not isinstance(data, bytes):
        raise Damaged("a value is not compressed JSON")
    unpack = zlib.decompressobj()
    text = unpack.decompress(data, LARGEST_VALUE)
    if not unpack.eof:
        raise Damaged("a value is cut short, or far too large")
    return _json(text)


def sealed(data: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a row's ``data``, and its SHA-256."""
    text = canonical_json(data)
    return text, hashlib.sha256(text.encode()).hexdigest()


def packed(data: Mapping[str, Any]) -> bytes:
    """Compressed JSON."""
    return zlib.compress(canonical_json(data).encode(), 6)
