"""How good searches are: how far from the best candidate they end, and after how many candidates they are near it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.tuner.replay.recording import Recording
from autotune.tuner.replay.replay import Trace

NEAR = 0.03
"""A search is near the best candidate when it has found one that is so much slower, or less."""


@dataclass(frozen=True)
class Regret:
    """Several searches of one recording that differ by their seed.

    Attributes:
        optimum_us: latency of the recording's best candidate.
        traces: one a search.
    """

    optimum_us: float
    traces: tuple[Trace, ...]

    @classmethod
    def of(cls, recording: Recording, traces: Sequence[Trace]) -> Regret:
        """The regret of searches in ``recording``."""
        return cls(recording.optimum_us, tuple(traces))

    def at(self, candidates: int) -> float:
        """Best latency after so many candidates over the optimum, less 1; in the median over the searches."""
        return statistics.median(self._after(trace, candidates) for trace in self.traces)

    def _after(self, trace: Trace, candidates: int) -> float:
        if not trace.best_us:
            return math.inf
        return trace.best_us[min(candidates, len(trace.best_us)) - 1] / self.optimum_us - 1

    def candidates(self, near: float = NEAR) -> float:
        """Candidates until the best is within ``near`` of the optimum, in the median; infinite where it never is."""
        return statistics.median(self._first(trace, near) + 1 for trace in self.traces)

    def seconds(self, near: float = NEAR) -> float:
        """Wall time until then, in the median; infinite where it never is."""
        return statistics.median(
            math.inf if (k := self._first(trace, near)) == math.inf else trace.seconds[int(k)] for trace in self.traces
        )

    def _first(self, trace: Trace, near: float) -> float:
        """Number of the first candidate, from 0, that is near enough."""
        limit = self.optimum_us * (1 + near)
        return next((k for k, us in enumerate(trace.best_us) if us <= limit), math.inf)

    @property
    def proposing_s(self) -> float:
        """Seconds that the search itself took for each candidate, in the mean."""
        return statistics.fmean(t.proposing_s / max(1, len(t.best_us)) for t in self.traces)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean of 1 + each value, less 1; infinite where one is."""
    return math.inf if math.inf in values else math.exp(statistics.fmean(math.log1p(v) for v in values)) - 1
