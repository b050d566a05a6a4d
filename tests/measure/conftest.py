"""The toy domain of tests/tuner, whose bad candidates are what the worker has to survive, and a clock of our own."""

from __future__ import annotations

import pytest
from tuner.conftest import policy, toy

from autotune.measure import rotate, timer

__all__ = ["Clock", "clock", "policy", "toy"]


class Clock:
    """In place of ``time`` where samples are taken: it stands still but for what contenders say they took, so that
    what is expected of samples does not depend on who else wants the processor."""

    def __init__(self) -> None:
        self.ns = 0

    def busy(self, us: float) -> None:
        """Let so many microseconds go by."""
        self.ns += round(us * 1e3)

    def perf_counter_ns(self) -> int:
        return self.ns

    def perf_counter(self) -> float:
        return self.ns / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (timer, rotate):
        monkeypatch.setattr(module, "time", made)
    return made
