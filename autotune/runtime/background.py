"""Search of misses in another process: ``AUTOTUNE_BACKGROUND=1``, or ``autotune.configure(background=True)``.

The first miss starts ``autotune background`` at the lowest priority. It searches while the device is idle, and ends
with the program. The next compilation of a graph uses its results, since the database's state has changed.
FusionStitching (arXiv 2009.10924) is deployed in this way.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import subprocess
import threading
from pathlib import Path
from typing import IO

from autotune.errors import UserError
from autotune.files import cache_folder, make_own

log = logging.getLogger("autotune")

_LARGEST_LOG = 1 << 20  # bytes, after which the log is started again


class Background:
    """The search that a program starts for its misses.

    Attributes:
        process: the started process, or None.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._wish: bool | str | None = None
        self._lock = threading.Lock()

    def wish(self, wish: bool | str) -> None:
        """Set ``configure(background=...)``; a started search continues.

        Raises:
            UserError: neither a bool nor the name of a device.
        """
        self._wish = _read(wish, "background")

    @property
    def wanted(self) -> bool | str:
        """True if misses are searched in the background, or the name of the device for it.

        Raises:
            UserError: invalid value of $AUTOTUNE_BACKGROUND.
        """
        if self._wish is not None:
            return self._wish
        return _read(os.environ.get("AUTOTUNE_BACKGROUND") or "0", "AUTOTUNE_BACKGROUND")

    def begin(self, device: str, url: str | None = None) -> None:
        """Start the process once, if it is enabled. Of the ranks on a host, only the first one does.

        Args:
            device: of the miss, "cpu" or "cuda:N".
            url: the database with the miss; None for $AUTOTUNE_DB or the default file.

        Raises:
            UserError: invalid value of $AUTOTUNE_BACKGROUND.
            OSError: the process cannot be started.
        """
        wish = self.wanted
        if not wish or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        with self._lock:
            if self.process is not None:
                return
            from autotune.measure.child import interpreter  # for a search only

            place = device if wish is True else str(wish)
            words, environ = interpreter()
            words += ["-m", "autotune", "background", "--with-parent", "--device", place]
            words += shlex.split(os.environ.get("AUTOTUNE_BACKGROUND_OPTIONS", ""))
            env = {**environ, "AUTOTUNE_BACKGROUND": "0", **({"AUTOTUNE_DB": url} if url else {})}
            with _log_file() as out:
                # In a new session, so that Ctrl-C for the program does not interrupt the search.
                self.process = subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            atexit.register(_end, self.process, os.getpid())
            log.info(
                "autotune: process %d searches misses of this program in the background (log %s)",
                self.process.pid,
                _log_path(),
            )


def _read(wish: bool | str, what: str) -> bool | str:
    known = {"1": True, "true": True, "0": False, "false": False}
    text = str(wish).strip().lower()
    if text in known:
        return known[text]
    if text == "cpu" or text.partition(":")[0] == "cuda":
        return text
    raise UserError(f"{what}: {wish!r} must be 0, 1 or a device, such as cuda:3")


def _end(process: subprocess.Popen[bytes], starter: int) -> None:
    """End the search at once, a second before it would detect the end of the program."""
    if os.getpid() == starter:  # not in a forked process
        with contextlib.suppress(OSError):
            process.terminate()


def _log_path() -> Path:
    return cache_folder("background") / "log"


def _log_file() -> IO[bytes]:
    path = _log_path()
    try:
        make_own(path.parent)
        if path.exists() and path.stat().st_size > _LARGEST_LOG:
            path.unlink()
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")
