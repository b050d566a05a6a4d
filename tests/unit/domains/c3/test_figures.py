"""Figures of long loops: the counted turns, and NVML's values of the same time, on a fake library."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import Unsupported
from benchmarks.c3_figures import settled
from benchmarks.nvml import Reading, Sensor, summary


def library(**changes: Any) -> SimpleNamespace:
    """NVML with one GPU of 700 W; its energy rises by 7 J at every look. ``changes`` replace functions."""
    looks = iter(range(1, 1_000_000))

    def answer(value: Any) -> Any:
        def call(handle: ctypes.c_void_p, *arguments: Any) -> int:
            arguments[-1]._obj.value = value() if callable(value) else value
            return 0

        return call

    def find(uuid: bytes, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if uuid == b"GPU-1" else 6

    functions = {
        "nvmlInit_v2": lambda: 0,
        "nvmlDeviceGetHandleByUUID": find,
        "nvmlDeviceGetEnforcedPowerLimit": answer(700_000),
        "nvmlDeviceGetMaxClockInfo": answer(1980),
        "nvmlDeviceGetClockInfo": answer(1500),
        "nvmlDeviceGetTotalEnergyConsumption": answer(lambda: (2**32) * 1000 + next(looks) * 7000),
        "nvmlDeviceGetCurrentClocksEventReasons": answer(0x4),
    }
    return SimpleNamespace(**{name: f for name, f in (functions | changes).items() if f is not None})


def wait_for(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.001)


def test_a_sensor_reads_clock_energy_and_reasons_while_a_block_runs() -> None:
    sensor = Sensor("GPU-1", library())
    assert (sensor.limit_w, sensor.most_mhz) == (700.0, 1980)
    begin = time.perf_counter()
    with sensor.watch(0.001) as readings:
        wait_for(lambda: len(readings) >= 3)
    count = len(readings)
    assert count >= 3
    assert all(begin < r.at < time.perf_counter() for r in readings)
    assert readings[1].joules - readings[0].joules == 7.0
    assert readings[0].joules > 2**32  # a counter of 64 bits
    found = summary(readings)
    assert (found["mhz"], found["held"]) == (1500, {"power cap": 1.0})
    time.sleep(0.01)
    assert len(readings) == count  # nobody looks any more


def test_older_drivers_name_the_reasons_otherwise() -> None:
    old = {"nvmlDeviceGetCurrentClocksEventReasons": None,
           "nvmlDeviceGetCurrentClocksThrottleReasons": library().nvmlDeviceGetCurrentClocksEventReasons}  # fmt: skip
    assert Sensor("GPU-1", library(**old)).read().reasons == 0x4


def test_missing_nvml_is_reported_in_a_line() -> None:
    with pytest.raises(Unsupported, match="nvmlDeviceGetHandleByUUID answers error 6"):
        Sensor("GPU-2", library())
    with pytest.raises(Unsupported, match="this driver's NVML has no nvmlDeviceGetTotalEnergyConsumption"):
        Sensor("GPU-1", library(nvmlDeviceGetTotalEnergyConsumption=None))


def test_a_sensor_that_fails_later_ends_the_readings_alone() -> None:
    lib = library()
    sensor = Sensor("GPU-1", lib)
    failed = threading.Event()

    def fails(*arguments: object) -> int:
        failed.set()
        return 999

    with sensor.watch(0.001) as readings:
        wait_for(lambda: len(readings) > 0)
        lib.nvmlDeviceGetClockInfo = fails
        assert failed.wait(250)
        count = len(readings)
        time.sleep(0.02)
    assert len(readings) == count > 0


def test_power_is_taken_between_moments_at_which_the_counter_rose() -> None:
    def reading(at: float, joules: float, mhz: int = 1400, reasons: int = 0) -> Reading:
        return Reading(at, mhz, joules, reasons)

    # Every 100 ms by 70 J; the first and the last stretch are seen in part.
    seen = [reading(0.02 * k, 70.0 * ((k + 3) // 5), reasons=0x24 if k % 2 else 0x4) for k in range(30)]
    assert summary(seen) == {"mhz": 1400, "watt": 700.0, "held": {"power cap": 1.0, "heat": 0.5}}
    assert summary(seen[:4])["watt"] is None
    assert summary([]) == {}


def test_the_second_half_is_settled_and_50_ms_are_the_beginning() -> None:
    us = [4000.0] * 12 + [5000.0] * 40
    assert settled(us) == {"us": 5000.0, "first": 4000.0}
    # Of five turns of 20 ms the first three begin in 50 ms, and of one long turn it itself.
    assert settled([20e3, 21e3, 22e3, 30e3, 31e3, 32e3])["first"] == 21e3
    assert settled([90e3]) == {"us": 90e3, "first": 90e3}
