"""Snapshots shipped with autotune: schedules of the models in its benchmarks."""

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
    mine = sorted((name for name in names if own.startswith(f"{name}-")), key=len, reverse=True)
    others = [name for name in names if name not in mine] if kind == "cuda" else []
    return tuple(FOLDER / f"{name}{SUFFIX}" for name in (*mine, *others))


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
