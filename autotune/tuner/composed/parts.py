"""What a search by parts knows of them, and which compositions there is time for.

A search divides what it may spend among the parts of the compositions that it follows up. Where that is little, several
compositions would leave each part with a candidate or two, which says nothing of any of them: then only the most
promising are followed up, and others when there turns out to be time for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.task import Composition, Ranked
from autotune.tuner.phases.explore import TIME_UP
from autotune.workload import Workload

LEAST_CANDIDATES = 4
"""A part that gets fewer has seen little beside its default."""
LEAST_S = 1.5
"""Seconds below which a part's search says little however quick its candidates are: its inputs are made, its oracle is
run and its first candidates compile meanwhile."""
SLACK = 1.3
"""A composition that is expected to take longer than so many times the best is not followed up."""


@dataclass(frozen=True)
class Means:
    """What is left for the parts that are still to be searched.

    Attributes:
        seconds, trials: None for no limit.
        pace: seconds a candidate takes; None where nothing is known yet.
    """

    seconds: float | None = None
    trials: int | None = None
    pace: float | None = None

    @property
    def endless(self) -> bool:
        return self.seconds is None and self.trials is None

    def suffice(self, parts: int) -> bool:
        """Whether so many parts get enough, each, for their searches to tell anything."""
        least = max(LEAST_S, LEAST_CANDIDATES * (self.pace or 0.0))
        timely = self.seconds is None or parts * least <= self.seconds
        return timely and (self.trials is None or parts * LEAST_CANDIDATES <= self.trials)


@dataclass
class Parts:
    """What is known of the parts.

    Attributes:
        found: candidates by the part's fingerprint, fastest first; empty for one without a kernel.
        settled: whether nothing was cut short, however much more a later search may spend.
        cut: fingerprints of the parts whose searches ended with their time in this run.
    """

    found: dict[str, list[Ranked]] = field(default_factory=dict)
    settled: bool = True
    cut: set[str] = field(default_factory=set)

    def ended(self, part: Workload, stop: str, settled: bool) -> None:
        """A part's search ended for the reason ``stop``."""
        self.settled &= settled
        if stop == TIME_UP:
            self.cut.add(part.fingerprint)

    def expected(self, c: Composition, scale: float = 1.0) -> float:
        """What a composition takes by its parts: measured, or else modelled, times ``scale``."""
        total, model = 0.0, 0.0
        for part, weight in zip(c.parts, c.weights, strict=True):
            best = self.best(part)
            total += weight * scale if best is None else best
            model += weight
        return total * c.expected_us / model if model else total

    def best(self, part: Workload) -> float | None:
        ranking = self.found.get(part.fingerprint)
        return ranking[0][1] if ranking else None

    def missing(self, c: Composition) -> set[str]:
        """Fingerprints of the parts that are still to be searched."""
        return {p.fingerprint for p in c.parts} - self.found.keys()

    def complete(self, c: Composition) -> bool:
        return all(self.found.get(p.fingerprint) for p in c.parts)

    def hopeless(self, c: Composition) -> bool:
        return any(self.found.get(p.fingerprint) == [] for p in c.parts)

    def scale(self, compositions: Sequence[Composition]) -> float:
        """Measured over modelled time of the parts that are measured, in the median."""
        ratios = [
            best / weight
            for c in compositions
            for part, weight in zip(c.parts, c.weights, strict=True)
            if (best := self.best(part)) is not None and weight > 0
        ]
        return statistics.median(ratios) if ratios else 1.0

    def leading(self, compositions: Sequence[Composition]) -> Composition | None:
        """The best composition whose parts are all known; None where there is none."""
        return min((c for c in compositions if self.complete(c)), key=self.expected, default=None)

    def promising(self, c: Composition, compositions: Sequence[Composition]) -> bool:
        """Whether a composition can work, and may be as good as the best one whose parts are all known."""
        if self.hopeless(c):
            return False
        best = self.leading(compositions)
        return best is None or self.expected(c, self.scale(compositions)) <= SLACK * self.expected(best)

    def affordable(
        self, compositions: Sequence[Composition], means: Means, *, first: bool = False
    ) -> list[Composition]:
        """The compositions whose parts there are means to search: as many of the first as together ask for no more, and
        what takes no further part. All where there is no limit.

        Args:
            compositions: the most promising first.
            first: whether the first is among them whatever it asks for.
        """
        if means.endless:
            return list(compositions)
        chosen: list[Composition] = []
        to_do: set[str] = set()
        enough = True
        for c in compositions:
            together = to_do | self.missing(c)
            if together != to_do:
                enough = enough and (means.suffice(len(together)) or (first and not chosen))
                if not enough:
                    continue
            chosen.append(c)
            to_do = together
        return chosen

    def share(self, part: Workload, compositions: Sequence[Composition]) -> float:
        """A part's share of what is left for those to be searched, by what the cost model says that they take."""
        weights: dict[str, float] = {}
        for rank, c in enumerate(compositions):
            for p, weight in zip(c.parts, c.weights, strict=True):
                if p.fingerprint not in self.found:
                    # What only less promising compositions have gets less.
                    weights[p.fingerprint] = max(weights.get(p.fingerprint, 0.0), weight / (1 + rank))
        total = sum(weights.values())
        return weights[part.fingerprint] / total if total > 0 else 1.0
