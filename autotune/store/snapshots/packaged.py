"""Snapshots that come with autotune: schedules of the models that its own benchmarks measure."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import UserError
from autotune.store.snapshots.form import SUFFIX

PREFIX = "package:"
FOLDER = Path(__file__).resolve().parents[2] / "schedules"


def packaged() -> list[str]:
    """The names of the snapshots that come with autotune."""
    return sorted(p.stem for p in FOLDER.glob(f"*{SUFFIX}"))


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
