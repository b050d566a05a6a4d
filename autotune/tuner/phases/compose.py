"""Search of a workload by its parts. Each part is tuned once for all workloads that contain it.

Part latencies rank the compositions. The best few are then measured as wholes, and those measurements decide.

Parts are workloads: their measurements are stored under their own fingerprints. Searches of other workloads, models and
runs reuse them. A search divides its budget among the parts of the compositions that it follows up. With a small
budget, several compositions would leave each part one or two candidates, too few for a result. Then the search follows
up the most promising compositions first, and others if time remains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune.errors import Unsupported
from autotune.space import Space, holds
from autotune.store.records import Key
from autotune.task import Composition, Config, Ranked, config_key
from autotune.tuner.context import Context, Session
from autotune.tuner.options import Budget
from autotune.tuner.phases import finals
from autotune.tuner.phases.explore import (
    AT_FLOOR,
    NO_GAIN,
    TIME_UP,
    TRIALS_UP,
    Explorer,
    explore,
    learn_stored,
    settled,
)
from autotune.tuner.phases.finals import is_at_floor, is_baseline_at_floor, may_be_at_floor
from autotune.tuner.samplers import is_guided
from autotune.tuner.seeds import Seed, winners
from autotune.workload import Workload

WHOLES = 4
"""Compositions that are measured as a whole, in addition to the default."""
_PARTS_SHARE = 0.75  # of the time before the final comparison
_CANDIDATES = 8  # of each part, available for composition
_POLISH = 24
_POLISH_PATIENCE = 10
_REFINED_S = 4.0  # with less time for a part, only the whole is timed again
LEAST_CANDIDATES = 4
"""Minimum useful budget of a part: with fewer candidates, little more than its default is measured."""
LEAST_S = 1.5
"""Minimum useful seconds for a part's search, however fast its candidates are. Creating inputs, running the oracle and
compiling the first candidates take that long."""
SLACK = 1.3
"""A composition whose expected latency exceeds the best one's by more than this factor is not followed up."""


def search(s: Session, compositions: Sequence[Composition], granted: float | None) -> str:
    """Search the parts, then measure the best compositions in session ``s`` of the whole; return the stop reason.

    Args:
        compositions: the most promising first.
        granted: see :func:`autotune.tuner.study.tune`.

    Raises:
        WorkerFault: the machine failed.
    """
    learn_stored(s)
    if may_be_at_floor(s):
        begin = [Seed(s.default, "default")]
        Explorer(s, s.task.space(s.context.options.space_file), None, begin, until_s=s.budget.until_s, patience=0).run()
        if is_at_floor(s) or is_baseline_at_floor(s):
            return AT_FLOOR
    parts = Parts()
    begun: list[Composition] = []
    for n, c in enumerate(compositions):
        if s.ranking() and _seconds(s, (), parts) == 0:
            parts.settled = False
            break
        if not parts.promising(c, compositions):
            continue
        followed = _followed(s, compositions, n, parts)
        if not any(c is f for f in followed):
            parts.settled = False
            continue
        begun.append(c)
        for part in c.parts:
            if part.fingerprint in parts.found:
                continue
            parts.found[part.fingerprint] = _search_part(s, part, followed, begun, parts, granted)
            if s.context.interrupt.requested or not parts.found[part.fingerprint]:
                break
        if s.context.interrupt.requested:
            break
    _go_on(s, compositions, parts, granted)
    s.context.pool.forget(parts.found.keys() - {s.key.workload})
    s.worker.open(s.task.workload)
    seeds = [Seed(config, "composed") for config in _wholes(s, compositions, parts)]
    seeds.insert(0, Seed(s.default, "default"))
    seeds += [Seed(config, "elsewhere") for config in _elsewhere(s)]
    space = s.task.space(s.context.options.space_file)
    least = s.measured + 2  # the default, and the best composition
    Explorer(s, space, None, seeds, until_s=s.budget.until_s, patience=0, least=least).run()
    finals.refine(s)
    if is_guided(s.context.options.sampler):
        _polish(s)
    if s.context.interrupt.requested:
        return "interrupted"
    if parts.settled:
        return f"{NO_GAIN} in any part"
    return TIME_UP if s.budget.timeout is not None else TRIALS_UP


