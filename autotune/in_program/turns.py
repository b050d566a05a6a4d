"""The order in which a search in the program visits regions, and the time of each visit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autotune.workload import PRODUCT, Workload

if TYPE_CHECKING:
    from autotune.task import Config
    from autotune.tuner.options import Budget
    from autotune.tuner.result import Result

_FIRST, _FEWEST = 8, 4
"""Most and fewest candidates of every region before any of them gets more. In recordings the best of five is 6%
slower than the best of ten (benchmarks/notes/search-quality.md); a region that is not reached is 10 to 40% slower."""
_CANDIDATE_S, _FIXED_S = 0.12, 0.6
"""Seconds of a candidate, and of the rest of a region: its inputs, its oracle and the final comparison."""
_TURN_S = 6.0
"""Most seconds of a first turn, unless turns usually take a quarter of that. Most take 0.5 to 2 s; single candidates
compile for 10 to 30 s, and so do some baselines. A region without a decision has another turn."""
_WAITS = 0.5
"""Time that a turn waits for its first candidate, and for its baselines, by the most seconds of a turn."""
_COMPILING = 3
"""Turns after that of a leader in which regions that are alike come last, since their candidate is being compiled."""
REGION_S = 4.0
"""Minimum seconds of a region's second turn."""
_HOPELESS = 1.25
"""A region whose best candidate takes this multiple of the deployed code's time has no second turn. In five programs 30
of 31 second turns that began below it won, and none of five that began at 1.37 to 3.0 and took 54 s."""

_NEGLIGIBLE = 0.002
"""A region that may gain less than this share of the measured regions' time has no second turn. These regions, of all
graphs so far, take about a half of a step, so that it is 0.1% of a step."""
_SMALL = 0.005
"""Regions that are not searched move together less than this share of the bytes of a step's regions, half of a step."""
_LAUNCH_BYTES = {"cuda": 1 << 23, "cpu": 1 << 16}
"""Bytes that are moved in the time of a launch, or of a call: about two microseconds of a GPU."""


class RegionTurn(NamedTuple):
    """A turn of a region.

    Attributes:
        number: of the region, in the order of arrival.
        granted: seconds, for comparison with other searches; 0 for a few candidates.
    """

    number: int
    budget: Budget
    granted: float


