"""Searching a workload by its parts: each is tuned once, for every workload that has it, and the whole is put together
of what they take by themselves. The best few are then measured as wholes, which decides.

Parts are workloads of their own: their measurements lie in the database under their own fingerprints, where searches of
other workloads, models and runs find them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune.errors import Unsupported
from autotune.store.records import Key
from autotune.task import ComposedTask, Composition, Config, Ranked, config_key
from autotune.tuner import finals
from autotune.tuner.budget import Budget
from autotune.tuner.context import Context
from autotune.tuner.explore import NO_GAIN, TIME_UP, Explorer
from autotune.tuner.screen import explore, learn_stored, settled
from autotune.tuner.seeds import Seed
from autotune.tuner.session import Session
from autotune.tuner.space import holds
from autotune.workload import Workload

WHOLES = 4
"""Compositions that are measured as a whole, beside the default."""
_PARTS_SHARE = 0.75  # of the time before the final comparison
_SLACK = 1.3  # a composition that is expected to take longer than so many times the best is not followed up
_CANDIDATES = 8  # of each part, to choose from when they are put together
_POLISH = 24
_POLISH_PATIENCE = 10
_REFINED_S = 4.0  # with less time than this for a part, what the whole takes is all that is timed again


@dataclass
class _Parts:
    """What is known of the parts: candidates by fingerprint, fastest first; empty for one without a kernel."""

    found: dict[str, list[Ranked]] = field(default_factory=dict)
    settled: bool = True

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


def search(
    context: Context, s: Session, compositions: Sequence[Composition], budget: Budget, granted: float | None
) -> str:
    """Search the parts, then measure the best compositions in session ``s`` of the whole; answers why it ended.

    Args:
        compositions: the most promising first.
        granted: see :func:`autotune.tuner.study.tune`.

    Raises:
        WorkerFault: the machine failed.
    """
    learn_stored(s)
    parts = _Parts()
    for c in compositions:
        best = min((parts.expected(d) for d in compositions if parts.complete(d)), default=None)
        scale = parts.scale(compositions)
        if parts.hopeless(c) or (best is not None and parts.expected(c, scale) > _SLACK * best):
            continue
        for part in c.parts:
            if part.fingerprint in parts.found:
                continue
            parts.found[part.fingerprint] = _search_part(context, s, part, compositions, parts, budget, granted)
            if s.interrupt.requested or not parts.found[part.fingerprint]:
                break
        if s.interrupt.requested:
            break
    s.worker.open(s.task.workload)
    seeds = [Seed(config, "composed") for config in _wholes(s, compositions, parts)]
    if context.sampler != "model" or not seeds:  # then the model alone decides
        seeds.insert(0, Seed(s.task.normalize(s.task.default()), "default"))
    space = s.task.space(context.space_file)
    Explorer(s, space, None, seeds, until_s=None, patience=0).run()
    finals.refine(s)
    if context.sampler in ("tpe", "gp"):
        _polish(context, s, budget)
    if s.interrupt.requested:
        return "interrupted"
    return f"{NO_GAIN} in any part" if parts.settled else TIME_UP


def _share(part: Workload, compositions: Sequence[Composition], parts: _Parts) -> float:
    """A part's share of what is left to be searched, by what the cost model says that parts take."""
    weights: dict[str, float] = {}
    for rank, c in enumerate(compositions):
        for p, weight in zip(c.parts, c.weights, strict=True):
            if p.fingerprint not in parts.found:
                # What only less promising compositions have gets less.
                weights[p.fingerprint] = max(weights.get(p.fingerprint, 0.0), weight / (1 + rank))
    total = sum(weights.values())
    return weights[part.fingerprint] / total if total > 0 else 1.0


def _search_part(
    context: Context,
    s: Session,
    part: Workload,
    compositions: Sequence[Composition],
    parts: _Parts,
    budget: Budget,
    granted: float | None,
) -> list[Ranked]:
    """The candidates of a part, fastest first, searched unless that was done before. Adds to the counts of ``s``."""
    until, share = budget.until_s, _share(part, compositions, parts)
    left = None if until is None else max(0.0, _PARTS_SHARE * until - s.elapsed)
    mine = None if granted is None else granted * _share(part, compositions, _Parts())
    trials = None if budget.trials is None else max(1, budget.trials - s.done - s.measured)
    own = replace(budget, trials=trials).part(share, None if left is None else max(1.0, left * share))
    key = context.key(part)
    if part.fingerprint == s.key.workload:
        s.worker.open(part)
        whole, s.trials = s.trials, own.most
        stop = explore(context, s, own, until_s=None if own.timeout is None else s.elapsed + own.timeout)
        s.trials = whole
        parts.settled &= settled(stop, own, mine)
        finals.refine(s)
        return _ranked(s)
    try:
        if (effort := context.searched(key, own, mine)) is not None:
            parts.settled &= effort.settled
            return _stored(context, part, key)
        task = context.task(part)
    except Unsupported:
        return []
    sub = context.session(task, own, s)
    stop = explore(context, sub, own, until_s=own.timeout)
    if own.timeout is None or own.timeout > _REFINED_S:
        finals.refine(sub)
    done = settled(stop, own, mine)
    parts.settled &= done
    context.note(sub, stop, done, mine)
    s.done += sub.measured
    s.reused += sub.reused
    s.failed.update(sub.failed)
    return _ranked(sub)


def _ranked(s: Session) -> list[Ranked]:
    return [(m.config, m.latency_us) for m in s.ranking()[:_CANDIDATES] if m.latency_us is not None]


def _stored(context: Context, part: Workload, key: Key) -> list[Ranked]:
    """The best stored candidates of a part, those of the user's space only."""
    best = context.store.best(key, n=_CANDIDATES if context.space_file is None else 1000)
    if context.space_file is not None:
        task = context.task(part)
        space = task.space(context.space_file)
        best = [m for m in best if holds(space, m.config, task.normalize)][:_CANDIDATES]
    return [(m.config, m.latency_us) for m in best if m.latency_us is not None]


def _wholes(s: Session, compositions: Sequence[Composition], parts: _Parts) -> list[Config]:
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


def _polish(context: Context, s: Session, budget: Budget) -> None:
    """Try what is one step from the best whole: parts that follow each other share the caches, which none of them knew.

    Only as far as candidates and time go round, and where there are several parts.
    """
    ranking = s.ranking()
    most = _POLISH if budget.trials is None else min(_POLISH, budget.trials - s.done - s.measured)
    if not ranking or most < 1 or s.interrupt.requested or not isinstance(s.task, ComposedTask):
        return
    space = s.task.space_for(ranking[0].config, context.space_file)
    if not space.contains(ranking[0].config):
        return
    trials, s.trials = s.trials, most
    polish = Explorer(s, space, None, [], until_s=budget.until_s, patience=_POLISH_PATIENCE, polish=True, prune=True)
    polish.run()
    s.trials = trials
    finals.refine(s)
