"""What a snapshot is made of: SQLite pages, a digest of each chunk of them, then a seal.

Here are the tables, and the checks of a file that need no SQL: whether it is a snapshot, of which version, and whole.
SQLite reads no further than the number of pages that its header tells, so what stands behind them does not disturb it.

The digests are a tree of two levels (R. Merkle, A Digital Signature Based on a Conventional Encryption Function, 1987):
the seal has the digest of the digests, the root, and that is what is signed. So a reader that has compared the digests
with the root can compare each chunk when it reads it, and none can be changed, moved, left out or taken from another
file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autotune.errors import UserError, pasted

SUFFIX = ".atdb"
APPLICATION = 0x41544442  # "ATDB", SQLite's application_id
VERSION = 2
"""Of the form, SQLite's user_version. A reader refuses every other one."""

LARGEST = 64 << 30  # bytes: more is an accident
LARGEST_VALUE = 64 << 20  # bytes of one value: a cubin, or a graph as JSON

TABLES = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE devices (number INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, identity TEXT NOT NULL)",
    "CREATE TABLE environments (number INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, versions TEXT NOT NULL)",
    "CREATE TABLE workloads (fingerprint TEXT PRIMARY KEY, data BLOB NOT NULL)",
    (
        "CREATE TABLE schedules (workload TEXT, device INTEGER, environment INTEGER, policy TEXT, family TEXT NOT NULL,"
        " extent INTEGER NOT NULL, data TEXT NOT NULL, sha256 TEXT NOT NULL,"
        " PRIMARY KEY (workload, device, environment, policy))"
    ),
    "CREATE INDEX nearest ON schedules (device, family, extent, workload, environment)",
    "CREATE TABLE artifacts (fingerprint TEXT PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE code (sha256 TEXT PRIMARY KEY, bytes BLOB NOT NULL)",
    (
        "CREATE TABLE verdicts (graph TEXT, device INTEGER, environment INTEGER, mode TEXT, data TEXT NOT NULL,"
        " sha256 TEXT NOT NULL, PRIMARY KEY (graph, device, environment, mode))"
    ),
    (
        "CREATE TABLE calibrations (device INTEGER, kind TEXT, data TEXT NOT NULL, sha256 TEXT NOT NULL,"
        " PRIMARY KEY (device, kind))"
    ),
)
"""A file with any other table, index, view or trigger is refused. JSON in ``data`` of workloads and artifacts is
compressed (zlib); ``sha256`` is that of ``data``. What has a fingerprint is checked by it. (Tables have rowids:
without, SQLite spends a page on each row of a kilobyte.)"""

CHUNK = 16 << 10
"""Bytes for which there is a digest; the last chunk may be shorter."""

SQLITE = b"SQLite format 3\0"
_MAGIC = b"autotune seal 2\n"
_SEAL = struct.Struct("<16sQ32s32s64s")
SEAL_BYTES = _SEAL.size
NOTHING = bytes(32)


@dataclass(frozen=True)
class Seal:
    """What stands at the end.

    Attributes:
        length: bytes of the pages.
        root: SHA-256 of the digests, which are the SHA-256 of each chunk, 32 bytes, one after the other.
        key: SHA-256 of the public key that belongs to ``signature``; zeros where nobody signed.
        signature: Ed25519, of :meth:`message`.
    """

    length: int
    root: bytes
    key: bytes = NOTHING
    signature: bytes = bytes(64)

    @property
    def signed(self) -> bool:
        return self.key != NOTHING

    def message(self) -> bytes:
        """What is signed."""
        return b"autotune snapshot 2" + struct.pack("<QQ", self.length, CHUNK) + self.root

    def packed(self) -> bytes:
        return _SEAL.pack(_MAGIC, self.length, self.root, self.key, self.signature)


