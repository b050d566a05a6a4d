"""The first phase of a search: from stored measurements and seeds to a ranking of candidates."""

from __future__ import annotations

from autotune.store.records import Measurement
from autotune.task import Status
from autotune.tuner import seeds
from autotune.tuner.context import Session
from autotune.tuner.history import History
from autotune.tuner.options import Budget
from autotune.tuner.phases.explore import AT_FLOOR, EXHAUSTED, NO_GAIN, Explorer
from autotune.tuner.samplers import NONE, is_guided


def explore(s: Session, budget: Budget, *, until_s: float | None) -> str:
    """Screen candidates of a workload that is searched as a whole, or of one part; return the stop reason.

    Args:
        until_s: seconds after the session's start when screening ends; None for no limit.

    Raises:
        WorkerFault: the machine failed.
    """
    options, workload = s.context.options, s.task.workload
    history: History | None = None
    space = s.task.space(options.space_file)
    stored = learn_stored(s)
    if options.sampler == NONE:
        chosen = seeds.picks(s.task, space, options.seed, 1) or [s.task.default()]
        begin = [seeds.Seed(s.task.normalize(c), "model") for c in chosen]
    else:
        history = History(sampler=options.sampler, seed=options.seed, space=space, known=stored)
        store, asked = s.context.store, options.seeds.get(workload.fingerprint, ())
        near = store.neighbours(workload.family, s.key.device, workload.fingerprint, extent=workload.extent)
        before = seeds.winners(store, s.key)
        liked = seeds.remembered(s.context, s.task, space)
        configs = [m.config for _, m in near]
        begin = seeds.plan(s.task, space, configs, options.seed, asked=asked, elsewhere=before, liked=liked)
    guided = is_guided(options.sampler)
    explorer = Explorer(
        s, space, history, begin, until_s=until_s, patience=budget.patience_now, polish=guided, prune=guided
    )
    began, measured = s.elapsed, s.measured
    stop = explorer.run()
    s.context.pace.add(s.elapsed - began, s.measured - measured)
    return stop


def settled(stop: str, budget: Budget, granted: float | None) -> bool:
    """True if a search that stopped for ``stop`` would gain nothing from more time."""
    if stop in EXHAUSTED or stop == AT_FLOOR:
        return True
    patient = budget.patience is None or not budget.patience or budget.patience >= Budget().patience_now
    return stop.startswith(NO_GAIN) and (granted is None or patient)


def learn_stored(s: Session) -> list[Measurement]:
    """Load the earlier measurements of this key; return the first timings, which are the study's objective."""
    key = s.key
    rank = {"screen": 0, "repeat": 1, "final": 2}
    every = s.context.store.measurements(key.workload, key.device, key.environment, key.policy)
    screens = []
    for m in sorted(every, key=lambda m: rank.get(m.stage, 0)):
        s.learn(m)
        if m.stage == "screen":
            screens.append(m)
    s.reused = sum(m.status is not Status.INVALID and m.run != s.context.run for m in screens)
    return screens
