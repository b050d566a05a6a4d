"""Whether a device is idle, seen from a process that wants to measure there only while nobody else computes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

import psutil

from autotune.errors import UserError
from autotune.measure.timing.quiet import processor_time


class Others:
    """Counts the processors that processes other than this one and its descendants keep busy."""

    def __init__(self) -> None:
        self._before = _clocks()

    def busy(self) -> float:
        """Processors that others kept busy on average since the last call; 0 or more."""
        now, before = _clocks(), self._before
        self._before = now
        wall, every, ours = (a - b for a, b in zip(now, before, strict=True))
        return max(0.0, every - ours) / max(wall, 1e-3)


def _clocks() -> tuple[float, float, float]:
    """Seconds: wall clock, processor time of everybody, and of this process with its descendants."""
    ours = 0.0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended: its parent counts it, once it has waited for it
            own = process.cpu_times()
            ours += own.user + own.system + getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
    return time.monotonic(), processor_time(), ours


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``: percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def gpu_use(device: str) -> float:
    """The share of the last moment in which any kernel ran on a GPU ("cuda:N"), 0 to 1, as NVML tells it.

    Raises:
        UserError: the driver does not tell.
    """
    try:
        driver, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as e:
        raise UserError(f"cannot tell whether {device} is idle ({e}): give --always to search all the same") from None
    handle, place, found = ctypes.c_int(), ctypes.create_string_buffer(32), _Utilization()
    board = ctypes.c_void_p()
    index = int(device.partition(":")[2] or 0)
    # By the bus, as CUDA_VISIBLE_DEVICES renumbers CUDA's devices and not NVML's.
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
            raise UserError(f"cannot tell whether {device} is idle ({why}): give --always to search all the same")
    return float(found.gpu) / 100


def idle(device: str, busy: float, moment_s: float = 1.0) -> bool:
    """Whether others leave a device alone for a moment.

    Args:
        device: "cpu" or "cuda:N".
        busy: processors of a CPU, or the share of a GPU's time, that others may take.

    Raises:
        UserError: the driver of a GPU does not tell.
    """
    if device != "cpu":
        first = gpu_use(device)
        time.sleep(moment_s)
        return max(first, gpu_use(device)) <= busy
    others = Others()
    time.sleep(moment_s)
    return others.busy() <= busy


def be_nice() -> None:
    """Give every other process the right of way, for this process and those that it starts."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(psutil.Error, OSError, AttributeError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
