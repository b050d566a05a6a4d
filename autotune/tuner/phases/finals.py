"""The second phase: time the near-best again, compare the best with the baselines, and choose the deployed code."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.errors import UserError
from autotune.measure.outcome import Blame, Outcome
from autotune.measure.worker import Contender, MachineFault
from autotune.store.records import Measurement, Schedule
from autotune.task import REFERENCE, Config, Status, config_key
from autotune.tuner.context import Session
from autotune.tuner.threads import LEASE_S

WINNER = "autotune"
_FEW = 8
"""Searches of at most this many candidates time none of them again, and compare only those near the best."""
_NEAR = 1.02
"""A candidate within this factor of the floor counts as at the floor, given the precision of a short timing."""
_LEAST_CALLS = 8
"""Calls of a slow finalist in a final comparison: one to warm up and three samples, and as many of the baselines."""
_PROMISING = 1.15
"""If the model expects the default within this factor of the floor, the default is measured before anything else."""


@dataclass(frozen=True)
class Final:
    """Outcome of the final comparison; latencies in microseconds. ``references`` are timed, but do not compete."""

    schedule: Schedule | None = None
    best: Config | None = None
    best_us: float | None = None
    default_us: float | None = None
    noise: float | None = None
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def refine(s: Session) -> None:
    """Time the near-best candidates again with more samples; stored repeats are reused.

    First timings are short, so the fastest of many candidates is partly selected by noise. For a few candidates, the
    final comparison suffices. So it does if the time ends: timing a slow candidate again takes seconds.
    """
    if _is_short(s):
        return
    policy = s.context.policy
    tried: set[str] = set()
    while len(tried) < policy.repeat_top and not s.context.interrupt.requested:
        # Ranked again each time: the first may become slower, and others then enter the margin.
        m = next((m for m in near_best(s) if m.stage == "screen" and config_key(m.config) not in tried), None)
        if m is None or _is_late(s, min(policy.final_s, policy.repeat_repeats * (m.latency_us or 0.0) / 1e6)):
            return
        tried.add(config_key(m.config))
        stored = s.context.store.get_measurement(s.key, m.config, "repeat")
        if stored is not None:
            s.learn(stored)
        elif s.context.store.claim(s.key, m.config, "repeat", s.context.owner, LEASE_S):
            again = s.measure(m.config, s.artifact(m.config), "repeat")
            s.report("repeat", f"{again.latency_us:.1f} us" if again.latency_us is not None else again.reason)


def _is_late(s: Session, seconds: float) -> bool:
    """True if ``seconds`` more, and the shortest final comparison after them, exceed the time of the search."""
    left = (s.whole or s).left
    best = [m.latency_us or 0.0 for m in s.ranking()[: s.context.policy.final_top]]
    return left is not None and seconds + _LEAST_CALLS * sum(best) / 1e6 > left


def _is_short(s: Session) -> bool:
    return s.budget.trials is not None and s.budget.trials <= _FEW


def near_best(s: Session) -> list[Measurement]:
    """Return the candidates within the policy's margin of the fastest, fastest first."""
    ranking = s.ranking()
    limit = (ranking[0].latency_us or 0.0) * (1 + s.context.policy.near_best) if ranking else 0.0
    return [m for m in ranking if m.latency_us is not None and m.latency_us <= limit]


def compare(s: Session) -> Final:
    """Decide between the best candidates, the default and the baselines; store the decision as a schedule.

    The comparison is interleaved, and its candidates are verified again on inputs of another seed. A baseline wins
    ties. The schedule then has no configuration, and the region runs the user's code. An earlier comparison with the
    same finalists is not repeated, unless the machine was too busy to trust it. There is no decision if the run ends
    before the baselines are compiled.
    """
    stored = s.context.store.schedule_of(s.key)
    while True:
        finalists = _finalists(s, stored)
        if not finalists:
            return Final()
        if stored is not None and _decided(s, stored, finalists):
            return _from_store(s, stored)
        if not _has_baselines(s):
            return Final()
        s.report("final", f"{len(finalists)} candidates against the baselines")
        outcomes = _run(s, finalists, again=stored is not None and stored.busy)
        if any(outcomes[config_key(m.config)].ok for m in finalists if s.allows(m.config)):
            return _decide(s, finalists, outcomes)
        # All finalists failed now (wrong on other inputs, for example) and are marked as failed: try the next best.


