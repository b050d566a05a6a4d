"""Searching a workload by its parts: each is tuned once, for every workload that has it, and the whole is put together
of what they take by themselves. The best few are then measured as wholes, which decides.

Parts are workloads of their own: their measurements lie in the database under their own fingerprints, where searches of
other workloads, models and runs find them. Of a short search's compositions only the most promising are followed up
(:mod:`autotune.tuner.composed.parts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import Unsupported
from autotune.space import Space, holds
from autotune.store.records import Key
from autotune.task import Composition, Config, Ranked, config_key
from autotune.tuner.composed.parts import LEAST_S, Means, Parts
from autotune.tuner.context import Context, Session
from autotune.tuner.options import Budget
from autotune.tuner.phases import finals
from autotune.tuner.phases.explore import NO_GAIN, TIME_UP, TRIALS_UP, Explorer
from autotune.tuner.phases.floor import AT_FLOOR, is_at_floor, is_baseline_at_floor, may_be_at_floor
from autotune.tuner.phases.screen import explore, learn_stored, settled
from autotune.tuner.proposals.elsewhere import winners
from autotune.tuner.proposals.samplers import NONE, is_guided
from autotune.tuner.proposals.seeds import Seed
from autotune.workload import Workload

WHOLES = 4
"""Compositions that are measured as a whole, beside the default."""
_PARTS_SHARE = 0.75  # of the time before the final comparison
_CANDIDATES = 8  # of each part, to choose from when they are put together
_POLISH = 24
_POLISH_PATIENCE = 10
_REFINED_S = 4.0  # with less time than this for a part, what the whole takes is all that is timed again


def search(s: Session, compositions: Sequence[Composition], budget: Budget, granted: float | None) -> str:
    """Search the parts, then measure the best compositions in session ``s`` of the whole; answers why it ended.

    Args:
        compositions: the most promising first.
        granted: see :func:`autotune.tuner.study.tune`.

    Raises:
        WorkerFault: the machine failed.
    """
    learn_stored(s)
    if may_be_at_floor(s):
        begin = [Seed(s.task.normalize(s.task.default()), "default")]
        Explorer(s, s.task.space(s.context.options.space_file), None, begin, until_s=None, patience=0).run()
        if is_at_floor(s) or is_baseline_at_floor(s):
            return AT_FLOOR
    parts = Parts()
    begun: list[Composition] = []
    for n, c in enumerate(compositions):
        if not parts.promising(c, compositions):
            continue
        followed = _followed(s, compositions, n, parts, budget)
        if not any(c is f for f in followed):
            parts.settled = False
            continue
        begun.append(c)
        for part in c.parts:
            if part.fingerprint in parts.found:
                continue
            parts.found[part.fingerprint] = _search_part(s, part, followed, begun, parts, budget, granted)
            if s.context.interrupt.requested or not parts.found[part.fingerprint]:
                break
        if s.context.interrupt.requested:
            break
    _go_on(s, compositions, parts, budget, granted)
    s.context.pool.forget(parts.found.keys() - {s.key.workload})
    s.worker.open(s.task.workload)
    seeds = [Seed(config, "composed") for config in _wholes(s, compositions, parts)]
    if s.context.options.sampler != NONE or not seeds:  # then the model alone decides
        seeds.insert(0, Seed(s.task.normalize(s.task.default()), "default"))
        seeds += [Seed(config, "elsewhere") for config in _elsewhere(s)]
    space = s.task.space(s.context.options.space_file)
    Explorer(s, space, None, seeds, until_s=None, patience=0).run()
    finals.refine(s)
    if is_guided(s.context.options.sampler):
        _polish(s, budget)
    if s.context.interrupt.requested:
        return "interrupted"
    if parts.settled:
        return f"{NO_GAIN} in any part"
    return TIME_UP if budget.timeout is not None else TRIALS_UP


def _followed(
    s: Session, compositions: Sequence[Composition], n: int, parts: Parts, budget: Budget
) -> list[Composition]:
    """The compositions among which what is left is divided when it is the ``n``-th's turn.

    How long candidates take decides at the beginning; what was spared for a composition then is not withdrawn later.
    """
    trials = None if budget.trials is None else budget.trials - s.done - s.measured
    pace = None if parts.found else s.context.pace.each
    means = Means(_seconds(s, compositions[n:], parts, budget), trials, pace)
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


def _seconds(s: Session, followed: Sequence[Composition], parts: Parts, budget: Budget) -> float | None:
    """What is left in session ``s`` for the parts of the compositions that are followed up; None for no limit."""
    return _spare(s.key.workload, s.elapsed, followed, parts, budget)


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
    budget: Budget,
    granted: float | None,
) -> list[Ranked]:
    """The candidates of a part, fastest first, searched unless that was done before. Adds to the counts of ``s``.

    Args:
        followed: compositions among whose parts what is left is divided.
        begun: those that were followed up so far, this part's among them.
    """
    left, share = _seconds(s, followed, parts, budget), parts.share(part, followed)
    # What the part would get of the grant in a search that begins with all of these compositions.
    every = [*begun, *(c for c in followed if not any(c is b for b in begun))]
    mine = None if granted is None else granted * Parts().share(part, every)
    trials = None if budget.trials is None else max(1, budget.trials - s.done - s.measured)
    own = replace(budget, trials=trials).part(share, None if left is None else max(1.0, left * share))
    key = s.context.key(part)
    if part.fingerprint != s.key.workload and (effort := s.context.searched(key, own, mine)) is not None:
        parts.settled &= effort.settled
        return _stored(s.context, part, key)
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
        task = s.context.task(part)
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


def _go_on(
    s: Session,
    compositions: Sequence[Composition],
    parts: Parts,
    budget: Budget,
    granted: float | None,
) -> None:
    """Spend what the compositions that came to nothing have left on the best one, where its parts were cut short."""
    best: Composition | None = None
    while parts.cut and not s.context.interrupt.requested:
        left = _seconds(s, (), parts, budget)
        trials = None if budget.trials is None else budget.trials - s.done - s.measured
        if left is None or left < LEAST_S or (trials is not None and trials < 1):
            return
        best = best or _best(compositions, parts)
        cut = [p for p in best.parts if p.fingerprint in parts.cut] if best else []
        if best is None or not cut:
            return
        share = Parts({f: r for f, r in parts.found.items() if f not in parts.cut}).share(cut[0], [best])
        own = replace(budget, trials=trials).part(share, max(1.0, left * share))
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


def _stored(context: Context, part: Workload, key: Key) -> list[Ranked]:
    """The best stored candidates of a part, those of the user's space only."""
    best = context.store.best(key, n=_CANDIDATES if context.options.space_file is None else 1000)
    if context.options.space_file is not None:
        task = context.task(part)
        space = task.space(context.options.space_file)
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


def _polish(s: Session, budget: Budget) -> None:
    """Try what is one step from the best whole: parts that follow each other share the caches, which none of them knew.

    Only as far as candidates and time go round, and where there are several parts.
    """
    ranking = s.ranking()
    most = _POLISH if budget.trials is None else min(_POLISH, budget.trials - s.done - s.measured)
    if not ranking or most < 1 or s.context.interrupt.requested:
        return
    space = _space_of(s, ranking[0].config)
    if space is None or not space.contains(ranking[0].config):
        return
    trials, s.trials = s.trials, most
    polish = Explorer(s, space, None, [], until_s=budget.until_s, patience=_POLISH_PATIENCE, polish=True, prune=True)
    polish.run()
    s.trials = trials
    finals.refine(s)
