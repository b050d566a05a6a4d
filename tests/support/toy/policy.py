"""A policy of few samples whose deadlines end hangs alone, and a machine whose load the test sets."""

from __future__ import annotations

from dataclasses import replace

from autotune.measure.policy import Policy
from tests.support.brief import PATIENT

QUICK = replace(
    Policy(method="cpu", **PATIENT),  # type: ignore[arg-type]
    warmup=1,
    screen_repeats=3,
    repeat_repeats=5,
    final_rounds=7,
    final_s=1.0,
    cold_bytes=1 << 16,  # too little for torch to use threads, which would wait for each other on a loaded machine
    quiet_s=0.0,
)


class Busy:
    """The number of processors that others keep busy, for final comparisons."""

    others: float | None = 0.0