class RegionQueue:
    """The regions of a program, and which of them is searched next.

    The first turn of a region measures a few candidates, which bring most of the gain. Regions with the largest share
    of a step for their expected time come first. If a turn measured candidates and ended without a decision, another
    turn is among them: its baseline is compiled meanwhile. A region that is still undecided, or has no candidate yet,
    has its last turn after all others, without a limit. Then those with the most to gain have a second turn.

    Of regions that differ in constants alone, the first one with a winner leads: the others take its best configuration
    (:func:`autotune.tuner.study.tune`), and take it again if a second turn has found another one.

    Args:
        seconds: expected time of the search, until :attr:`end` is set.
        measured_us: microseconds of a step in the measured regions of earlier graphs.
        more: other graphs of the function follow. No second turn begins after the compilation: such turns change a
            kernel's time by 2 to 7%, the first ones of a following graph by 10 to 40%.

    Attributes:
        workloads: in the order of their arrival.
        end: time by ``time.monotonic()`` at which the search ends; None while Inductor compiles.
        results: of the turns that have ended.
    """

    def __init__(self, seconds: float, measured_us: float = 0.0, *, more: bool = False) -> None:
        self.workloads: list[Workload] = []
        self.end: float | None = None
        self._seconds, self._measured_us, self._more = seconds, measured_us, more
        self._counts: dict[str, int] = {}
        self._shares: dict[str, float] = {}
        self._begun: set[str] = set()
        self._undecided: set[str] = set()
        self._late: set[str] = set()
        self._again: set[str] = set()
        self._alike: dict[str, str] = {}
        self._leaders: dict[str, tuple[str, Config]] = {}
        self._led: dict[str, int] = {}
        self.results: list[Result] = []

    def add(self, counted: Sequence[tuple[Workload, int]], *, whole: bool = False) -> None:
        """Add regions, or occurrences of known ones; with ``whole``, these are the occurrences in all graphs."""
        from autotune.domain import alike_of

        new = [workload for workload, _ in counted if workload.fingerprint not in self._counts]
        self._alike |= {workload.fingerprint: alike_of(workload) for workload in new}
        if whole:
            self._counts = dict.fromkeys(self._counts, 0)
        for workload, count in counted:
            self._counts[workload.fingerprint] = self._counts.get(workload.fingerprint, 0) + count
        self._shares = shares([(w, self._counts[w.fingerprint]) for w in (*self.workloads, *new)])
        self.workloads.extend(new)

    def end_in(self, seconds: float) -> None:
        """End the search after so many seconds: the compilation has ended."""
        self.end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, or that are expected to be."""
        return self._seconds if self.end is None else max(0.0, self.end - time.monotonic())

    def waiting(self) -> list[int]:
        """Numbers of the regions without a turn or undecided by it, in the order of their turns."""
        prints = [w.fingerprint for w in self.workloads]
        left = [i for i, key in enumerate(prints) if key not in self._begun and self._counts[key]]
        usual, long = self._usual_s() or 1.0, (1 + _WAITS) * self._most_s()

        def order(i: int) -> tuple[bool, bool, float]:
            key = prints[i]
            compiling = len(self.results) < self._led.get(self._alike[key], -_COMPILING) + _COMPILING
            return key in self._late, compiling, -self._shares[key] / (long if key in self._undecided else usual)

        return sorted(left, key=order)

    @property
    def trials(self) -> int:
        """Candidates of the next region's first turn."""
        return first_candidates(self.left_s, len(self.waiting()))

    def next(self) -> RegionTurn | None:
        """The next turn; None if none is left that fits the time."""
        from autotune.tuner.options import Budget

        waiting = self.waiting()
        key = self.workloads[waiting[0]].fingerprint if waiting else ""
        if waiting and (self.end is not None or key not in self._late):
            if (left := self.left_s) <= self._usual_s():
                return None
            trials, most = self.trials, self._most_s()
            self._begun.add(key)
            if key in self._late:
                return RegionTurn(waiting[0], Budget(trials, left), 0.0)
            return RegionTurn(waiting[0], Budget(trials, min(left, most), waits=min(left, _WAITS * most)), 0.0)
        if self._more and self.end is not None:
            return None
        left = self.left_s
        most = max(1, int(left / REGION_S))
        least = _NEGLIGIBLE * (self._measured_us + step_us(self._counts, self.results))
        gains = [found for found in self._gains() if found[1] >= least][:most]
        if not gains or left < REGION_S:
            return None
        (workload, gain), every = gains[0], sum(gain for _, gain in gains)
        self._again.add(workload.fingerprint)
        seconds = REGION_S if self.end is None else max(REGION_S, left * gain / every)
        return RegionTurn(self.workloads.index(workload), Budget(timeout=seconds), seconds)

    def done(self, result: Result) -> None:
        """Record the result of a turn."""
        from autotune.tuner.phases.explore import TIME_UP

        self._lead(result)
        self.results.append(result)
        key, slow = result.workload, result.stop == TIME_UP and result.best is None
        if result.winner or not (slow or result.best is not None) or key in self._late | self._again:
            return
        if slow or key in self._undecided:
            self._late.add(key)
        self._undecided.add(key)
        self._begun.discard(key)

    def _lead(self, result: Result) -> None:
        """If a leader has another configuration than before, the regions that are alike have another turn."""
        if not result.winner or result.best is None:
            return
        name = self._alike[result.workload]
        leader, config = self._leaders.get(name, (result.workload, result.best))
        if leader != result.workload:
            return
        if name not in self._leaders or config != result.best:
            self._led[name] = len(self.results) + 1
        self._leaders[name] = leader, result.best
        if config != result.best:
            self._begun.difference_update(key for key, alike in self._alike.items() if alike == name and key != leader)

    def _gains(self) -> list[tuple[Workload, float]]:
        """As :func:`gains_left`; regions with the configuration of their leader have one second turn, which is its."""
        named = {w.fingerprint: w for w in self.workloads}
        sums: dict[str, float] = {}
        last = {r.workload: r.best for r in self.results}
        for workload, gain in gains_left([(w, self._counts[key]) for key, w in named.items()], self.results):
            key = workload.fingerprint
            leader, _ = self._leaders.get(self._alike[key], (key, None))
            first = leader if last[leader] == last[key] else key
            sums[first] = sums.get(first, 0.0) + gain
        gains = [(named[key], gain) for key, gain in sums.items() if key not in self._again]
        return sorted(gains, key=lambda found: -found[1])

    def _most_s(self) -> float:
        """Most seconds of a first turn."""
        return max(_TURN_S, 4 * self._usual_s())

    def _usual_s(self) -> float:
        """Seconds of a turn that decides, by those that have ended; the first one waits for the processes' start."""
        ended = [r.seconds for r in self.results[1:] if r.workload not in self._undecided]
        return statistics.median(ended) if ended else 0.0


