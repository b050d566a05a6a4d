"""Files that are read and written, the folders that autotune owns, and the modules that users name.

What a command writes is refused before the work that it is for, and is never half of a file.
"""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from autotune import __version__
from autotune.errors import UserError, first_line
from autotune.words import closest

_LARGEST = 4 << 20  # bytes of a TOML file
_ROOT = Path(__file__).resolve().parent.parent


def check_output(path: Path, what: str, *, make: bool = False) -> None:
    """See that ``path`` is a new name or a regular file, in a folder that can be written.

    Links are not followed: what they point to is not what the user named.

    Args:
        what: how messages begin, such as "--out x.json".
        make: make the folder where it is not there.

    Raises:
        UserError: it cannot be written, in one line.
    """
    try:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: ""}
        kind = kinds.get(stat.S_IFMT(mode), "a device or a pipe")
        if kind:
            raise UserError(f"{what}: is {kind}, not a file: name a new one")
        if make:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except (OSError, ValueError) as e:  # ValueError: a name that no file has
        raise UserError(f"{what}: {getattr(e, 'strerror', None) or e}") from None


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the name ``path`` when the context ends without an exception.

    Raises:
        OSError: it cannot be made, written or named so; nothing is left of it then.
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
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; ``what`` it should be, such as "file of scenarios".

    Raises:
        UserError: it is not there, cannot be read, is larger than 4 MiB, or is not TOML that Python can hold.
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
        raise UserError(f"{path}: cannot read the {what}: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, a number of thousands of digits, or a name that no file has
        raise UserError(f"{path}: not TOML: {' '.join(str(error).split())}") from None


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


def commit() -> str:
    """The checkout's commit; a copied tree without git has it in a file ``COMMIT`` at its root, else "".

    An installed package may lie within some other checkout (an environment in a project's folder), so git is asked only
    where the package lies in its own.
    """
    if not (_ROOT / "pyproject.toml").exists():
        return f"v{__version__}"
    git = ["git", "-C", str(_ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # Results are what is measured, not what is measured with: a file that is written anew changes nothing.
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], check=False)
        return head + ("-dirty" if changed.returncode else "")
    except (OSError, subprocess.CalledProcessError):
        marker = _ROOT / "COMMIT"
        return marker.read_text().strip() if marker.exists() else ""


def cache_folder(name: str) -> Path:
    """Folder ``name`` of ``$AUTOTUNE_CACHE_DIR``, or of the user's cache directory."""
    return Path(os.environ.get("AUTOTUNE_CACHE_DIR") or _user_cache()) / name


def _user_cache() -> str:
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


def import_module(name: str, spec: str) -> ModuleType:
    """A module by its name; the current directory is importable.

    Args:
        spec: what asks for it, for messages.

    Raises:
        UserError: it is not there, or importing it fails, in one line.
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
            raise UserError(f"no module {error.name!r} for {spec}; it must be installed or in {here}") from None
        raise UserError(f"importing {name} for {spec} failed: {first_line(error)}") from error
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # a script without a guard ends in sys.exit
        raise UserError(f"importing {name} for {spec} failed: {first_line(error)}") from error


def import_object(module: str, path: str, spec: str) -> Any:
    """The object at ``path``, attributes by dots, of a module; raises UserError as :func:`import_module`."""
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
