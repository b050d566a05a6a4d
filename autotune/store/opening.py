"""Opening the database or snapshot that deployment reads, and the snapshots shipped with autotune.

A snapshot needs no SQLAlchemy. The shipped ones have the schedules of the models in autotune's benchmarks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.files import default_database
from autotune.store.reading import Reader
from autotune.store.snapshot_form import SUFFIX, is_snapshot, opened


def attach(
    url: str | os.PathLike[str] | None = None,
    replica: str | os.PathLike[str] | None = None,
    *,
    key: str | None = None,
    timeout_s: float = 1.0,
) -> Reader | None:
    """Open the snapshot or database at ``url`` for deployment, as ``Store.attach`` does.

    Args:
        url: a snapshot, or as in ``Store.open``; None for $AUTOTUNE_DB or the default file.
        replica: a copy of a database to read, as in ``Store.attach``.
        key: a public key that a snapshot must be signed with; None for $AUTOTUNE_KEY, or none.

    Returns:
        None if the database does not exist yet.

    Raises:
        UserError: the database cannot be used, or a key is given for a database, which has no signature.
    """
    key = pinned_key(key)
    if (frozen := named_snapshot(url)) is not None:
        from autotune.store.snapshot import Snapshot

        return Snapshot(frozen, key=key)
    if key is not None:
        raise UserError(
            "AUTOTUNE_KEY requires a signature, which a database does not have: deploy from a signed snapshot"
            " (autotune export --sign KEYFILE), or unset AUTOTUNE_KEY"
        )
    from autotune.store.store import Store

    return Store.attach(url, replica, timeout_s=timeout_s)


@contextmanager
def attached(
    url: str | os.PathLike[str] | None = None, replica: str | os.PathLike[str] | None = None
) -> Iterator[Reader | None]:
    """Open a command's database, as :func:`attach` does.

    Yields:
        None if no database is named and the default file does not exist.

    Raises:
        UserError: as :func:`attach`; an argument or the environment names a database that does not exist.
    """
    store = attach(url, replica)
    copy = replica or (os.environ.get("AUTOTUNE_DB_READ") if url is None else None)
    if store is None and (named := copy or url or os.environ.get("AUTOTUNE_DB")):
        from autotune.store.connection.urls import no_database

        raise UserError(no_database(named))
    try:
        yield store
    finally:
        if store is not None:
            store.close()


def sqlite_file() -> Path | None:
    """The SQLite file that the environment names for deployment; None for a server, a replica or a snapshot."""
    text = (os.environ.get("AUTOTUNE_DB") or str(default_database())).removeprefix("sqlite:///")
    if os.environ.get("AUTOTUNE_DB_READ") or "://" in text or named_snapshot() is not None:
        return None
    return Path(text).absolute()


def pinned_key(key: str | os.PathLike[str] | None) -> str | None:
    """The public key that a snapshot must be signed with: ``key``, or if that is None $AUTOTUNE_KEY; None for none.

    An empty ``key`` is returned, and fits no snapshot: an unset variable of the caller must not allow unsigned files.
    """
    return os.fspath(key) if key is not None else os.environ.get("AUTOTUNE_KEY") or None


def named_snapshot(url: str | os.PathLike[str] | None = None) -> str | None:
    """The file named by ``url`` (None: $AUTOTUNE_DB), if it is a snapshot; else None.

    Raises:
        UserError: ``package:`` with the name of a snapshot that is not shipped with autotune.
    """
    text = os.fspath(url) if url is not None else os.environ.get("AUTOTUNE_DB", "")
    path = path_of(text)
    return path if text and "://" not in text and is_snapshot(path) else None


PREFIX = "package:"
FOLDER = Path(__file__).resolve().parents[1] / "schedules"


def packaged() -> list[str]:
    """The names of the shipped snapshots."""
    return sorted(p.stem for p in FOLDER.glob(f"*{SUFFIX}"))


def name_for(device: str) -> str:
    """A device's name in the form of snapshots' names: ``h100-80gb-hbm3`` for "NVIDIA H100 80GB HBM3"."""
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-").removeprefix("nvidia-")


def files_for(device: DeviceIdentity) -> tuple[Path, ...]:
    """The shipped snapshots that may have schedules for a device.

    The device's own snapshot comes first: its name is the device's, or the beginning of it, such as ``h100`` for all
    kinds of H100. On a GPU the others follow: their schedules may be for the same architecture. No file is opened.
    """
    return _files_for(device.name, device.kind) if device.count == 1 else ()


@lru_cache(maxsize=64)
def _files_for(device: str, kind: str) -> tuple[Path, ...]:
    own, names = f"{name_for(device)}-", packaged()
    own_names = sorted((name for name in names if own.startswith(f"{name}-")), key=len, reverse=True)
    others = [name for name in names if name not in own_names] if kind == "cuda" else []
    return tuple(FOLDER / f"{name}{SUFFIX}" for name in (*own_names, *others))


def digests() -> dict[Path, str]:
    """The checksum of each shipped snapshot, from its seal, without reading the rest."""
    return {path: _digest(path) for name in packaged() if (path := FOLDER / f"{name}{SUFFIX}")}


def _digest(path: Path) -> str:
    try:
        file, seal = opened(path)
    except UserError:
        return "damaged"
    file.close()
    return seal.checksum.hex()


def path_of(name: str | os.PathLike[str]) -> str:
    """The file of a user's name for a snapshot; ``package:h200`` is a shipped one.

    Raises:
        UserError: no shipped snapshot has this name.
    """
    text = os.fspath(name)
    if not text.startswith(PREFIX):
        return os.path.expanduser(text)
    wanted = text.removeprefix(PREFIX)
    if wanted not in packaged():
        raise UserError(f"{text}: no such packaged snapshot; autotune has {', '.join(packaged())}")
    return str(FOLDER / f"{wanted}{SUFFIX}")
