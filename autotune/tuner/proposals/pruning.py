"""Which proposals are not worth measuring: those that the domain's cost model expects to be far from the best.

A model that is off by a factor is off by much the same factor for every candidate of a workload, so its predictions are
scaled by what was measured of this workload before they are compared with the best.
"""

from __future__ import annotations

import statistics

from autotune.task import Config, Status
from autotune.tuner.context import Session

HOPELESS = 3.0
"""A candidate that is expected to take more than so many times the best is not measured."""
_ENOUGH = 3  # measured candidates that the model's scale is taken from


class Pruning:
    """The cost model's veto in one session."""

    def __init__(self, session: Session) -> None:
        self._s = session
        self._expected: dict[str, float | None] = {}
        self._scale: tuple[int, float | None] = (-1, None)

    def hopeless(self, config: Config) -> float | None:
        """The latency expected of ``config`` in microseconds if that is hopeless; None if it may be worth a try."""
        best = self._s.best_us
        scale = self.scale()
        if best is None or scale is None:
            return None
        expected = self._s.task.predict(config)
        if expected is None or expected * scale <= HOPELESS * best:
            return None
        return expected * scale

    def scale(self) -> float | None:
        """Measured over predicted latency, in the median; None while too little is measured."""
        known = self._s.known
        if self._scale[0] != len(known):
            ratios = []
            for key, m in known.items():
                if m.status is not Status.OK or m.latency_us is None:
                    continue
                if key not in self._expected:
                    self._expected[key] = self._s.task.predict(m.config)
                expected = self._expected[key]
                if expected:
                    ratios.append(m.latency_us / expected)
            self._scale = (len(known), statistics.median(ratios) if len(ratios) >= _ENOUGH else None)
        return self._scale[1]
