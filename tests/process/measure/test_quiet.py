"""The load of other processes on the CPU is detected, and waited for until the limit."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from autotune.measure import quiet
from autotune.measure.quiet import Meter, wait_for_quiet


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_busy_neighbour_is_seen_and_our_own_work_is_not(brief: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "BUSY", brief)
    meter = Meter()
    busy(0.5)
    before = meter.others()
    code = "import time; t = time.time(); print(flush=True)\nwhile time.time() - t < 100: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        meter = Meter()
        time.sleep(0.5)
        assert meter.others() > 0.3  # a whole processor, on a machine that others use too
        begin = time.monotonic()
        wait_for_quiet(0.2)
        assert 0.2 <= time.monotonic() - begin < 60  # not until the neighbour has ended
    finally:
        neighbour.kill()
        neighbour.communicate()
    assert before >= 0