def _followed(s: Session, compositions: Sequence[Composition], n: int, parts: Parts) -> list[Composition]:
    """Return the compositions that share the remaining budget at the ``n``-th composition's turn.

    The seconds per candidate limit the choice only before the first part is searched. A composition admitted then keeps
    its share.
    """
    pace = None if parts.found else s.context.pace.each
    means = Means(_seconds(s, compositions[n:], parts), s.trials_left, pace)
    if means.endless:
        return list(compositions)
    promising = [c for c in compositions[n:] if parts.promising(c, compositions)]
    return parts.affordable(promising, means, first=not any(parts.complete(c) for c in compositions))


def first_compositions(
    context: Context, workload: Workload, compositions: Sequence[Composition], budget: Budget
) -> list[Composition]:
    """Return the compositions that a search of ``workload`` begins with before any part is measured."""
    seconds = _spare(workload.fingerprint, 0.0, compositions, Parts(), budget)
    return Parts().affordable(compositions, Means(seconds, budget.trials, context.pace.each), first=True)


def _seconds(s: Session, followed: Sequence[Composition], parts: Parts) -> float | None:
    """Return the seconds left in session ``s`` for the parts of the followed compositions; None for no limit."""
    return _spare(s.key.workload, s.elapsed, followed, parts, s.budget)


def _spare(
    workload: str, elapsed: float, followed: Sequence[Composition], parts: Parts, budget: Budget
) -> float | None:
    """Return the seconds that a search of ``workload`` has for parts after ``elapsed`` seconds; None for no limit.

    A share of the time is reserved to measure the composed wholes. If only the workload itself is searched, nothing is
    composed, and the parts get that share too.
    """
    until = budget.until_s
    if until is None:
        return None
    alone = parts.found.keys() | set().union(*map(parts.missing, followed)) <= {workload}
    return max(0.0, (1.0 if alone else _PARTS_SHARE) * until - elapsed)


def _search_part(
    s: Session,
    part: Workload,
    followed: Sequence[Composition],
    begun: Sequence[Composition],
    parts: Parts,
    granted: float | None,
) -> list[Ranked]:
    """Return a part's candidates, fastest first; search it if no stored effort suffices. Updates counts of ``s``.

    Args:
        followed: compositions whose parts share the remaining budget.
        begun: compositions followed up so far, this part's included.
    """
    left, share = _seconds(s, followed, parts), parts.share(part, followed)
    # The part's share of the grant in a search that begins with all of these compositions.
    every = [*begun, *(c for c in followed if not any(c is b for b in begun))]
    recorded_s = None if granted is None else granted * Parts().share(part, every)
    trials = None if s.trials_left is None else max(1, s.trials_left)
    own = replace(s.budget, trials=trials).part(share, None if left is None else max(1.0, left * share))
    key = s.context.key(part)
    if part.fingerprint != s.key.workload and (effort := s.context.searched(key, own, recorded_s)) is not None:
        parts.settled &= effort.settled
        return _stored(s, part, key)
    return _explore_part(s, part, parts, own, recorded_s)


def _explore_part(s: Session, part: Workload, parts: Parts, own: Budget, recorded_s: float | None) -> list[Ranked]:
    """Search a part within its budget, and store the effort; return its candidates, fastest first.

    Args:
        recorded_s: seconds recorded for comparison with other efforts; None for no limit.
    """
    again = part.fingerprint in parts.found
    if part.fingerprint == s.key.workload:
        s.worker.open(part)
        whole, s.trials = s.trials, own.most
        stop = explore(s, own, until_s=None if own.timeout is None else s.elapsed + own.timeout)
        s.trials = whole
        parts.ended(part, stop, settled(stop, own, recorded_s))
        finals.refine(s)
        return _ranked(s)
    try:
        task = s.context.task(part, s.task)
    except Unsupported:
        return []
    sub = s.context.session(task, own, s)
    stop = explore(sub, own, until_s=own.timeout)
    if own.timeout is None or own.timeout > _REFINED_S:
        finals.refine(sub)
    done = settled(stop, own, recorded_s)
    parts.ended(part, stop, done)
    s.context.note(sub, stop, done, recorded_s)
    s.done += sub.measured
    s.reused += 0 if again else sub.reused
    s.failed.update(sub.failed)
    return _ranked(sub)