def _finalists(s: Session, stored: Schedule | None) -> list[Measurement]:
    """Return the best few, the default, and the winner of an earlier comparison.

    The latter two are compared even if the user's space excludes them, provided that it has a working candidate.
    Candidates beyond the policy's ``hopeless`` factor are left out: rounds with a default of a hundred times the best
    took longer than the search before them. A search of few candidates compares only those near the best, and the
    earlier winner: the default's first timing is enough to report it.
    """
    ranking = s.ranking()
    if not ranking:
        return []
    policy, best = s.context.policy, ranking[0].latency_us or 0.0
    chosen = near_best(s) if _is_short(s) else [m for m in ranking if (m.latency_us or 0.0) <= policy.hopeless * best]
    chosen = chosen[: policy.final_top]
    have = {config_key(m.config) for m in chosen}
    also = (None if _is_short(s) else s.default, stored.config if stored else None)
    more = [s.known[key] for key in dict.fromkeys(config_key(c) for c in also if c) if key in s.known]
    more = [m for m in more if m.status is Status.OK and config_key(m.config) not in have]
    return chosen + [m for m in more if m.latency_us is not None and m.latency_us <= policy.hopeless * best]


def _decided(s: Session, stored: Schedule, finalists: Sequence[Measurement]) -> bool:
    """True if the stored decision was made among these finalists, on a machine that was quiet enough.

    A decision in the shipped space also holds in a narrower one that contains its winner.
    """
    if stored.busy or stored.space not in ("", _space(s)) or (stored.config and not s.allows(stored.config)):
        return False
    finals = [s.context.store.get_measurement(s.key, m.config, "final") for m in finalists]
    return all(m is not None and m.status is Status.OK for m in finals)


def _has_baselines(s: Session) -> bool:
    """Wait for the baselines' code; False if it is not there when the run, or the budget's wait, ends.

    Without an end, or after a long wait, the worker compiles them itself.
    """
    if (baselines := s.context.baselines(s.task.workload)) is None:
        return True
    left, most = s.context.left_s, s.budget.waits
    found = baselines.wait(s.task.workload, s.task.device, left if most is None else min(left, most))
    return found is not None or (most is None and s.context.left_s > 0.0)


def _run(s: Session, finalists: Sequence[Measurement], again: bool) -> dict[str, Outcome]:
    """Compare the finalists and store the outcomes; ``again`` replaces the measurements of an earlier comparison."""
    contenders, outcomes = [], {}
    for m in finalists:
        key, built = config_key(m.config), s.artifact(m.config)
        if built.artifact is None:
            outcomes[key] = Outcome(Status.COMPILE_ERROR, reason=built.reason, fault=built.fault)
        else:
            contenders.append(Contender(key, m.config, built.artifact))
    if contenders:
        outcomes |= _compared(s, contenders)
    for m in finalists:
        key = config_key(m.config)
        final = Measurement.of(s.key, m.config, "final", outcomes[key], s.context.run)
        if outcomes[key].fault:
            s.spare(final, outcomes[key].fault)
            continue
        # Without ``again``, an earlier final measurement stays: the schedule has the newer number.
        s.context.store.add_measurement(final, replace=again)
        s.learn(final)
    return outcomes


def _compared(s: Session, contenders: Sequence[Contender]) -> dict[str, Outcome]:
    """Return the outcomes of the comparison, repeated once after a machine fault of any contender.

    Raises:
        MachineFault: the repetition had a machine fault too. Without the failed contender, such as a baseline, the
            decision could differ.
        UserError: a setting is wrong.
    """
    outcomes: dict[str, Outcome] = {}
    for last in (False, True):
        outcomes = s.worker.compare(contenders, seed=s.context.options.seed + 1)
        # The worker has already retried a contender that ran out of memory or was killed.
        hindered = [o for o in outcomes.values() if o.fault in (Blame.MACHINE, Blame.USER)]
        if not hindered:
            break
        if last and hindered[0].fault is Blame.USER:
            raise UserError(hindered[0].reason)
        if last:
            raise MachineFault(f"the final comparison failed: {hindered[0].reason}")
    return outcomes


