"""The search of one workload, from its task to a stored schedule, and the results of earlier searches."""

from __future__ import annotations

from dataclasses import replace

from autotune.errors import Unsupported, UserError
from autotune.measure.worker import MachineFault, WorkerFault
from autotune.store.records import Key
from autotune.task import config_key
from autotune.tuner.context import Context, Session
from autotune.tuner.options import Budget
from autotune.tuner.phases import compose, finals
from autotune.tuner.phases.explore import ALIKE, TIME_UP, explore, follow, settled
from autotune.tuner.phases.finals import WINNER, Final
from autotune.tuner.result import Result
from autotune.workload import Workload

FAULT = "the machine failed"
"""Stop reason of a search that ended by a machine fault."""


def tune(context: Context, workload: Workload, budget: Budget, granted: float | None = None) -> Result:
    """Search one workload on one device; store all measurements, and the winner as a schedule.

    The default is measured first, then the suggestions of heuristics, neighbours in the database and the cost model,
    then the sampler's proposals. A workload with parts is searched part by part (:mod:`autotune.tuner.phases.compose`).
    A workload with a leader (:meth:`Context.followed`) takes the leader's best configuration, if that works.
    Stored candidates are not measured again, and candidates claimed by another search are left to it.

    Ctrl-C ends the search in an orderly way: the candidates known by then are compared with the baselines, and the
    result is stored. A second Ctrl-C ends it at once. Starting a killed search again resumes it. A search that has
    ended before with about as much time is not repeated.

    Args:
        granted: the workload's share of the run's time in seconds, for comparison with earlier efforts; None for
            ``budget.timeout``.

    Raises:
        UserError: the arguments or the search-space file are wrong, or the database is unusable.
    """
    granted = budget.timeout if granted is None else granted
    key = context.key(workload)
    if (found := recalled(context, workload, key, budget, granted)) is not None:
        context.decided(workload, found, cut=False, settled=True)
        return found
    leader = context.followed(workload, budget)
    try:
        task = context.task(workload)
        context.worker(workload)  # it starts meanwhile
        compositions = [] if leader is not None else context.compositions(task)
    except Unsupported as why:
        return Result(key.workload, workload.label, workload.kind, context.device, key.policy, error=str(why))
    s = context.session(task, budget)
    restarts, restart_s, baseline_s = s.worker.restarts, s.worker.restart_s, s.worker.baseline_s
    stop, error, final, broken = "", "", finals.Final(), False
    try:
        if leader is not None and not (stop := follow(s)):
            compositions = context.compositions(task)
            s.trials = max(1, s.trials - s.measured)
        if not stop and compositions:
            stop = compose.search(s, compositions, granted)
        elif not stop:
            stop = explore(s, budget, until_s=budget.until_s)
            finals.refine(s)
        s.worker.open(workload)
        s.search_s = s.elapsed
        final = finals.compare(s)
    except Unsupported as why:
        error = str(why)
    except WorkerFault as fault:
        broken = isinstance(fault, MachineFault)
        stop, error = FAULT if broken else stop or FAULT, str(fault)
    except KeyboardInterrupt:
        stop = "interrupted"
        context.interrupt.requested = True
    s.search_s = s.search_s or s.elapsed  # a search that ended early had no comparison
    if final.best is None:
        final = finals.without_final(s)
    else:
        s.final_us = final.best_us
        rivals = [us for us in final.baselines.values() if us is not None]
        if rivals and final.schedule is not None:
            s.saved_us = max(0.0, min(rivals) - final.schedule.latency_us)
    if final.best is None and not error and not context.interrupt.requested and s.narrowed is not None:
        error = f"no candidate of {s.narrowed.source} {'works' if s.tried else 'was tried'}"
    done = settled(stop, budget, granted) or (stop == ALIKE and leader is not None and leader.settled)
    if not error and stop:
        context.note(s, stop, done, granted)
    s.report("done", stop)
    found = result(s, final, stop, error)
    context.decided(workload, found, cut=stop in (TIME_UP, "interrupted"), settled=done)
    return replace(
        found,
        fault=broken,
        restarts=s.worker.restarts - restarts,
        restart_s=s.worker.restart_s - restart_s,
        baseline_s=s.worker.baseline_s - baseline_s,
    )


