"""SQLite files: options for several writing processes, and detection of shared file systems."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import QueuePool

from autotune.errors import UserError, quoted_command
from autotune.store.connection.faults import reason
from autotune.store.connection.urls import no_database
from autotune.store.damage import from_json_text
from autotune.store.snapshot_form import is_snapshot
from autotune.workload import canonical_json

log = logging.getLogger(__name__)
_ANOTHER = "name another by --db or AUTOTUNE_DB"

_warned: set[Path] = set()
_headers: dict[tuple[int, int], int] = {}
"""Descriptors of databases on shared file systems, by device and inode."""


def sqlite_engine(url: sa.URL, readonly: bool, timeout_s: float) -> sa.Engine:
    """An engine for a file, which is created if missing, unless ``readonly``; raises UserError."""
    path = Path(str(url.database))
    if is_snapshot(path):
        raise UserError(
            f"{path} is a snapshot, which is read-only: name a database by --db or AUTOTUNE_DB"
            f" (`{quoted_command('autotune', 'import', str(path))}` adds the snapshot to one)"
        )
    shared = shared_type(path)
    uri = f"file:{quote(os.fsencode(path))}"
    if readonly:
        if not path.is_file():
            raise UserError(no_database(path))
        uri += _readonly_mode(uri, path, shared)
    else:
        _prepare_sqlite_file(path, timeout_s, shared)
        uri += "?mode=rw"  # does not create an empty file if this one is removed later

    def connect() -> sqlite3.Connection:
        # isolation_level None: the driver begins no transaction, the "begin" event below does.
        connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        connection.text_factory = _text
        connection.execute("PRAGMA foreign_keys = ON")
        # A loss of power can corrupt a file without a write-ahead log.
        connection.execute(f"PRAGMA synchronous = {'FULL' if shared else 'NORMAL'}")
        return connection

    engine = sa.create_engine(
        url,
        creator=connect,
        poolclass=QueuePool,
        json_serializer=canonical_json,
        json_deserializer=from_json_text,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes the write lock at the beginning: upgrading a read lock later can fail without waiting.
        immediate = connection.get_execution_options().get("autotune_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _text(data: bytes) -> str:
    return data.decode(errors="replace")  # accept a damaged text, to name its row in a message


def _readonly_mode(uri: str, path: Path, shared: str | None) -> str:
    """URI options for reading ``path``. They exclude the write-ahead log on a read-only medium or on a file system
    shared by machines, since it cannot be used there."""
    wal = path.with_name(path.name + "-wal")
    modes = ["?mode=ro", "?mode=ro&immutable=1"]
    if shared and _has_log(path):
        if wal.exists() and wal.stat().st_size:
            raise UserError(_logged(path, shared))
        del modes[0]
    for mode in modes:
        if "immutable" in mode and wal.exists() and wal.stat().st_size:
            break  # its newest rows are in the unreadable log
        try:
            probe = sqlite3.connect(uri + mode, uri=True, timeout=5.0)
            try:
                probe.execute("SELECT count(*) FROM sqlite_master").fetchone()
            finally:
                probe.close()
            return mode
        except UnicodeDecodeError:  # SQLite's message, with text from a damaged file
            error = sqlite3.DatabaseError("database disk image is malformed")
        except sqlite3.DatabaseError as e:
            error = e
    raise UserError(f"cannot read the database {path}: {error}") from None


def _has_log(path: Path) -> bool:
    """Return True for a database whose header requires a write-ahead log.

    The file stays open: closing it would release SQLite's locks on it in this process.
    """
    try:
        found = os.stat(path)
        name = found.st_dev, found.st_ino
        if name not in _headers:
            _headers[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(_headers[name], 2, 18) == b"\2\2"
    except OSError:
        return False


def _logged(path: Path, shared: str) -> str:
    return (
        f"the database {path} is on {shared}, and a process writes it with a write-ahead log, which machines cannot"
        " share: end that process, or use a PostgreSQL server"
    )


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Temporary name of a database, renamed to ``path`` at the end of the context, when the database is complete.

    A database that another process created meanwhile is kept instead. On a file system without links, the name is
    ``path`` itself.

    Raises:
        UserError: the folder cannot be written, or from the context; the file is removed then.
    """
    _check_writable(path)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".autotune-", ignore_cleanup_errors=True) as folder:
            made = Path(folder) / path.name
            try:
                if not _can_link(Path(folder)):
                    made = path
                yield made
            except UserError as e:
                raise type(e)(str(e).replace(str(made), str(path))) from e.__cause__
            if made != path:
                with suppress(FileExistsError):
                    os.link(made, path)
    except OSError as e:
        raise UserError(f"cannot create the database {path} ({e.strerror or e}): {_ANOTHER}") from None


