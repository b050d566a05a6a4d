"""One measurement at a time on a device: searches in other processes wait, or each would time the other's noise."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def device_lock(device: str, timeout_s: float) -> Iterator[bool]:
    """Hold the machine-wide lock of ``device`` ("cpu", "cuda:0") for this user; the kernel frees it if the holder dies.

    Yields:
        True when held; False when ``timeout_s`` passed or no lock file can be made: measuring then goes on without.
    """
    name = re.sub(r"\W+", "-", _physical(device))
    path = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}-{name}.lock"
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            held, queue = (stack.enter_context(_opened(p)) for p in (path, path.with_suffix(".next")))
        except OSError:
            yield False
            return
        # Who waits holds the queue, so that who has just measured and wants to again comes after it.
        got = _acquire(queue, deadline) and _acquire(held, deadline)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield got


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _physical(device: str) -> str:
    """``cuda:0`` under CUDA_VISIBLE_DEVICES=3 is another device than without."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = device.partition(":")[2]
    if device.startswith("cuda") and visible and index.isdigit():
        names = visible.split(",")
        if int(index) < len(names):
            return f"cuda-{names[int(index)]}"
    return device


def _acquire(handle: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
