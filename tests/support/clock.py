"""A clock that tests set."""

from __future__ import annotations


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