def _go_on(s: Session, compositions: Sequence[Composition], parts: Parts, granted: float | None) -> None:
    """Spend the unused budget of failed compositions on the best one, if the searches of its parts were cut short."""
    best: Composition | None = None
    while parts.cut and not s.context.interrupt.requested:
        left, trials = _seconds(s, (), parts), s.trials_left
        if left is None or left < LEAST_S or (trials is not None and trials < 1):
            return
        best = best or _best(compositions, parts)
        cut = [p for p in best.parts if p.fingerprint in parts.cut] if best else []
        if best is None or not cut:
            return
        share = Parts({f: r for f, r in parts.found.items() if f not in parts.cut}).share(cut[0], [best])
        own = replace(s.budget, trials=trials).part(share, max(1.0, left * share))
        recorded_s = None if granted is None else granted * Parts().share(cut[0], [best])
        parts.found[cut[0].fingerprint] = _explore_part(s, cut[0], parts, own, recorded_s)
        parts.cut.discard(cut[0].fingerprint)


def _best(compositions: Sequence[Composition], parts: Parts) -> Composition | None:
    """Return the composition with the lowest latency by its parts' measurements, regardless of the cost model."""
    best, best_us = None, math.inf
    for c in compositions:
        made = list(c.combine([parts.found[p.fingerprint] for p in c.parts])) if parts.complete(c) else []
        if made and made[0][1] < best_us:
            best, best_us = c, made[0][1]
    return best


def _ranked(s: Session) -> list[Ranked]:
    return [(m.config, m.latency_us) for m in s.ranking()[:_CANDIDATES] if m.latency_us is not None]


def _stored(s: Session, part: Workload, key: Key) -> list[Ranked]:
    """Return the best stored candidates of a part within the user's space."""
    file = s.context.options.space_file
    best = s.context.store.best(key, n=_CANDIDATES if file is None else 1000)
    if file is not None:
        task = s.context.task(part, s.task)
        space = task.space(file)
        best = [m for m in best if holds(space, m.config, task.normalize)][:_CANDIDATES]
    return [(m.config, m.latency_us) for m in best if m.latency_us is not None]


def _wholes(s: Session, compositions: Sequence[Composition], parts: Parts) -> list[Config]:
    """Return the configurations to measure as wholes: the best of each composition, then the second ones."""
    first: list[Ranked] = []
    second: list[Ranked] = []
    for c in compositions:
        if not parts.complete(c):
            continue
        made = list(c.combine([parts.found[p.fingerprint] for p in c.parts]))
        first += made[:1]
        second += made[1:2]
    ranked = sorted(first, key=lambda r: r[1]) + sorted(second, key=lambda r: r[1])
    configs = {config_key(c): c for c in (s.task.normalize(config) for config, _ in ranked)}
    return list(configs.values())[:WHOLES]


def _elsewhere(s: Session) -> list[Config]:
    """Return the best configurations of the whole elsewhere, and its leader's.

    Polishing may have improved them beyond their parts.
    """
    stored = (s.context.fitted(s.task, config) for config in winners(s.context.store, s.key))
    return [config for config in (s.context.lead(s.task), *stored) if config is not None]


def _space_of(s: Session, config: Config) -> Space | None:
    """Return the space of the composition of ``config``; None if this version does not compose it."""
    try:
        return s.task.space_for(config, s.context.options.space_file)
    except Unsupported:
        return None