def result(s: Session, final: Final, stop: str, error: str) -> Result:
    """Return the result of a finished session."""
    schedule = final.schedule
    return Result(
        workload=s.key.workload,
        label=s.task.workload.label,
        kind=s.task.workload.kind,
        device=s.task.device,
        policy=s.key.policy,
        measured=s.done + s.measured,
        reused=s.reused,
        failed=dict(s.failed),
        best=final.best,
        best_us=final.best_us,
        default_us=final.default_us,
        baselines=final.baselines,
        baseline_errors=final.errors,
        references=final.references,
        metrics=final.metrics,
        winner=schedule.winner if schedule else "",
        deployed_us=schedule.latency_us if schedule else None,
        noise=final.noise,
        stop=stop,
        seconds=s.elapsed,
        search_s=s.search_s,
        bytes_moved=s.worker.bytes_moved,
        others=schedule.others if schedule else None,
        interrupted=s.context.interrupt.requested,
        error=error,
    )


def known(context: Context, workload: Workload, budget: Budget, granted: float | None) -> Result | None:
    """Return an earlier search's result, regardless of its time or a busy machine; None without an earlier search.

    The result is marked as not begun if the current run, with ``budget``, would have searched the workload again.
    """
    key = context.key(workload)
    if (found := recalled(context, workload, key, budget, granted)) is not None:
        return found
    found = recalled(context, workload, key, Budget(), 0.0, busy=True)
    return found and replace(found, begun=False, stop="not begun in time: this is what an earlier search came to")


def recalled(
    context: Context, workload: Workload, key: Key, budget: Budget, granted: float | None, busy: bool = False
) -> Result | None:
    """Return an earlier search's result if a new search has nothing left to do, else None.

    Starts neither the worker nor the compile pool. Decisions made on a busy machine (unless ``busy``) or in a narrowed
    space are ignored.
    """
    effort = context.searched(key, budget, granted)
    if effort is None or context.options.space_file is not None:
        return None
    schedule = context.store.schedule_of(key)
    if schedule is None or (schedule.busy and not busy) or schedule.space:
        return None
    measured = context.store.measurements(key.workload, key.device, key.environment, key.policy)
    timed = [m for m in measured if m.latency_us is not None]
    # A hopeless default has no final timing (``finals.compare``).
    latest = {config_key(m.config): m for stage in ("screen", "repeat", "final") for m in timed if m.stage == stage}
    finals = {key: m for key, m in latest.items() if m.stage == "final"}
    if not finals:
        return None
    best = min(finals.values(), key=lambda m: m.latency_us or 0.0)
    if schedule.config is not None:
        best = finals.get(config_key(schedule.config), best)
    ours = schedule.winner == WINNER
    found = Result(
        workload=key.workload,
        label=workload.label,
        kind=workload.kind,
        device=context.device,
        policy=key.policy,
        reused=sum(m.stage == "screen" for m in measured),
        best=best.config,
        best_us=schedule.latency_us if ours else best.latency_us,
        baselines=schedule.rivals,
        references=schedule.references,
        winner=schedule.winner,
        deployed_us=schedule.latency_us,
        noise=best.noise,
        metrics=best.metrics,
        stop=f"nothing left to do: {effort.stop}",
        others=schedule.others,
    )
    try:
        task = context.task(workload)
    except (Unsupported, UserError):  # cannot be opened here: the device is another host's
        return found
    default = latest.get(config_key(task.normalize(task.default())))
    return replace(found, default_us=default.latency_us if default else None)