def _can_link(folder: Path) -> bool:
    one, other = folder / "one", folder / "other"
    try:
        one.touch()
        os.link(one, other)
    except OSError:
        return False
    return True


def _check_writable(path: Path) -> None:
    """Create the folder, and check that the file can be written; raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot create the folder {path.parent} for the database ({e.strerror}): {_ANOTHER}") from None
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it, such as {path / 'autotune.db'}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UserError(f"cannot write the database {path} (SQLite needs the file and its folder writable): {_ANOTHER}")


def _prepare_sqlite_file(path: Path, timeout_s: float, shared: str | None) -> None:
    """Create the folder, check that the file can be written, and enable write-ahead logging, or disable it on a shared
    file system. The mode is persistent."""
    _check_writable(path)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = sqlite3.connect(path, timeout=timeout_s)
            try:
                connection.execute(f"PRAGMA journal_mode = {'DELETE' if shared else 'WAL'}").fetchone()
            finally:
                connection.close()
            if shared and path not in _warned:
                _warned.add(path)
                log.warning(
                    "autotune: the database %s is on %s: autotune writes it without a write-ahead log, so writers and "
                    "readers wait for each other; for several machines, use a PostgreSQL server",
                    path,
                    shared,
                )
            return
        except UnicodeDecodeError:
            malformed = sqlite3.DatabaseError("malformed")
            raise UserError(reason(sa.URL.create("sqlite", database=str(path)), malformed)) from None
        except sqlite3.DatabaseError as e:
            if shared and "locked" in str(e) and time.monotonic() > deadline and _has_log(path):
                raise UserError(_logged(path, shared)) from None
            # Changing the mode does not always wait for other processes that change it.
            if "locked" not in str(e) or time.monotonic() > deadline:
                raise UserError(reason(sa.URL.create("sqlite", database=str(path)), e)) from None
        time.sleep(0.02)


MOUNTS = Path("/proc/self/mounts")

SHARED = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs",
    "glusterfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "ncpfs", "virtiofs", "vboxsf", "wekafs", "quobyte", "panfs",
})  # fmt: skip
"""The kernel's names of file systems that other machines may write."""

SHARED_PROGRAMS = frozenset({
    "sshfs", "s3fs", "gcsfuse", "goofys", "rclone", "glusterfs", "ceph", "ceph-fuse", "juicefs", "mfs", "moosefs",
    "lizardfs", "seaweedfs", "blobfuse", "blobfuse2", "davfs", "mount-s3", "smbnetfs", "curlftpfs", "beegfs",
    "quobyte", "hdfs", "alluxio",
})  # fmt: skip
"""FUSE file systems (``fuse.sshfs``) that other machines may write."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def shared_type(path: Path) -> str | None:
    """The type of a path's file system, if other machines may write it, else None.

    None too if the kernel lists no mounts.
    """
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
        real = path.resolve()
    except (OSError, RuntimeError):
        return None
    longest, found = -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_ESCAPE.sub(lambda m: chr(int(m[1], 8)), fields[1]))
        # A later mount hides earlier ones at the same path.
        if len(point.parts) >= longest and real.is_relative_to(point):
            longest, found = len(point.parts), fields[2]
    kind, _, program = found.partition(".")
    shared = program in SHARED_PROGRAMS if kind == "fuse" else found in SHARED
    return found if shared else None