def _decide(s: Session, finalists: Sequence[Measurement], outcomes: Mapping[str, Outcome]) -> Final:
    names = {config_key(m.config): m.config for m in finalists}
    times = {key: o.latency_us for key, o in outcomes.items() if o.ok and o.latency_us is not None}
    best = min((k for k, config in names.items() if k in times and s.allows(config)), key=lambda k: times[k])
    others = {name: times.get(name) for name in outcomes if name not in names}
    baselines = {name: us for name, us in others.items() if not name.startswith(REFERENCE)}
    references = {name: us for name, us in others.items() if name not in baselines and us is not None}
    errors = {name: outcomes[name].reason for name in baselines if not outcomes[name].ok}
    rivals = {name: us for name, us in baselines.items() if us is not None}
    fastest = min(rivals, key=lambda n: rivals[n], default="")
    if errors and not rivals:  # no baseline could be timed: ours may be slower
        return Final(
            best=names[best], best_us=times[best], baselines=baselines, errors=errors, metrics=outcomes[best].metrics
        )
    won = not fastest or _beats(outcomes[best], outcomes[fastest])
    schedule = Schedule(
        key=s.key,
        config=names[best] if won else None,
        latency_us=times[best] if won else rivals[fastest],
        baselines=rivals | references,
        artifact=s.artifacts[best] if won else None,
        winner=WINNER if won else fastest,
        family=s.task.workload.family,
        extent=s.task.workload.extent,
        others=s.worker.others,
        space=_space(s),
    )
    # The stored winner, if it still works, was among the finalists, so the new decision has more information.
    s.context.store.put_schedule(schedule, replace=True)
    return Final(
        schedule=schedule,
        best=names[best],
        best_us=times[best],
        default_us=times.get(config_key(s.default), _default_us(s)),
        noise=outcomes[best if won else fastest].noise,
        baselines=baselines,
        references=schedule.references,
        errors=errors,
        metrics=outcomes[best].metrics,
    )


def _space(s: Session) -> str:
    return s.narrowed.fingerprint if s.narrowed else ""


def _default_us(s: Session) -> float | None:
    """Return the default's latency from its last timing, if it was not compared."""
    known = s.known.get(config_key(s.default))
    return known.latency_us if known is not None else None


def _beats(candidate: Outcome, baseline: Outcome) -> bool:
    """True if the candidate is faster in the median and in most rounds, whose samples are taken close together."""
    a, b = candidate.latency_us, baseline.latency_us
    if a is None or b is None or a >= b:
        return a is not None and b is None
    return statistics.median(x / y for x, y in zip(candidate.samples, baseline.samples, strict=False)) < 1


def _from_store(s: Session, stored: Schedule) -> Final:
    """Return the decision of an earlier search, with its latencies."""
    finals = {}
    for m in s.known.values():
        final = s.context.store.get_measurement(s.key, m.config, "final")
        if final is not None and final.latency_us is not None:
            finals[config_key(m.config)] = final
    best = min((m for m in finals.values() if s.allows(m.config)), key=lambda m: m.latency_us or 0.0)
    if stored.config is not None:
        best = finals.get(config_key(stored.config), best)
    at_default = finals.get(config_key(s.default))
    return Final(
        schedule=stored,
        best=best.config,
        best_us=stored.latency_us if stored.config is not None else best.latency_us,
        default_us=at_default.latency_us if at_default else _default_us(s),
        noise=best.noise,
        baselines=stored.rivals,
        references=stored.references,
        metrics=best.metrics,
    )


def without_final(s: Session) -> Final:
    """Return the best screened candidate, without a final comparison."""
    first = next(iter(s.ranking()), None)
    if first is None:
        return Final()
    return Final(best=first.config, best_us=first.latency_us, noise=first.noise, metrics=first.metrics)


def is_at_floor(s: Session) -> bool:
    """True if the best candidate of a session has reached the known lower bound of the latency."""
    if (least := s.task.least_us()) is None:  # called for every candidate: skip the ranking
        return False
    best = s.best_us
    return best is not None and best <= _NEAR * least


def is_baseline_at_floor(s: Session) -> bool:
    """True if a baseline has reached the lower bound in a final comparison with the best candidate so far.

    The comparison is stored. If the search ends here, it is the search's last one.

    Raises:
        WorkerFault: the machine failed.
    """
    if (least := s.task.least_us()) is None or s.context.interrupt.requested:
        return False
    known = compare(s).baselines.values()
    return any(us is not None and us <= _NEAR * least for us in known)


def may_be_at_floor(s: Session) -> bool:
    """True if the cost model expects the default near the lower bound, so that it is measured before the parts."""
    least = s.task.least_us()
    if least is None or s.narrowed is not None:
        return False
    expected = s.task.predict(s.default)
    return expected is not None and expected <= _PROMISING * least
