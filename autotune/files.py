"""Files that autotune reads and writes, its own folders, and imports of the modules that users name.

A command checks its output file before it starts to work, and never leaves a partial file.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from autotune import __version__
from autotune.errors import UserError, first_line
from autotune.words import closest

_LARGEST = 4 << 20  # bytes of a TOML file
_ROOT = Path(__file__).resolve().parent.parent


def check_output(path: Path, what: str, *, make: bool = False) -> None:
    """Check that ``path`` is a new name or a regular file, in a writable folder.

    Links are not followed: the user did not name their targets.

    Args:
        what: start of error messages, such as "--out x.json".
        make: create a missing folder.

    Raises:
        UserError: ``path`` cannot be written; one line.
    """
    try:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: ""}
        kind = kinds.get(stat.S_IFMT(mode), "a device or a pipe")
        if kind:
            raise UserError(f"{what} is {kind}, not a file: name a new file")
        if make:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except (OSError, ValueError) as e:  # ValueError: an invalid name
        raise UserError(f"{what}: {getattr(e, 'strerror', None) or e}") from None


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Context manager of a temporary file, renamed to ``path`` if the context ends without an exception.

    Raises:
        OSError: the file cannot be created, written or renamed; it is removed then.
    """
    folder = path.absolute().parent
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".autotune-")
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp creates files with mode 0600
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file. ``what`` describes the file in messages, such as "file of scenarios".

    Raises:
        UserError: the file is missing, unreadable, larger than 4 MiB, or not TOML that Python can parse.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise UserError(f"{path}: cannot read the {what}: it is larger than {_LARGEST >> 20} MiB")
        return tomllib.loads(data.decode())
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: cannot read the {what}: not UTF-8 text") from None
    except RecursionError:
        raise UserError(f"{path}: cannot read the {what}: it is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, a number of thousands of digits, or an invalid file name
        raise UserError(f"{path}: invalid TOML: {' '.join(str(error).split())}") from None


def resource_dir(name: str) -> Path:
    """The folder ``name`` ("db", "search_spaces" or "benchmarks") that belongs to this copy of autotune.

    A wheel has these folders inside the package; a checkout has them at its root, where users look for them.

    Raises:
        FileNotFoundError: neither has the folder, so the installation is broken.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"this installation of autotune lacks its folder {name!r}: install it again")


def commit() -> str:
    """The checkout's commit, or that in the file ``COMMIT`` of a copied tree without git, or "".

    An installed package may be inside some other checkout (a virtual environment in a project's folder). So git is run
    only if the package is in autotune's own checkout; an installed package returns its version.
    """
    if not (_ROOT / "pyproject.toml").exists():
        return f"v{__version__}"
    git = ["git", "-C", str(_ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # Benchmark results are output: rewriting them does not make the measured code dirty.
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], check=False)
        return head + ("-dirty" if changed.returncode else "")
    except (OSError, subprocess.CalledProcessError):
        marker = _ROOT / "COMMIT"
        return marker.read_text().strip() if marker.exists() else ""


def cache_folder(name: str) -> Path:
    """Folder ``name`` of ``$AUTOTUNE_CACHE_DIR``, or of the user's cache directory."""
    return Path(os.environ.get("AUTOTUNE_CACHE_DIR") or _user_cache()) / name


def default_database() -> Path:
    """The default database: ``autotune.db`` in the user's data folder."""
    import platformdirs

    return Path(platformdirs.user_data_dir("autotune")) / "autotune.db"


def _user_cache() -> str:
    try:
        import platformdirs
    except ImportError:  # a deployment-only host
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "autotune")
    return platformdirs.user_cache_dir("autotune")


def make_own(folder: Path) -> None:
    """Create a folder for this user alone. An existing one loses its write permissions for group and others.

    Raises:
        PermissionError: the folder belongs to another user.
        OSError: the folder cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user (uid {found.st_uid}), whose code would run as you")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def import_module(name: str, spec: str) -> ModuleType:
    """Import a module by its name, with the current directory on ``sys.path``.

    Args:
        spec: the specification that names the module, for messages.

    Raises:
        UserError: the module is missing, or importing it fails; one line.
    """
    if os.sep in name:
        raise UserError(_named_by_file(name, spec))
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            if name.endswith(".py"):
                raise UserError(_named_by_file(name, spec)) from None
            raise UserError(
                f"no module {error.name!r} for {spec}: install it, or run in its folder (now {here})"
            ) from None
        raise UserError(f"importing {name} for {spec} failed: {first_line(error)}") from error
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # a script without a ``__main__`` guard may call sys.exit
        raise UserError(f"importing {name} for {spec} failed: {first_line(error)}") from error


def import_object(module: str, path: str, spec: str) -> Any:
    """The object at ``path``, a dotted attribute of a module; raises UserError as :func:`import_module`."""
    found: Any = import_module(module, spec)
    for part in path.split("."):
        if not hasattr(found, part):
            hint = closest(path, (name for name in dir(found) if not name.startswith("_")))
            raise UserError(f"{module} has no {path!r}{f', {hint}' if hint else ''} (asked for by {spec})")
        found = getattr(found, part)
    return found


def _named_by_file(name: str, spec: str) -> str:
    module = os.path.normpath(name.removesuffix(".py")).replace(os.sep, ".").lstrip(".")
    return f"{spec}: {name} names a file; give its module, such as {module}"


@cache
def code_digest(*places: Path) -> str:
    """SHA-256 of the contents of Python files, and of all those in folders: 64 hex digits."""
    found = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(file.read_bytes())
    return found.hexdigest()
