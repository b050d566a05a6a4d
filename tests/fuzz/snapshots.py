"""Mutated snapshots: bytes as they are, and rows under a new and right seal."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.store import Schedule, Store
from autotune.store.codec import artifact_id
from autotune.store.snapshot import Snapshot
from autotune.store.snapshot_form import SEAL_BYTES
from autotune.store.snapshot_writer import export_snapshot
from tests.fuzz.values import altered, as_text, flipped, hostile
from tests.support.rows import ENVIRONMENT, GPU
from tests.support.snapshots import keys, resealed

PAGE = 4096

if TYPE_CHECKING:
    from tests.fuzz.check import Fuzz


class Snapshots:
    """A sound snapshot, and the checks of mutated copies of it."""

    def __init__(self, fuzz: Fuzz) -> None:
        self._fuzz, self._file = fuzz, fuzz.folder / "s.atdb"
        with Store.open(fuzz.full, readonly=True) as store:
            export_snapshot(store, self._file)
            self._every = store.schedules(artifacts=True)
            mine, self._key = keys(fuzz.folder)
            self._signed, self._older = fuzz.folder / "signed.atdb", fuzz.folder / "older.atdb"
            export_snapshot(store, self._signed, key=mine)
            export_snapshot(store, self._older, key=mine, device=lambda device: device == GPU)
        sound = [self._found(Snapshot(file, key=str(self._key))) for file in (self._signed, self._older)]
        self._known = list(zip(*sound, strict=True))
        self.kinds: dict[str, Callable[[random.Random], str]] = {
            "snapshot bytes": self._bytes,
            "snapshot rows": self._rows,
            "snapshot artifacts": self._artifacts,
            "signed snapshot": self._signed_bytes,
        }

    def _use(self, file: Path, chance: random.Random) -> str:
        """Deploy from it, and now and then import it."""
        snapshot = Snapshot(file)
        try:
            result = self._fuzz.looked_up(snapshot)
            snapshot.get_verdict("a" * 64, GPU.fingerprint, ENVIRONMENT, "default")
            snapshot.state()
            with suppress(UserError):
                snapshot.check()
        finally:
            snapshot.close()
        if chance.randrange(8) == 0:
            from autotune.cli import app

            code = app.main(["show", "--db", str(file)])
            assert code in (0, 2), f"show ended with {code}"
        if chance.randrange(3) == 0:
            with suppress(UserError):
                self._fuzz.importing(file)
        return result

    def _bytes(self, chance: random.Random) -> str:
        file = self._fuzz.inner / "s.atdb"
        file.write_bytes(flipped(self._file.read_bytes(), chance))
        return self._use(file, chance)

    def _rows(self, chance: random.Random) -> str:
        file = self._fuzz.inner / "s.atdb"
        file.write_bytes(self._file.read_bytes())

        def change(c: sqlite3.Connection) -> None:
            tables = [r[0] for r in c.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = chance.choice(tables)
            columns = [r[1] for r in c.execute(f"PRAGMA table_info({table})")]
            rows = c.execute(f"SELECT * FROM {table}").fetchall()
            if rows:
                self._change(c, table, columns, chance.choice(rows), chance)

        resealed(file, change, vacuum=False)
        return self._use(file, chance)

    def _artifacts(self, chance: random.Random) -> str:
        """An artifact's launch data, or a cubin, changed under its right SHA-256 wherever it is named."""
        file = self._fuzz.inner / "s.atdb"
        file.write_bytes(self._file.read_bytes())

        def change(c: sqlite3.Connection) -> None:
            name, data = chance.choice(c.execute("SELECT fingerprint, data FROM artifacts").fetchall())
            artifact = json.loads(zlib.decompress(data))
            old, code = chance.choice(c.execute("SELECT sha256, bytes FROM code").fetchall())
            if old in json.dumps(artifact) and chance.random() < 0.5:
                other = flipped(code, chance)
                sha256 = hashlib.sha256(other).hexdigest()
                c.execute("UPDATE code SET sha256 = ?, bytes = ? WHERE sha256 = ?", (sha256, other, old))
                changed = json.loads(json.dumps(artifact).replace(old, sha256))
            else:
                changed = altered(artifact, chance)
            with suppress(ValueError, TypeError, RecursionError, OverflowError):
                new = artifact_id(changed)
                text = zlib.compress(as_text(changed, chance).encode(errors="surrogatepass"))
                c.execute("UPDATE artifacts SET fingerprint = ?, data = ? WHERE fingerprint = ?", (new, text, name))
                for (row,) in c.execute("SELECT data FROM schedules").fetchall():
                    named = row.replace(name, new)
                    digest = hashlib.sha256(named.encode()).hexdigest()
                    c.execute("UPDATE schedules SET data = ?, sha256 = ? WHERE data = ?", (named, digest, row))

        resealed(file, change, vacuum=False)
        return self._use(file, chance)

    def _signed_bytes(self, chance: random.Random) -> str:
        """A signed snapshot under its pinned key: damaged, with pages of another that the same key signed, and with
        the seal of another. Nothing is read of it but what was signed."""
        data, other = (bytearray(f.read_bytes()) for f in chance.sample((self._signed, self._older), 2))
        kind = chance.randrange(4)
        if kind == 0:
            data = bytearray(flipped(bytes(data), chance))
        elif kind == 1:  # a page of another snapshot, in its place or elsewhere
            at = PAGE * chance.randrange(-(-len(other) // PAGE))
            to = at if chance.random() < 0.5 else PAGE * chance.randrange(-(-len(data) // PAGE))
            data[to : to + PAGE] = other[at : at + PAGE]
        elif kind == 2:  # two of its pages, exchanged
            one, two = (PAGE * chance.randrange(len(data) // PAGE) for _ in range(2))
            data[one : one + PAGE], data[two : two + PAGE] = data[two : two + PAGE], data[one : one + PAGE]
        else:
            tail = chance.choice((SEAL_BYTES, SEAL_BYTES + PAGE))
            data[-tail:] = other[-tail:]
        file = self._fuzz.inner / "s.atdb"
        file.write_bytes(data)
        snapshot = Snapshot(file, key=str(self._key))
        try:
            result = self._fuzz.looked_up(snapshot)
            found = self._found(snapshot)
        finally:
            snapshot.close()
        assert all(f is None or f in known for f, known in zip(found, self._known, strict=True)), "not what was signed"
        return result

    def _found(self, snapshot: Snapshot) -> list[Schedule | None]:
        names = [s.key.workload for s in self._every]
        devices = {s.key.device for s in self._every}
        return [snapshot.get_schedule(w, d, match="ignore") for w in sorted(set(names)) for d in sorted(devices)]

    def _change(
        self, c: sqlite3.Connection, table: str, columns: list[str], row: tuple[Any, ...], chance: random.Random
    ) -> None:
        name = chance.choice(columns)
        old = row[columns.index(name)]
        new = _value(old, chance)
        changes = {name: new}
        if name == "data" and "sha256" in columns and isinstance(new, str) and chance.random() < 0.8:
            changes["sha256"] = hashlib.sha256(new.encode(errors="surrogatepass")).hexdigest()
        with suppress(sqlite3.Error, OverflowError, UnicodeError):
            where = " AND ".join(f"{n} IS ?" for n in columns)
            changed = ", ".join(f"{n} = ?" for n in changes)
            c.execute(f"UPDATE {table} SET {changed} WHERE {where}", (*changes.values(), *row))


def _value(old: Any, chance: random.Random) -> Any:
    if isinstance(old, bytes):
        with suppress(zlib.error, ValueError):
            data = as_text(altered(json.loads(zlib.decompress(old)), chance), chance)
            return zlib.compress(data.encode(errors="surrogatepass"))
        return flipped(old, chance)
    if isinstance(old, str):
        with suppress(ValueError):
            return as_text(altered(json.loads(old), chance), chance)
    new = hostile(chance)
    return new if isinstance(new, (str, int, float, type(None))) else json.dumps(new)