def _polish(s: Session) -> None:
    """Try the neighbours of the best whole, until the trials or the time run out.

    Consecutive parts share caches, which their separate searches did not measure.
    """
    ranking = s.ranking()
    most = _POLISH if s.trials_left is None else min(_POLISH, s.trials_left)
    if not ranking or most < 1 or s.context.interrupt.requested:
        return
    space = _space_of(s, ranking[0].config)
    if space is None or not space.contains(ranking[0].config):
        return
    trials, s.trials = s.trials, most
    polish = Explorer(s, space, None, [], until_s=s.budget.until_s, patience=_POLISH_PATIENCE, polish=True, prune=True)
    polish.run()
    s.trials = trials
    finals.refine(s)


@dataclass(frozen=True)
class Means:
    """Remaining budget for the parts still to be searched.

    Attributes:
        seconds, trials: None for no limit.
        pace: seconds per candidate; None if not known yet.
    """

    seconds: float | None = None
    trials: int | None = None
    pace: float | None = None

    @property
    def endless(self) -> bool:
        return self.seconds is None and self.trials is None

    def suffice(self, parts: int) -> bool:
        """True if each of ``parts`` parts gets enough for a useful search."""
        least = max(LEAST_S, LEAST_CANDIDATES * (self.pace or 0.0))
        timely = self.seconds is None or parts * least <= self.seconds
        return timely and (self.trials is None or parts * LEAST_CANDIDATES <= self.trials)


@dataclass
class Parts:
    """Results of the parts' searches.

    Attributes:
        found: candidates by the part's fingerprint, fastest first; empty for a part without a kernel.
        settled: True if no larger budget would continue any of the searches.
        cut: fingerprints of the parts whose searches ended with their time in this run.
    """

    found: dict[str, list[Ranked]] = field(default_factory=dict)
    settled: bool = True
    cut: set[str] = field(default_factory=set)

    def ended(self, part: Workload, stop: str, settled: bool) -> None:
        """Record that a part's search ended for the reason ``stop``."""
        self.settled &= settled
        if stop == TIME_UP:
            self.cut.add(part.fingerprint)

    def expected(self, c: Composition, scale: float = 1.0) -> float:
        """Return a composition's latency from its parts: measured ones, or modelled ones times ``scale``."""
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
        """Return the fingerprints of the parts still to be searched."""
        return {p.fingerprint for p in c.parts} - self.found.keys()

    def complete(self, c: Composition) -> bool:
        return all(self.found.get(p.fingerprint) for p in c.parts)

    def hopeless(self, c: Composition) -> bool:
        return any(self.found.get(p.fingerprint) == [] for p in c.parts)

    def scale(self, compositions: Sequence[Composition]) -> float:
        """Return the median ratio of measured to modelled latency over the measured parts."""
        ratios = [
            best / weight
            for c in compositions
            for part, weight in zip(c.parts, c.weights, strict=True)
            if (best := self.best(part)) is not None and weight > 0
        ]
        return statistics.median(ratios) if ratios else 1.0

    def leading(self, compositions: Sequence[Composition]) -> Composition | None:
        """Return the best composition whose parts are all measured, or None."""
        return min((c for c in compositions if self.complete(c)), key=self.expected, default=None)

    def promising(self, c: Composition, compositions: Sequence[Composition]) -> bool:
        """True if a composition can work and may match the best one whose parts are all measured."""
        if self.hopeless(c):
            return False
        best = self.leading(compositions)
        return best is None or self.expected(c, self.scale(compositions)) <= SLACK * self.expected(best)

    def affordable(
        self, compositions: Sequence[Composition], means: Means, *, first: bool = False
    ) -> list[Composition]:
        """Return the compositions whose parts the remaining budget can search, or all without a limit.

        These are the leading ones whose parts together fit the budget, and later ones that add no part.

        Args:
            compositions: the most promising first.
            first: True to include the first one even if its parts exceed the budget.
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
        """Return a part's share of the remaining budget, by the modelled latencies of the unsearched parts."""
        weights: dict[str, float] = {}
        for rank, c in enumerate(compositions):
            for p, weight in zip(c.parts, c.weights, strict=True):
                if p.fingerprint not in self.found:
                    # Parts of only less promising compositions get less.
                    weights[p.fingerprint] = max(weights.get(p.fingerprint, 0.0), weight / (1 + rank))
        total = sum(weights.values())
        return weights[part.fingerprint] / total if total > 0 else 1.0
