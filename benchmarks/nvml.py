"""A GPU's clock, energy and reasons of a lower clock during work, from NVML. Reads only.

The library comes with the driver, so it is wherever nvidia-smi is, and needs no Python package.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autotune.errors import Unsupported

_CLOCK_SM = 1  # NVML_CLOCK_SM
_REASONS = {
    0x1: "idle",
    0x2: "set by a user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "other GPUs",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Reading:
    """One look at a GPU.

    Attributes:
        at: ``time.perf_counter()`` of it.
        mhz: clock of the SMs.
        joules: taken since the driver was loaded.
        reasons: what holds the clock back, a bit each.
    """

    at: float
    mhz: int
    joules: float
    reasons: int


class Sensor:
    """The GPU of a UUID ("GPU-...").

    Attributes:
        limit_w: the power that it may take.
        most_mhz: the highest clock of its SMs.

    Raises:
        Unsupported: NVML is missing, or lacks the GPU.
    """

    def __init__(self, uuid: str, lib: Any = None) -> None:
        self._lib = _library() if lib is None else lib
        self._handle = ctypes.c_void_p()
        self._check("nvmlInit_v2")
        self._check("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        # Drivers before 535 have the second name only.
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        self._reasons = next((n for n in names if hasattr(self._lib, n)), names[0])
        self.limit_w = self._ask("nvmlDeviceGetEnforcedPowerLimit") / 1e3
        self.most_mhz = self._ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)
        self.read()

    def read(self) -> Reading:
        joules = self._ask("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong) / 1e3
        mhz = self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM)
        return Reading(time.perf_counter(), mhz, joules, self._ask(self._reasons, kind=ctypes.c_ulonglong))

    @contextlib.contextmanager
    def watch(self, every_s: float = 0.02) -> Iterator[list[Reading]]:
        """Readings while the block runs, taken by a thread; they end early where NVML fails."""
        readings: list[Reading] = []
        done = threading.Event()

        def look() -> None:
            with contextlib.suppress(Unsupported):
                while not done.wait(every_s):
                    readings.append(self.read())

        thread = threading.Thread(target=look, name="autotune-nvml", daemon=True)
        thread.start()
        try:
            yield readings
        finally:
            done.set()
            thread.join()

    def _ask(self, name: str, *arguments: int, kind: Any = ctypes.c_uint) -> int:
        """The number that a query answers."""
        answer = kind()
        self._check(name, self._handle, *arguments, ctypes.byref(answer))
        return int(answer.value)

    def _check(self, name: str, *arguments: Any) -> None:
        call = getattr(self._lib, name, None)
        if call is None:
            raise Unsupported(f"this driver's NVML has no {name}")
        if code := call(*arguments):
            raise Unsupported(f"NVML: {name} answers error {code}")


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise Unsupported("NVML (libnvidia-ml.so.1) is not there") from None


def summary(readings: Sequence[Reading]) -> dict[str, Any]:
    """Median clock, mean power (None for too short a time), and for each reason the share of readings that have it;
    empty without readings."""
    if not readings:
        return {}
    # The counter goes up ten times a second or so, which shows when readings are nearer: between two such moments.
    risen = [b for a, b in pairwise(readings) if b.joules != a.joules]
    watt = (risen[-1].joules - risen[0].joules) / (risen[-1].at - risen[0].at) if len(risen) > 1 else None
    shares = {name: sum(bool(r.reasons & bit) for r in readings) / len(readings) for bit, name in _REASONS.items()}
    return {
        "mhz": statistics.median(r.mhz for r in readings),
        "watt": watt and round(watt, 1),
        "held": {name: round(share, 2) for name, share in shares.items() if share},
    }