def first_candidates(seconds: float, regions: int) -> int:
    """Candidates that each region gets in the first pass, so that the pass reaches all regions if it can."""
    each = seconds / max(regions, 1) - _FIXED_S
    return max(_FEWEST, min(_FIRST, int(each / _CANDIDATE_S)))


def gains_left(counted: Sequence[tuple[Workload, int]], results: Sequence[Result]) -> list[tuple[Workload, float]]:
    """The workloads that may still gain, with the possible gain in microseconds of a step, the largest first.

    The possible gain is the time beyond moving the workload's bytes at the best rate of all results, and beyond the
    shortest time of a small region, most of which is its launch. Products compute for longer, and the first turns have
    timed their few candidates. Where Inductor is much faster than all candidates, more of them will not win.

    Args:
        counted: workloads with their numbers of occurrences.
        results: of their searches.
    """
    timed = {r.workload: r for r in results if r.kind != PRODUCT and r.best_us and r.bytes_moved}
    best = max((r.bytes_moved / r.best_us for r in timed.values() if r.best_us), default=1.0)
    small = [r for r in timed.values() if r.bytes_moved <= _LAUNCH_BYTES[r.device.partition(":")[0]]]
    least = min((r.best_us for r in small if r.best_us), default=0.0)
    gains = [
        (workload, count * (r.best_us - max(least, r.bytes_moved / best)))
        for workload, count in counted
        if (r := timed.get(workload.fingerprint)) is not None and r.best_us
        if r.best_us < _HOPELESS * (r.deployed_us or r.best_us)
    ]
    return sorted((found for found in gains if found[1] > 0), key=lambda found: -found[1])


def weights(counted: Sequence[tuple[Workload, int]], device: str) -> dict[str, float]:
    """The bytes that each workload moves in a step, by fingerprint, with those of the time of its launches.

    A product computes for longer than its bytes take, so it is never small.
    """
    from autotune.domain import domain_of

    launch = _LAUNCH_BYTES[device.partition(":")[0]]
    return {
        workload.fingerprint: count * (domain_of(workload.kind).bytes_moved(workload) + launch)
        if workload.kind != PRODUCT
        else math.inf
        for workload, count in counted
    }


def small(weights: Mapping[str, float], whole: float) -> set[str]:
    """The lightest workloads that have together less than :data:`_SMALL` of ``whole``: the step gains nothing by them.

    Args:
        weights: of the workloads that lack a schedule, as of :func:`weights`.
        whole: weight of all regions of the step.
    """
    found: set[str] = set()
    room = _SMALL * whole
    for name in sorted(weights, key=weights.__getitem__):
        room -= weights[name]
        if room < 0:
            break
        found.add(name)
    return found


def step_us(counts: Mapping[str, int], results: Sequence[Result]) -> float:
    """Microseconds of a step in measured regions.

    Args:
        counts: occurrences of workloads, by fingerprint.
        results: of their searches; the last one of a workload counts.
    """
    times = {r.workload: r.deployed_us or r.best_us or 0.0 for r in results}
    return sum(counts.get(name, 0) * us for name, us in times.items())


def shares(counted: Sequence[tuple[Workload, int]]) -> dict[str, float]:
    """Each workload's weight in a step by fingerprint: the mebibytes whose time it may save, times its occurrences.

    The first turns measure a fixed number of candidates of each, so the weight determines their order, not their time.
    """
    from autotune.domain import domain_of

    def saved(workload: Workload) -> float:
        return max(0.1, domain_of(workload.kind).bytes_saved(workload) / 2**20)

    return {workload.fingerprint: count * saved(workload) for workload, count in counted}
