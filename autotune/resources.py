"""Where the package's data folders lie: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path


def resource_dir(name: str) -> Path:
    """The folder ``name`` ("db", "search_spaces" or "benchmarks") that belongs to this copy of autotune.

    A wheel carries these folders inside the package; a checkout keeps them at the root, where users look for them.

    Raises:
        FileNotFoundError: neither place has it, which means a broken installation.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"this installation of autotune lacks its folder {name!r}: install it again")
