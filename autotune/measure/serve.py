"""The child's end of :mod:`autotune.measure.child`: a loop that answers frames, and the precautions before it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from autotune.measure.wire import Reader, pack

_PR_SET_PDEATHSIG = 1


class Link:
    """Frames to and from the parent. The process's own standard output is free for whatever candidates print."""

    def __init__(self) -> None:
        self._in = os.dup(0)
        self._out = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._reader = Reader()

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        data = memoryview(pack(message, blob))
        while data:
            data = data[os.write(self._out, data) :]

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame, or None when the parent has closed the pipe."""
        while True:
            frame = self._reader.next()
            if frame is not None:
                return frame
            data = os.read(self._in, 1 << 20)
            if not data:
                return None
            self._reader.feed(data)


def prepare() -> None:
    """Make this process one that dies quietly, alone, and not after its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # if a candidate eats all memory, it is this process that should go
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ.get("AUTOTUNE_PARENT", os.getppid())):
            os._exit(0)  # the parent died before the line above


def serve(handle: Callable[[Link, dict[str, Any], bytes], None]) -> None:
    """Answer frames with ``handle`` until the parent closes the pipe. Does not return."""
    prepare()
    link = Link()
    code = 0
    try:
        while (frame := link.receive()) is not None:
            handle(link, *frame)
    except BrokenPipeError:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    # Not sys.exit: a candidate may have left threads, or a device, in a state that never tears down.
    sys.stderr.flush()
    os._exit(code)
