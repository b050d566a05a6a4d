"""The folder of compiled CPU kernels: a source file for each, and Numba's cache beside it.

Numba's cache is made of pickles, and of machine code: whoever can write to the folder can run code as everyone who
loads a kernel from there. So it is made for its owner alone, and another user's is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from autotune.errors import UserError
from autotune.user_cache import cache_folder, make_own

T = TypeVar("T")


def cache_dir() -> Path:
    """Folder of the generated sources: ``$AUTOTUNE_CACHE_DIR/cpu``, or the user's cache directory's."""
    return cache_folder("cpu")


def compiled_at(name: str, text: str, load: Callable[[Path], T]) -> T:
    """What ``load`` makes of a file called ``name`` that holds ``text``.

    Where what was compiled before is damaged it is deleted and compiled again. Where the user's cache directory cannot
    be written, or the disk is full, a folder of this process alone takes its place.

    Args:
        load: compiles the source at a path, or takes what was compiled beside it.

    Raises:
        UserError: ``$AUTOTUNE_CACHE_DIR`` cannot be written, or belongs to another user.
    """
    folder = cache_dir()
    try:
        _own(folder)
        return _load(folder, name, text, load)
    except OSError as e:
        if os.environ.get("AUTOTUNE_CACHE_DIR"):
            why = e.strerror or str(e)
            raise UserError(f"AUTOTUNE_CACHE_DIR: cannot write {folder} ({why}); point it elsewhere") from e
        return _load(_private_dir(), name, text, load)


def _load(folder: Path, name: str, text: str, load: Callable[[Path], T]) -> T:
    path = folder / name
    _write_once(path, text)
    try:
        return load(path)
    except OSError:
        raise
    except Exception:  # a damaged pickle raises anything
        if not _forget(path):
            raise
    return load(path)


def _forget(path: Path) -> bool:
    """Delete what was compiled of a source file; False where nothing was."""
    from numba import config

    found = list((path.parent / "__pycache__").glob(f"{path.stem}.*"))
    if config.CACHE_DIR:
        found += Path(config.CACHE_DIR).glob(f"*/{path.stem}.*")
    for file in found:
        file.unlink(missing_ok=True)
    return bool(found)


def _own(folder: Path) -> None:
    """As :func:`make_own`.

    Raises:
        UserError: another user's, where the user has named it.
        PermissionError: another user's, where it is the default one.
    """
    try:
        make_own(folder)
    except PermissionError as e:
        if e.errno is not None:
            raise
        if os.environ.get("AUTOTUNE_CACHE_DIR"):
            raise UserError(f"AUTOTUNE_CACHE_DIR: {e}; point it at a folder of your own") from e
        warnings.warn(f"autotune: {e}: kernels are compiled anew in each process", stacklevel=2)
        raise


def _write_once(path: Path, text: str) -> None:
    """Create ``path`` with ``text`` unless it is there already.

    An existing good file is never replaced: Numba's cache goes by its modification time, so a second writer would throw
    away what the first had compiled.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == text.encode():
            return
        path.unlink()  # cut short or tampered with
    fd, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(fd, "w") as f:
            f.write(text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
            return
    finally:
        Path(temporary).unlink(missing_ok=True)


@cache
def _private_dir() -> Path:
    """A folder of this process alone, for machines whose cache directory cannot be written (containers, mostly)."""
    folder = tempfile.mkdtemp(prefix="autotune-cpu-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
