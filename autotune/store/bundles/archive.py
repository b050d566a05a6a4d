"""A bundle's archive: opened without trust, read piece by piece, every checksum compared."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from autotune.errors import UserError
from autotune.store.bundles.rows import OPTIONAL, TABLES, Tables
from autotune.store.health.damage import BROKEN, Damaged, from_json_text, why

FORM, VERSION = "autotune-bundle", 1
_LARGEST = 4 << 30  # bytes, unpacked: more is no bundle but an accident or an attack
_LARGEST_TABLE = 1 << 30  # bytes: what is in tables is held in memory
_LARGEST_ROW = 64 << 20
_LARGEST_CODE = 256 << 20
_LARGEST_MANIFEST = 64 << 20
_NOT_OURS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, MemoryError, *BROKEN)
"""What zipfile and json raise for files that are something else, cut short or encrypted."""


def is_bundle(path: Path) -> bool:
    """Whether a file that is there is a bundle, of any version, damaged or not."""
    try:
        with _regular(path) as file, zipfile.ZipFile(file) as archive, archive.open("manifest.json") as manifest:
            return f'"form":"{FORM}"'.encode() in manifest.read(200)
    except (OSError, UserError, *_NOT_OURS):
        return False


def _regular(path: Path) -> IO[bytes]:
    """A file to read that has an end; a device or a pipe may have none. Raises OSError or UserError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        os.close(descriptor)
        large = f"larger than {_LARGEST >> 30} GiB" if stat.S_ISREG(found.st_mode) else "no regular file"
        raise UserError(f"{path} is {large}: that is no bundle of ours")
    return os.fdopen(descriptor, "rb")


class Bundle:
    """A bundle that is open. A context manager; raises UserError in one line for whatever is wrong with the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            self._file = _regular(path)
        try:
            with self._told():
                self._archive = zipfile.ZipFile(self._file)
                self._sums = self._manifest()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.close()
        self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as e:
            if isinstance(e, OSError) and e.errno:
                raise UserError(f"cannot read the bundle {self._path}: {e.strerror}") from None
            raise UserError(f"{self._path} is not an autotune bundle, or is damaged ({why(e)}): export it again") from e
        except _NOT_OURS as e:
            raise UserError(f"{self._path} is not an autotune bundle, or is damaged ({why(e)}): export it again") from e

    def _manifest(self) -> dict[str, str]:
        """SHA-256 of the members by name."""
        members = self._archive.infolist()
        names = {info.filename for info in members}
        if len(names) != len(members):
            raise Damaged("two of its members have one name")
        if sum(info.file_size for info in members) > _LARGEST:
            raise UserError(f"{self._path} would unpack to more than {_LARGEST >> 30} GiB: that is no bundle of ours")
        with self._archive.open("manifest.json") as file:
            data = file.read(_LARGEST_MANIFEST + 1)
        manifest = json.loads(data) if len(data) <= _LARGEST_MANIFEST else {}
        if not isinstance(manifest, dict) or manifest.get("form") != FORM:
            raise UserError(f"{self._path} is not an autotune bundle: `autotune db export FILE` writes one")
        if manifest.get("version") != VERSION:
            found = manifest.get("version")
            raise UserError(f"{self._path} is a bundle of version {found}, this autotune reads {VERSION}: upgrade it")
        sums = {str(name): str(sha256) for name, sha256 in manifest["members"].items()}
        if missing := {*sums, *(f"{name}.jsonl" for name in TABLES)} - names:
            raise Damaged(f"its member {min(missing)} is missing")
        if len(sums) < len(TABLES) or any(f"{name}.jsonl" not in sums for name in TABLES):
            raise Damaged("its manifest names no table")
        return sums

    def tables(self) -> Tables:
        """All rows, each checked by itself and against what it refers to, and all code, by its checksum."""
        tables, blobs = Tables(), _Code(self)
        there = [*TABLES, *(name for name in OPTIONAL if f"{name}.jsonl" in self._sums)]
        with self._told():
            if sum(self._archive.getinfo(f"{name}.jsonl").file_size for name in there) > _LARGEST_TABLE:
                raise Damaged(f"its tables are larger than {_LARGEST_TABLE >> 30} GiB")
            for name in sorted(self._sums):
                if name.startswith("code/"):
                    self.code(name.removeprefix("code/"))
        for name in there:
            with self._told():
                try:
                    for row in self._rows(f"{name}.jsonl"):
                        tables.add(name, row, blobs)
                except BROKEN as e:
                    raise UserError(f"{self._path} is a damaged bundle ({name}: {why(e)}): export it again") from e
        return tables

    def _rows(self, member: str) -> Iterator[Any]:
        """The JSON values of a member, a line each; its checksum is compared before the first is given."""
        total = hashlib.sha256()
        with self._archive.open(member) as file:
            while part := file.read(1 << 20):
                total.update(part)
        self._compare(member, total.hexdigest())
        with self._archive.open(member) as file:
            while line := file.readline(_LARGEST_ROW + 1):
                if len(line) > _LARGEST_ROW:
                    raise Damaged(f"a row is larger than {_LARGEST_ROW >> 20} MiB")
                yield from_json_text(line)

    def code(self, sha256: str) -> bytes:
        """Code by its name. Raises UserError where it is another."""
        with self._told():
            if self._archive.getinfo(f"code/{sha256}").file_size > _LARGEST_CODE:
                raise Damaged(f"code/{sha256[:12]} is larger than {_LARGEST_CODE >> 20} MiB")
            data = self._archive.read(f"code/{sha256}")
        self._compare(f"code/{sha256}", hashlib.sha256(data).hexdigest())
        return data

    def _compare(self, member: str, found: str) -> None:
        if self._sums.get(member) != found:
            raise UserError(f"{self._path} is damaged: its member {member[:80]} fails its SHA-256; export it again")


class _Code(Mapping[str, bytes]):
    """A bundle's code by SHA-256, read when it is asked for: all of it may be too much to hold."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._names = {name.removeprefix("code/") for name in bundle._sums if name.startswith("code/")}

    def __getitem__(self, sha256: str) -> bytes:
        if sha256 not in self._names:
            raise KeyError(sha256)
        return self._bundle.code(sha256)

    def __contains__(self, sha256: object) -> bool:
        return sha256 in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
