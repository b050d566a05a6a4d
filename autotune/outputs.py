"""Files that a command writes: refused before the work that they are for, and never half of one."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from autotune.errors import UserError


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
