"""Searching a workload by its parts: each is tuned once, for every workload that has it, and the whole is put together
of what they take by themselves. The best few are then measured as wholes, which decides.

Parts are workloads of their own: their measurements lie in the database under their own fingerprints, where searches of
other workloads, models and runs find them. A search divides what it may spend among the parts of the compositions that
it follows up. Where that is little, several compositions would leave each part with a candidate or two, which says
nothing of any of them: then only the most promising are followed up, and others when there turns out to be time.
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
    is_at_floor,
    is_baseline_at_floor,
    may_be_at_floor,
)
from autotune.tuner.phases.screen import explore, learn_stored, settled
from autotune.tuner.proposals.samplers import NONE, is_guided
from autotune.tuner.proposals.seeds import Seed, winners
from autotune.workload import Workload

WHOLES = 4
"""Compositions that are measured as a whole, beside the default."""
_PARTS_SHARE = 0.75  # of the time before the final comparison
_CANDIDATES = 8  # of each part, to choose from when they are put together
_POLISH = 24
_POLISH_PATIENCE = 10
_REFINED_S = 4.0  # with less time than this for a part, what the whole takes is all that is timed again
LEAST_CANDIDATES = 4
"""A part that gets fewer has seen little beside its default."""
LEAST_S = 1.5
"""Seconds below which a part's search says little however quick its candidates are: its inputs are made, its oracle is
run and its first candidates compile meanwhile."""
SLACK = 1.3
"""A composition that is expected to take longer than so many times the best is not followed up."""


def search(s: Session, compositions: Sequence[Composition], granted: float | None) -> str:
    """Search the parts, then measure the best compositions in session ``s`` of the whole; answers why it ended.

    Args:
        compositions: the most promising first.
        granted: see :func:`autotune.tuner.study.tune`.

    Raises:
        WorkerFault: the machine failed.
    """
    learn_stored(s)
    if may_be_at_floor(s):
        begin = [Seed(s.default, "default")]
        Explorer(s, s.task.space(s.context.options.space_file), None, begin, until_s=None, patience=0).run()
        if is_at_floor(s) or is_baseline_at_floor(s):
            return AT_FLOOR
    parts = Parts()
    begun: list[Composition] = []
    for n, c in enumerate(compositions):
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
    if s.context.options.sampler != NONE or not seeds:  # then the model alone decides
        seeds.insert(0, Seed(s.default, "default"))
        seeds += [Seed(config, "elsewhere") for config in _elsewhere(s)]
    space = s.task.space(s.context.options.space_file)
    Explorer(s, space, None, seeds, until_s=None, patience=0).run()
    finals.refine(s)
    if is_guided(s.context.options.sampler):
        _polish(s)
    if s.context.interrupt.requested:
        return "interrupted"
    if parts.settled:
        return f"{NO_GAIN} in any part"
    return TIME_UP if s.budget.timeout is not None else TRIALS_UP


def _followed(s: Session, compositions: Sequence[Composition], n: int, parts: Parts) -> list[Composition]:
    """The compositions among which what is left is divided when it is the ``n``-th's turn.

    How long candidates take decides at the beginning; what was spared for a composition then is not withdrawn later.
    """
    pace = None if parts.found else s.context.pace.each
    means = Means(_seconds(s, compositions[n:], parts), s.trials_left, pace)
    if means.endless:
        return list(compositions)
    promising = [c for c in compositions[n:] if parts.promising(c, compositions)]
    return parts.affordable(promising, means, first=not any(parts.complete(c) for c in compositions))


def begun_with(
    context: Context, workload: Workload, compositions: Sequence[Composition], budget: Budget
) -> list[Composition]:
    """The compositions that a search of ``workload`` will begin with, where nothing is known of their parts yet."""
    seconds = _spare(workload.fingerprint, 0.0, compositions, Parts(), budget)
    return Parts().affordable(compositions, Means(seconds, budget.trials, context.pace.each), first=True)


def _seconds(s: Session, followed: Sequence[Composition], parts: Parts) -> float | None:
    """What is left in session ``s`` for the parts of the compositions that are followed up; None for no limit."""
    return _spare(s.key.workload, s.elapsed, followed, parts, s.budget)


def _spare(
    workload: str, elapsed: float, followed: Sequence[Composition], parts: Parts, budget: Budget
) -> float | None:
    """What a search of ``workload`` has for parts after ``elapsed`` seconds; None for no limit.

    A share of the time is kept to measure what is put together of them. Where nothing is, because no more than the
    workload itself is searched, that may be taken too.
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
    """The candidates of a part, fastest first, searched unless that was done before. Adds to the counts of ``s``.

    Args:
        followed: compositions among whose parts what is left is divided.
        begun: those that were followed up so far, this part's among them.
    """
    left, share = _seconds(s, followed, parts), parts.share(part, followed)
    # What the part would get of the grant in a search that begins with all of these compositions.
    every = [*begun, *(c for c in followed if not any(c is b for b in begun))]
    mine = None if granted is None else granted * Parts().share(part, every)
    trials = None if s.trials_left is None else max(1, s.trials_left)
    own = replace(s.budget, trials=trials).part(share, None if left is None else max(1.0, left * share))
    key = s.context.key(part)
    if part.fingerprint != s.key.workload and (effort := s.context.searched(key, own, mine)) is not None:
        parts.settled &= effort.settled
        return _stored(s, part, key)
    return _explore_part(s, part, parts, own, mine)


