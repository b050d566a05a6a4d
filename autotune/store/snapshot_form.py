"""The form of a snapshot: SQLite pages, then a seal with their checksum, which may be signed.

This module has the tables, and the checks of a file without SQL: that it is a snapshot, its form, and its length.
SQLite only reads the number of pages in its header, and ignores the seal.

Signatures are Ed25519, by the package ``cryptography``. A deployment pins a public key, which cannot sign. A keyed hash
would need no package, but every machine that checks it could forge it, and a fleet has many.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from autotune.errors import UserError, quoted_command

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SUFFIX = ".atdb"
APPLICATION = 0x41544442  # "ATDB", SQLite's application_id
VERSION = 3
"""Version of the form, SQLite's user_version. Form 2 is supported too, but no other."""

LARGEST = 64 << 30  # bytes; a larger file is an error
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
compressed (zlib); ``sha256`` is that of ``data``. Fingerprints serve as checksums of their rows. (Tables have rowids:
without them, SQLite uses a page for each row of a kilobyte.)"""

Kind = Literal["snapshot", "database", "bundle", "other", "missing", "unreadable"]
KEYS = {
    "schedules": ("workload", "device", "environment", "policy", "family", "extent"),
    "verdicts": ("graph", "device", "environment", "mode"),
    "calibrations": ("device", "kind"),
}
"""Columns repeated in ``data`` as the list ``key``, with fingerprints in place of numbers."""
SQLITE = b"SQLite format 3\0"
NOTHING = bytes(32)
_MAGIC = {2: b"autotune seal 2\n", 3: b"autotune seal 3\n"}
_SEAL = struct.Struct("<16sQ32s32s64s")
SEAL_BYTES = _SEAL.size
_PART = 16 << 10
"""Bytes of a part. Form 2 has a SHA-256 of each part after the pages, and the SHA-256 of these in its seal."""


@dataclass(frozen=True)
class Seal:
    """The end of a file.

    Attributes:
        length: bytes of the pages.
        checksum: of the pages, from :func:`checksum`.
        key: SHA-256 of the public key for ``signature``; zeros without a signature.
        signature: Ed25519, of :meth:`message`.
    """

    length: int
    checksum: bytes
    key: bytes = NOTHING
    signature: bytes = bytes(64)
    form: int = VERSION

    @property
    def signed(self) -> bool:
        return self.key != NOTHING

    def message(self) -> bytes:
        """The bytes that are signed."""
        sizes = (self.length, _PART) if self.form == 2 else (self.length,)
        return b"autotune snapshot %d" % self.form + struct.pack(f"<{len(sizes)}Q", *sizes) + self.checksum

    def packed(self) -> bytes:
        return _SEAL.pack(_MAGIC[self.form], self.length, self.checksum, self.key, self.signature)


def checksum(file: IO[bytes], length: int, form: int = VERSION) -> bytes:
    """SHA-256 of a file's first ``length`` bytes; in form 2, of the SHA-256 of each part of them."""
    total = hashlib.sha256()
    file.seek(0)
    while length > 0 and (part := file.read(min(length, _PART))):
        total.update(hashlib.sha256(part).digest() if form == 2 else part)
        length -= len(part)
    return total.digest()


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The form of a file, by its first bytes: a snapshot of any form, damaged or not, another SQLite file, or a zip
    archive, such as the bundles of earlier versions."""
    if _is_database(path):
        return "database"
    try:
        with _regular(Path(path)) as file:
            head = file.read(72)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, UserError):
        return "unreadable"
    if head.startswith(SQLITE):
        return "snapshot" if _is_ours(head) else "database"
    return "bundle" if head.startswith(b"PK\3\4") else "other"


def _is_database(path: str | os.PathLike[str]) -> bool:
    """True for an SQLite file that is no snapshot, as SQLite reads it; False for a damaged one.

    Another open file would release SQLite's locks when it is closed: those of POSIX belong to the process. Another
    process would then delete the write-ahead log while this one uses it, and this one's next rows would be lost.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or not found.st_size:
            return False
        uri = f"file:{quote(os.fsencode(Path(path).absolute()))}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            return bool(application != APPLICATION)
    except (OSError, ValueError, sqlite3.Error):
        return False


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Return True if a name refers to a snapshot, by the file's form or, if unknown or missing, by its suffix."""
    kind = kind_of(path)
    return kind == "snapshot" or (kind in ("other", "bundle", "missing") and os.fspath(path).endswith(SUFFIX))


