"""The user's own cache: folders of files that autotune trusts, so that nobody else may write to them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Folder ``name`` of ``$AUTOTUNE_CACHE_DIR``, or of the user's cache directory."""
    return Path(os.environ.get("AUTOTUNE_CACHE_DIR") or _default()) / name


def _default() -> str:
    try:
        import platformdirs
    except ImportError:  # a host that only deploys
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "autotune")
    return platformdirs.user_cache_dir("autotune")


def make_own(folder: Path) -> None:
    """Make a folder for this user alone, unless it is there; others lose the right to write to it.

    Raises:
        PermissionError: it is another user's.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not hasattr(os, "geteuid"):
        return
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user (uid {found.st_uid}), whose code would run as you")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
