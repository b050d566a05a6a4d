"""Misses tuned in another process: ``AUTOTUNE_BACKGROUND=1``, or ``autotune.configure(background=True)``.

The first miss starts ``autotune background`` at the lowest priority. It searches while others leave the device alone,
and ends with the program. What it finds is used when a graph is compiled next, as look-ups then find another state of
the database. FusionStitching (arXiv 2009.10924) is deployed so.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from autotune.errors import UserError
from autotune.files import cache_folder, make_own

log = logging.getLogger("autotune")

_LARGEST_LOG = 1 << 20  # bytes, after which it is begun again


class Background:
    """The search that a program starts for its misses.

    Attributes:
        process: what was started, if anything was.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._wish: bool | str | None = None
        self._lock = threading.Lock()

    def wish(self, wish: bool | str) -> None:
        """As ``configure(background=...)``; what was started goes on.

        Raises:
            UserError: it is neither a truth value nor the name of a device.
        """
        self._wish = _read(wish, "background")

    @property
    def wanted(self) -> bool | str:
        """True where misses are tuned in the background, or the device to do that on.

        Raises:
            UserError: $AUTOTUNE_BACKGROUND is neither.
        """
        if self._wish is not None:
            return self._wish
        return _read(os.environ.get("AUTOTUNE_BACKGROUND") or "0", "AUTOTUNE_BACKGROUND")

    def begin(self, device: str, url: str | None = None) -> None:
        """Start the process, once, where that is wanted. Of ranks on one host, the first does.

        Args:
            device: what was missed on, "cpu" or "cuda:N".
            url: the database that it was noted in; None for $AUTOTUNE_DB or the default file.

        Raises:
            UserError: $AUTOTUNE_BACKGROUND is none of its values.
            OSError: it cannot be started.
        """
        wish = self.wanted
        if not wish or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        with self._lock:
            if self.process is not None:
                return
            place = device if wish is True else str(wish)
            words = [sys.executable, "-m", "autotune", "background", "--with-parent", "--device", place]
            words += shlex.split(os.environ.get("AUTOTUNE_BACKGROUND_OPTIONS", ""))
            env = {**os.environ, "AUTOTUNE_BACKGROUND": "0", **({"AUTOTUNE_DB": url} if url else {})}
            env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
            with _log_file() as out:
                # In another session: a Ctrl-C that is meant for the program does not end the search.
                self.process = subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            atexit.register(_end, self.process, os.getpid())
            log.info(
                "autotune: misses are tuned beside this program (process %d, log %s)", self.process.pid, _log_path()
            )


def _read(wish: bool | str, what: str) -> bool | str:
    known = {"1": True, "true": True, "0": False, "false": False}
    text = str(wish).strip().lower()
    if text in known:
        return known[text]
    if text == "cpu" or text.partition(":")[0] == "cuda":
        return text
    raise UserError(f"{what}: {wish!r} is none of 0, 1 and the name of a device, such as cuda:3")


def _end(process: subprocess.Popen[bytes], starter: int) -> None:
    """End the search now. It notices by itself that the program has ended, a second later."""
    if os.getpid() == starter:  # and not a process that was forked meanwhile
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