def _is_ours(head: bytes) -> bool:
    return head.startswith(SQLITE) and head[68:72] == APPLICATION.to_bytes(4, "big")


def _regular(path: Path) -> IO[bytes]:
    """Open a regular file; a device or a pipe may have no end. Raises OSError or UserError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is not a file: name a snapshot that `autotune export` wrote")
        if found.st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST >> 30} GiB, so it is not a snapshot")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def opened(path: Path) -> tuple[IO[bytes], Seal]:
    """A snapshot's file and its seal, after the checks that do not read the whole file.

    Raises:
        UserError: the file is missing, not a snapshot, of another version, or truncated; one line.
    """
    try:
        file = _regular(path)
    except FileNotFoundError:
        raise UserError(
            f"there is no snapshot {path}: `{quoted_command('autotune', 'export', str(path))}` writes one"
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
        raise UserError(f"{path} is not a snapshot, or is damaged: `autotune export` writes snapshots")
    version = int.from_bytes(head[60:64], "big")
    if version not in _MAGIC:
        better = "upgrade autotune" if version > VERSION else "export it again"
        raise UserError(f"{path} is a snapshot of format {version}, and this autotune reads 2 and 3: {better}")
    page = int.from_bytes(head[16:18], "big")
    length = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
    file.seek(max(size - SEAL_BYTES, 0))
    last = file.read(SEAL_BYTES)
    parts = 32 * -(-length // _PART) if version == 2 else 0
    whole = size == length + parts + SEAL_BYTES and last.startswith(_MAGIC[version])
    if not whole or head[18:20] != b"\1\1":  # with another value SQLite would look for a write-ahead log
        raise UserError(f"the snapshot {path} is damaged or cut short: copy or export it again")
    _, sealed, digest, key, signature = _SEAL.unpack(last)
    if sealed != length:
        raise UserError(f"the snapshot {path} is damaged, as its seal is of another file: copy or export it again")
    return Seal(length, digest, key, signature, version)


_LARGEST_KEY = 64 << 10
_HOW = "`openssl genpkey -algorithm ed25519 -out KEY` makes one, `openssl pkey -in KEY -pubout` its public half"


def signed(seal: Seal, key: str | os.PathLike[str]) -> Seal:
    """``seal`` with a signature.

    Args:
        key: file of a private Ed25519 key, PEM, without a passphrase.

    Raises:
        UserError: invalid or unreadable key, or the package is not installed.
    """
    private = private_key(key)
    return replace(seal, key=_name(private.public_key()), signature=private.sign(seal.message()))


def private_key(key: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """A private key for signing; raises UserError as :func:`signed`."""
    serialization, ed25519 = _cryptography()
    try:
        found = serialization.load_pem_private_key(_read(key), password=None)
    except (ValueError, TypeError):  # TypeError: it has a passphrase
        found = None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise UserError(f"{os.fspath(key)} is not a private Ed25519 key in PEM without a passphrase: {_HOW}")
    private: Ed25519PrivateKey = found
    return private


def check_signature(path: Path, seal: Seal, key: str | os.PathLike[str]) -> None:
    """Check that a snapshot's seal is signed by the owner of ``key``, without reading the pages.

    Args:
        key: file of a public Ed25519 key, PEM; or the text of one.

    Raises:
        UserError: not signed, signed with another key, invalid ``key``, or the package is not installed.
    """
    serialization, ed25519 = _cryptography()
    from cryptography.exceptions import InvalidSignature

    text = os.fspath(key)
    data = text.encode() if text.startswith("-----BEGIN") else _read(key)
    try:
        public = serialization.load_pem_public_key(data)
    except ValueError:
        public = None
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise UserError(f"the key for snapshots is not a public Ed25519 key in PEM: {_HOW}")
    if not seal.signed:
        raise UserError(f"the snapshot {path} is not signed, but a key requires it: export it with --sign KEYFILE")
    if seal.key != _name(public):
        raise UserError(f"the snapshot {path} is not used: it is signed with another key")
    try:
        public.verify(seal.signature, seal.message())
    except InvalidSignature:
        raise UserError(f"the snapshot {path} is not used: its signature is wrong") from None


def _name(public: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(public.public_bytes_raw()).digest()


def _read(key: str | os.PathLike[str]) -> bytes:
    try:
        with open(key, "rb") as file:
            return file.read(_LARGEST_KEY)
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read the key {os.fspath(key)}: {getattr(e, 'strerror', None) or e}") from None


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UserError("signatures need the package cryptography: run `pip install 'autotune-torch[sign]'`") from None
    return serialization, ed25519
