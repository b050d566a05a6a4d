"""Snapshots that come with autotune: schedules of the models that its own benchmarks measure."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.store.snapshots.form import SUFFIX, opened

PREFIX = "package:"
FOLDER = Path(__file__).resolve().parents[2] / "schedules"


def packaged() -> list[str]:
    """The names of the snapshots that come with autotune."""
    return sorted(p.stem for p in FOLDER.glob(f"*{SUFFIX}"))


def name_for(device: str) -> str:
    """The name of a device's snapshot, from the device's own name: ``h200`` for "NVIDIA H200"."""
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-").removeprefix("nvidia-")


def file_for(device: DeviceIdentity) -> Path | None:
    """The snapshot that comes with autotune for a device, by its name, or None.

    Nothing is opened: it may be of another such device, with another number of multiprocessors.
    """
    return _file_for(device.name) if device.count == 1 else None


@lru_cache(maxsize=64)
def _file_for(device: str) -> Path | None:
    path = FOLDER / f"{name_for(device)}{SUFFIX}"
    return path if path.is_file() else None


def digests() -> dict[Path, str]:
    """The checksum of each snapshot that comes with autotune, from its seal; no more is read."""
    return {path: _digest(path) for name in packaged() if (path := FOLDER / f"{name}{SUFFIX}")}


def _digest(path: Path) -> str:
    try:
        file, seal = opened(path)
    except UserError:
        return "damaged"
    file.close()
    return seal.checksum.hex()


def path_of(name: str | os.PathLike[str]) -> str:
    """The file that a user's name for a snapshot means: ``package:h200`` is one that comes with autotune.

    Raises:
        UserError: none of that name does.
    """
    text = os.fspath(name)
    if not text.startswith(PREFIX):
        return os.path.expanduser(text)
    wanted = text.removeprefix(PREFIX)
    if wanted not in packaged():
        raise UserError(f"{text}: no such snapshot comes with autotune; there is {', '.join(packaged())}")
    return str(FOLDER / f"{wanted}{SUFFIX}")
