"""The pages of a signed snapshot, each chunk compared with its digest when SQLite reads it.

Python's ``sqlite3`` lets nobody see what it reads. The package ``apsw`` does: SQLite then gets its pages from here. So
opening reads the digests, 1/512 of the file, and not the rest. Without ``apsw`` the whole file is compared when it is
opened.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from autotune.errors import UserError
from autotune.store.health.damage import Damaged
from autotune.store.snapshots.form import CHUNK, Seal, digests_of, root_of, stored_digests

_KEPT = 256
"""Chunks that are kept after they were compared: 4 MiB."""


class Pages:
    """A snapshot's pages. Every byte that :meth:`read` gives is one that was signed."""

    _descriptor = -1

    def __init__(self, path: Path, file: IO[bytes], seal: Seal) -> None:
        """Compare the digests with the root.

        Args:
            file: at ``path``, open; it may be closed afterwards.
            seal: whose signature is right.

        Raises:
            UserError: they are not what was signed.
        """
        self._digests, self.length = stored_digests(file, seal), seal.length
        if root_of(self._digests) != seal.root:
            raise UserError(f"the snapshot {path} is not what was signed: it is damaged or was changed; not used")
        self._descriptor = os.dup(file.fileno())
        self._chunk = lru_cache(maxsize=_KEPT)(self._compared)

    def _compared(self, number: int) -> bytes:
        begin = number * CHUNK
        data = os.pread(self._descriptor, min(CHUNK, self.length - begin), begin)
        if hashlib.sha256(data).digest() != self._digests[32 * number : 32 * number + 32]:
            raise Damaged("a part of it is not what was signed")
        return data

    def read(self, amount: int, offset: int) -> bytes:
        """Bytes from ``offset`` on; fewer at the end.

        Raises:
            Damaged: they are not what was signed.
        """
        end = min(offset + amount, self.length)
        if offset >= end:
            return b""
        first = offset // CHUNK
        parts = [self._chunk(number) for number in range(first, -(-end // CHUNK))]
        begin = offset - first * CHUNK
        return b"".join(parts)[begin : begin + end - offset]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


def compare_all(path: Path, file: IO[bytes], seal: Seal) -> None:
    """See that the whole of a snapshot is what its seal says.

    Raises:
        UserError: it is not.
    """
    digests = digests_of(file, seal.length)
    if root_of(digests) != seal.root or stored_digests(file, seal) != digests:
        raise UserError(f"the snapshot {path} is not what was sealed: it is damaged or was changed; not used")


def can_compare() -> bool:
    """Whether chunks can be compared when they are read: ``apsw`` is installed."""
    try:
        import apsw  # noqa: F401
    except ImportError:
        return False
    return True


class Connection:
    """SQLite on :class:`Pages`, read-only, with as much of ``sqlite3.Connection`` as a snapshot needs."""

    def __init__(self, pages: Pages) -> None:
        import apsw

        _register()
        name = f"snapshot-{id(pages)}"
        _open[name] = pages
        self._error = apsw.Error
        with _ErrorsOfSqlite3(self._error):
            self._apsw = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY, vfs=_VFS)

    def setlimit(self, category: int, limit: int) -> None:
        self._apsw.limit(category, limit)

    def execute(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows; raises sqlite3.Error, or Damaged where a page is not what was signed."""
        with _ErrorsOfSqlite3(self._error):
            return iter(self._apsw.execute(query, tuple(values)).fetchall())

    def close(self) -> None:
        self._apsw.close()


class _ErrorsOfSqlite3:
    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._error):
            raise sqlite3.DatabaseError(str(error)) from None


_VFS = "autotune"
_open: WeakValueDictionary[str, Pages] = WeakValueDictionary()


@cache
def _register() -> object:
    """Make SQLite's ``apsw`` ask :class:`Pages` for what it reads; the object that it asks, which has to live on."""
    import apsw

    class File:
        """What SQLite asks of a file that nobody writes to, with the names that it has for it."""

        def __init__(self, pages: Pages) -> None:
            self._pages = pages

        def xRead(self, amount: int, offset: int) -> bytes:
            return self._pages.read(amount, offset)

        def xFileSize(self) -> int:
            return self._pages.length

        def xLock(self, level: int) -> None:
            pass

        def xUnlock(self, level: int) -> None:
            pass

        def xCheckReservedLock(self) -> bool:
            return False

        def xFileControl(self, operation: int, pointer: int) -> bool:
            return False

        def xSectorSize(self) -> int:
            return 4096

        def xDeviceCharacteristics(self) -> int:
            return apsw.SQLITE_IOCAP_IMMUTABLE

        def xClose(self) -> None:
            pass

    class Files(apsw.VFS):
        """Files by the names in ``_open``, and no other: no journal, no temporary file."""

        def __init__(self) -> None:
            super().__init__(_VFS, "")

        def xOpen(self, name: Any, flags: list[int]) -> Any:
            return File(_open[name if isinstance(name, str) else name.filename()])

        def xFullPathname(self, name: str) -> str:
            return name

        def xAccess(self, pathname: str, flags: int) -> bool:
            return False

        def xDelete(self, filename: str, syncdir: bool) -> None:
            raise PermissionError(filename)

    return Files()
