"""Exclusive use of a device: its lock, quiet periods of a CPU, and its use by other processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from autotune.errors import UserError

_WINDOW_S = 0.05
BUSY = 0.25
"""Maximum number of processors busy with other processes in a quiet period."""


@contextlib.contextmanager
def device_lock(device: str, timeout_s: float) -> Iterator[bool]:
    """Hold the machine-wide lock of ``device`` ("cpu", "cuda:0") for this user; the kernel frees it if the holder dies.

    Searches in other processes wait, so that they do not disturb each other's timing.

    Yields:
        True if the lock is held; False if ``timeout_s`` passed or no lock file can be created. Measuring then continues
        without the lock.
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
        # A waiting process holds the queue lock, so that a process that has just measured waits behind it.
        got = _acquire(queue, deadline) and _acquire(held, deadline)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield got


class Meter:
    """Meter of the processors that other processes keep busy since its creation.

    Args:
        family: True to count descendants of this process as its own.
    """

    def __init__(self, family: bool = False) -> None:
        self._family = family
        self._before = _clocks(family)

    def others(self) -> float:
        """Return the mean number of processors that others kept busy since the start; 0 or more."""
        wall, every, ours = (a - b for a, b in zip(_clocks(self._family), self._before, strict=True))
        return max(0.0, every - ours) / max(wall, 1e-3)

    def lap(self) -> float:
        """Return :meth:`others`, and restart the meter."""
        busy, self._before = self.others(), _clocks(self._family)
        return busy


def wait_for_quiet(limit_s: float) -> None:
    """Wait until other processes leave the processors idle, for ``limit_s`` seconds at most.

    A thread that shares its core is delayed by whole time slices, and a parallel loop waits for its slowest thread:
    work of 0.3 ms then takes 8 ms.
    """
    end = time.monotonic() + limit_s
    while True:
        meter = Meter()
        time.sleep(_WINDOW_S)
        if meter.others() <= BUSY or time.monotonic() >= end:
            return


@contextlib.contextmanager
def share_processors() -> Iterator[None]:
    """Leave the processors that other processes keep busy out of torch's threads; one thread remains.

    The threads of an operator wait for each other, and spin meanwhile. Beside eight busy processes on two cores, an
    oracle of 300 operators took 12 processor seconds and 36 s with two threads; it takes 3 processor seconds with one.
    """
    import torch

    meter, threads = Meter(), torch.get_num_threads()
    time.sleep(_WINDOW_S)
    torch.set_num_threads(max(1, threads - round(meter.others())))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def idle(device: str, busy: float, moment_s: float = 1.0) -> bool:
    """True if other processes leave a device idle for ``moment_s`` seconds.

    Args:
        device: "cpu" or "cuda:N".
        busy: allowed use by others: processors of a CPU, or the share of a GPU's time.

    Raises:
        UserError: the driver of a GPU does not report it.
    """
    if device != "cpu":
        first = gpu_use(device)
        time.sleep(moment_s)
        return max(first, gpu_use(device)) <= busy
    meter = Meter(family=True)
    time.sleep(moment_s)
    return meter.others() <= busy


def be_nice() -> None:
    """Give this process and its children the lowest CPU and I/O priority."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(psutil.Error, OSError, AttributeError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def gpu_use(device: str) -> float:
    """Return NVML's utilization of a GPU ("cuda:N"): the share of the last period with a running kernel, 0 to 1.

    Raises:
        UserError: the driver does not report it.
    """
    try:
        driver, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as e:
        raise UserError(f"cannot measure whether {device} is idle ({e}): use --always to search anyway") from None
    handle, place, found = ctypes.c_int(), ctypes.create_string_buffer(32), _Utilization()
    board = ctypes.c_void_p()
    index = int(device.partition(":")[2] or 0)
    # By PCI bus ID, since CUDA_VISIBLE_DEVICES renumbers CUDA's devices but not NVML's.
    steps: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(handle), index),
        lambda: driver.cuDeviceGetPCIBusId(place, len(place), handle),
        lambda: nvml.nvmlInit_v2(),
        lambda: nvml.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(board)),
        lambda: nvml.nvmlDeviceGetUtilizationRates(board, ctypes.byref(found)),
    )
    for step in steps:
        if code := step():
            why = f"error {code} of the driver"
            raise UserError(f"cannot measure whether {device} is idle ({why}): use --always to search anyway")
    return float(found.gpu) / 100


def _clocks(family: bool = False) -> tuple[float, float, float]:
    """Return seconds: wall clock, processor time of all processes, and that of this process or its family."""
    times = os.times()
    ours = times.user + times.system
    if family:
        here = psutil.Process()
        ours = 0.0
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended: its parent's times include it after wait()
                t = process.cpu_times()
                ours += t.user + t.system + getattr(t, "children_user", 0.0) + getattr(t, "children_system", 0.0)
    return time.monotonic(), _processor_time(), ours


def _processor_time() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # "guest" is part of "user". "steal" counts as others' time, since it is taken from this machine.
    return float(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``: percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _physical(device: str) -> str:
    """Return a device's name with CUDA_VISIBLE_DEVICES applied: ``cuda:0`` is GPU 3 if the variable is 3."""
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