def _explore_part(s: Session, part: Workload, parts: Parts, own: Budget, mine: float | None) -> list[Ranked]:
    """Search a part with a budget of its own, and note how far; its candidates, fastest first.

    Args:
        mine: seconds by which the effort is compared with others; None for no limit.
    """
    again = part.fingerprint in parts.found
    if part.fingerprint == s.key.workload:
        s.worker.open(part)
        whole, s.trials = s.trials, own.most
        stop = explore(s, own, until_s=None if own.timeout is None else s.elapsed + own.timeout)
        s.trials = whole
        parts.ended(part, stop, settled(stop, own, mine))
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
    done = settled(stop, own, mine)
    parts.ended(part, stop, done)
    s.context.note(sub, stop, done, mine)
    s.done += sub.measured
    s.reused += 0 if again else sub.reused
    s.failed.update(sub.failed)
    return _ranked(sub)


def _go_on(s: Session, compositions: Sequence[Composition], parts: Parts, granted: float | None) -> None:
    """Spend what the compositions that came to nothing have left on the best one, where its parts were cut short."""
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
        mine = None if granted is None else granted * Parts().share(cut[0], [best])
        parts.found[cut[0].fingerprint] = _explore_part(s, cut[0], parts, own, mine)
        parts.cut.discard(cut[0].fingerprint)


def _best(compositions: Sequence[Composition], parts: Parts) -> Composition | None:
    """The composition that promises most by what its parts were measured to take, whether or not a model knew of it."""
    best, best_us = None, math.inf
    for c in compositions:
        made = list(c.combine([parts.found[p.fingerprint] for p in c.parts])) if parts.complete(c) else []
        if made and made[0][1] < best_us:
            best, best_us = c, made[0][1]
    return best


def _ranked(s: Session) -> list[Ranked]:
    return [(m.config, m.latency_us) for m in s.ranking()[:_CANDIDATES] if m.latency_us is not None]


def _stored(s: Session, part: Workload, key: Key) -> list[Ranked]:
    """The best stored candidates of a part, those of the user's space only."""
    file = s.context.options.space_file
    best = s.context.store.best(key, n=_CANDIDATES if file is None else 1000)
    if file is not None:
        task = s.context.task(part, s.task)
        space = task.space(file)
        best = [m for m in best if holds(space, m.config, task.normalize)][:_CANDIDATES]
    return [(m.config, m.latency_us) for m in best if m.latency_us is not None]


def _wholes(s: Session, compositions: Sequence[Composition], parts: Parts) -> list[Config]:
    """Configurations of the whole to be measured: the best of each composition, then second ones, as many as fit."""
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
    """What was best for the whole in other places, where it was polished beyond what its parts came to."""
    found = []
    for config in winners(s.context.store, s.key):
        space = _space_of(s, config)
        if space is not None and (fitted := space.project(config)) is not None:
            found.append(s.task.normalize(fitted))
    return found


def _space_of(s: Session, config: Config) -> Space | None:
    """The space of what is composed as ``config`` is; None where this version composes nothing so."""
    try:
        return s.task.space_for(config, s.context.options.space_file)
    except Unsupported:
        return None


def _polish(s: Session) -> None:
    """Try what is one step from the best whole: parts that follow each other share the caches, which none of them knew.

    Only as far as candidates and time go round, and where there are several parts.
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
