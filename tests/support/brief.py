"""Measurements as long as tests need them: their results are printed, stored and looked up, whatever their noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotune.domains.c3 import task as c3
from autotune.measure import policy, quiet, rotate

FEW = {"warmup": 1, "screen_repeats": 3, "repeat_repeats": 5, "final_rounds": 5, "cold_bytes": 1 << 20}
PATIENT = dict.fromkeys(("timeout_s", "startup_s", "build_s", "load_s", "baseline_s"), 600.0)
"""Deadlines that end hangs alone, however busy the host is."""


def measure_briefly(change: Callable[[Any, str, Any], object] = setattr) -> None:
    """A CPU's policies take few samples, sweep little, have long deadlines, and wait for no moment of quiet.

    Args:
        change: how attributes of modules are set.
    """
    for module in (policy, c3):
        change(module, "CPU", replace(module.CPU, **FEW, **PATIENT))
    change(rotate, "last_level_cache", lambda: 0)
    change(quiet, "BUSY", math.inf)