def digests_of(file: IO[bytes], length: int) -> bytes:
    """The digest of each chunk of a file's first bytes; of fewer where it has fewer."""
    found = []
    file.seek(0)
    while length > 0 and (part := file.read(min(length, CHUNK))):
        found.append(hashlib.sha256(part).digest())
        length -= len(part)
    return b"".join(found)


def root_of(digests: bytes) -> bytes:
    return hashlib.sha256(digests).digest()


def stored_digests(file: IO[bytes], seal: Seal) -> bytes:
    """The digests behind the pages of a snapshot's file; they are right where their root is the seal's."""
    file.seek(seal.length)
    return file.read(_digest_bytes(seal.length))


def _digest_bytes(length: int) -> int:
    return 32 * -(-length // CHUNK)


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether a name means a snapshot: by what the file holds, damaged or not; where it holds no database, or is not
    there, by how the name ends."""
    try:
        head = _head(Path(path))
    except FileNotFoundError:
        return os.fspath(path).endswith(SUFFIX)
    except (OSError, ValueError, UserError):
        return False
    return _is_ours(head) or (os.fspath(path).endswith(SUFFIX) and not head.startswith(SQLITE))


def is_database(path: str | os.PathLike[str]) -> bool:
    """Whether a file that is there holds an SQLite database that is no snapshot."""
    try:
        head = _head(Path(path))
    except (OSError, ValueError, UserError):
        return False
    return head.startswith(SQLITE) and not _is_ours(head)


def holds_snapshot(path: Path) -> bool:
    """Whether a file that is there holds a snapshot, of any version, damaged or not."""
    try:
        return _is_ours(_head(path))
    except (OSError, ValueError, UserError):
        return False


def _head(path: Path) -> bytes:
    with _regular(path) as file:
        return file.read(72)


def _is_ours(head: bytes) -> bool:
    return head.startswith(SQLITE) and head[68:72] == APPLICATION.to_bytes(4, "big")


def _regular(path: Path) -> IO[bytes]:
    """A file to read that has an end; a device or a pipe may have none. Raises OSError or UserError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is no file: name a snapshot that `autotune export` wrote")
        if found.st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST >> 30} GiB: that is no snapshot of ours")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def opened(path: Path) -> tuple[IO[bytes], Seal]:
    """A snapshot's file and its seal, after what can be seen of it without reading it all.

    Raises:
        UserError: in one line: it is not there, no snapshot, of another version, or cut short.
    """
    try:
        file = _regular(path)
    except FileNotFoundError:
        raise UserError(
            f"there is no snapshot {path}: `{pasted('autotune', 'export', str(path))}` writes one"
        ) from None
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read the snapshot {path}: {getattr(e, 'strerror', None) or e}") from None
    try:
        return file, _checked(path, file)
    except BaseException:
        file.close()
        raise


def _checked(path: Path, file: IO[bytes]) -> Seal:
    head, size = file.read(100), os.fstat(file.fileno()).st_size
    if len(head) < 100 or not _is_ours(head):
        raise UserError(f"{path} is no snapshot of autotune's, or is damaged: `autotune export` writes one")
    version = int.from_bytes(head[60:64], "big")
    if version != VERSION:
        better = "upgrade autotune" if version > VERSION else "export it again"
        raise UserError(f"{path} is a snapshot of form {version}, this autotune reads form {VERSION}: {better}")
    page = int.from_bytes(head[16:18], "big")
    length = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
    file.seek(max(size - SEAL_BYTES, 0))
    last = file.read(SEAL_BYTES)
    if size != length + _digest_bytes(length) + SEAL_BYTES or head[18:20] != b"\1\1" or not last.startswith(_MAGIC):
        raise UserError(f"the snapshot {path} is damaged or cut short: copy or export it again")
    _, told, root, key, signature = _SEAL.unpack(last)
    if told != length:
        raise UserError(f"the snapshot {path} is damaged: its seal is of another file; copy or export it again")
    return Seal(length, root, key, signature)
