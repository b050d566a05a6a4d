"""Searching one workload: from its task to a stored schedule."""

from __future__ import annotations

from dataclasses import replace

from autotune.errors import Unsupported
from autotune.measure.worker import MachineFault, WorkerFault
from autotune.tuner.composed import compose
from autotune.tuner.context import Context
from autotune.tuner.options import Budget
from autotune.tuner.outcome import recalled, result
from autotune.tuner.phases import finals
from autotune.tuner.phases.screen import explore, settled
from autotune.tuner.result import Progress, Result
from autotune.workload import Workload

__all__ = ["FAULT", "Budget", "Progress", "Result", "tune"]

FAULT = "the machine failed"
"""Why a search stopped that the worker's faults left nothing to begin with."""


def tune(context: Context, workload: Workload, budget: Budget, granted: float | None = None) -> Result:
    """Search one workload on one device, store everything that was measured, and the winner as a schedule.

    The default is measured first, then what heuristics, neighbours in the database and the cost model suggest, then
    what the sampler proposes. A workload that its domain can compose of parts is searched part by part
    (:mod:`autotune.tuner.composed.compose`). Candidates that are stored already are not measured again; those that
    another search is measuring are left to it. Ctrl-C ends the search early but in good order: what is known by then
    meets the baselines and is stored; a second Ctrl-C leaves at once. A search that was killed is resumed by starting
    it again. One that came to its end with about as much time before is not repeated.

    Args:
        granted: the workload's share of the run's time in seconds, by which efforts are compared; None for
            ``budget.timeout``.

    Raises:
        UserError: a mistake in the arguments or in the search-space file; a database that cannot be used.
    """
    granted = budget.timeout if granted is None else granted
    key = context.key(workload)
    if (found := recalled(context, workload, key, budget, granted)) is not None:
        return found
    try:
        task = context.task(workload)
        compositions = context.compositions(task)
    except Unsupported as why:
        return Result(key.workload, workload.label, workload.kind, context.device, key.policy, error=str(why))
    s = context.session(task, budget)
    restarts, restart_s = s.worker.restarts, s.worker.restart_s
    stop, error, final, broken = "", "", finals.Final(), False
    try:
        if compositions:
            stop = compose.search(s, compositions, budget, granted)
        else:
            stop = explore(s, budget, until_s=budget.until_s)
            finals.refine(s)
        s.worker.open(workload)
        s.search_s = s.elapsed
        final = finals.compare(s, task.normalize(task.default()))
    except WorkerFault as fault:
        broken = isinstance(fault, MachineFault)
        stop, error = FAULT if broken else stop or FAULT, str(fault)
    except KeyboardInterrupt:
        stop = "interrupted"
        context.interrupt.requested = True
    s.search_s = s.search_s or s.elapsed  # where it ended before the comparison, that took no time
    if final.best is None:
        final = finals.without_final(s)
    else:
        s.final_us = final.best_us
    if final.best is None and not error and not context.interrupt.requested and s.narrowed is not None:
        error = f"no candidate of {s.narrowed.source} {'works' if s.tried else 'was tried'}"
    if not error and stop:
        context.note(s, stop, settled(stop, budget, granted), granted)
    s.tell("done", stop)
    found = result(s, final, stop, error)
    return replace(found, fault=broken, restarts=s.worker.restarts - restarts, restart_s=s.worker.restart_s - restart_s)
