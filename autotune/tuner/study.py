"""Searching one workload: from its task to a stored schedule."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from autotune import device as devices
from autotune.errors import UserError
from autotune.measure.policy import Policy, default_policy
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Measurer, Worker, WorkerFault
from autotune.store.claims import owner_name
from autotune.store.records import Key, Measurement
from autotune.store.store import Store
from autotune.task import Status, Task
from autotune.tuner import finals, seeds
from autotune.tuner.explore import Explorer
from autotune.tuner.history import History
from autotune.tuner.interrupt import Interrupt
from autotune.tuner.result import Progress, Result
from autotune.tuner.session import Lease, Session
from autotune.tuner.space import Space

__all__ = ["Budget", "Progress", "Result", "tune"]

_FINAL_SHARE, _FINAL_MOST_S = 0.25, 30.0
_MOST_TRIALS, _PATIENCE = 256, 48


@dataclass(frozen=True)
class Budget:
    """How much a search may spend; whichever runs out first ends it.

    Attributes:
        trials: new candidates measured at most; repeats and rejected ones cost none. None for as long as there is gain,
            and 256 at most.
        timeout: seconds, the final comparison included, for which a quarter (at most 30 s) is kept; None for no limit.
        patience: candidates measured without a gain of 1% before giving up; None for a third of ``trials`` and at least
            30 (48 where ``trials`` is None), 0 for never.
    """

    trials: int | None = None
    timeout: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials {self.trials}: at least one candidate has to be measured")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"--timeout {self.timeout}: give a number of seconds above 0")
        if self.patience is not None and self.patience < 0:
            raise UserError(f"patience {self.patience}: give a number of candidates, or 0 for no limit")

    @property
    def until_s(self) -> float | None:
        """Seconds after which no further candidate is begun."""
        if self.timeout is None:
            return None
        return self.timeout - min(_FINAL_MOST_S, _FINAL_SHARE * self.timeout)

    @property
    def most(self) -> int:
        """``trials``, or the limit where there is none."""
        return _MOST_TRIALS if self.trials is None else self.trials

    @property
    def patience_now(self) -> int:
        if self.patience is not None:
            return self.patience
        return _PATIENCE if self.trials is None else max(40, self.trials // 2)


def tune(
    task: Task,
    store: Store,
    *,
    trials: int | None = None,
    timeout: float | None = None,
    patience: int | None = None,
    sampler: str = "tpe",
    seed: int = 0,
    space_file: str | None = None,
    policy: Policy | None = None,
    progress: Callable[[Progress], None] | None = None,
    worker: Measurer | None = None,
    pool: CompilePool | None = None,
    run: str | None = None,
    owner: str | None = None,
) -> Result:
    """Search one workload on one device, store everything that was measured, and the winner as a schedule.

    The default is measured first, then what heuristics and neighbours in the database suggest, then what the sampler
    proposes. Candidates that are stored already are not measured again; those that another search is measuring are left
    to it. Ctrl-C ends the search early but in good order: what is known by then meets the baselines and is stored; a
    second Ctrl-C leaves at once. A search that was killed is resumed by starting it again.

    Args:
        trials, timeout, patience: see :class:`Budget`.
        sampler: "tpe", "gp", "random" or "brute".
        seed: of the sampler and of the random inputs that candidates are verified on.
        space_file: a user's narrowed copy of the domain's search space. The default and stored candidates that it
            leaves out are compared with, but never deployed.
        policy: how to measure; part of the key under which everything is stored.
        progress: called after every candidate and at each change of phase.
        worker, pool: to share among several searches on one device; made, and closed, here otherwise.
        run, owner: ids of the run that this search belongs to and of the owner of its claims.

    Raises:
        UserError: a mistake in the arguments or in the search-space file; a database that cannot be used.
    """
    budget = Budget(trials, timeout, patience)
    space = task.space(space_file)
    policy = policy or default_policy(task.device)
    key = _key(task, store, policy)
    owner = owner or owner_name()
    history = History(
        store.optuna_url,
        study_name(task, key, space),
        sampler=sampler,
        seed=seed,
        space=space,
        owner=owner,
        about={"label": task.workload.label, "workload": key.workload, "device": key.device, "policy": key.policy,
               "environment": key.environment, "space": space.fingerprint},
    )  # fmt: skip
    history.sweep()
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(Lease(store, owner))
        if worker is None:
            worker = stack.enter_context(Worker(task.workload, task.device, policy))
        else:
            worker.open(task.workload)
        session = Session(
            task=task,
            store=store,
            key=key,
            policy=policy,
            worker=worker,
            pool=pool or stack.enter_context(CompilePool(timeout_s=policy.build_s)),
            interrupt=interrupt,
            owner=owner,
            run=run or uuid.uuid4().hex,
            trials=budget.most,
            timeout=timeout,
            seed=seed,
            report=progress,
            narrowed=space if space_file and space.fingerprint != task.space().fingerprint else None,
        )
        # Random and exhaustive search stay what they are: they are what others are compared with.
        return _search(session, space, history, budget, polish=sampler in ("tpe", "gp"))


def study_name(task: Task, key: Key, space: Space) -> str:
    """The Optuna study of a search: what fixes its choices, and what its numbers depend on, is in the name."""
    parts = (key.workload, key.device, key.environment, key.policy, space.fingerprint)
    return f"{task.workload.kind} {task.workload.label} [{'.'.join(p[:10] for p in parts)}]"[-500:]


def _key(task: Task, store: Store, policy: Policy) -> Key:
    return Key(
        workload=store.put_workload(task.workload),
        device=store.put_device(devices.identify(task.device)),
        environment=store.put_environment(devices.environment(task.device)),
        policy=policy.key,
    )


def _search(s: Session, space: Space, history: History, budget: Budget, polish: bool) -> Result:
    restarts, restart_s = s.worker.restarts, s.worker.restart_s
    stored = _recall(s)
    history.add(stored)
    near = s.store.neighbours(s.task.workload.family, s.key.device, s.key.workload, extent=s.task.workload.extent)
    plan = seeds.plan(s.task, space, [m.config for _, m in near])
    default = s.task.normalize(plan[0].config)
    explorer = Explorer(s, space, history, plan, until_s=budget.until_s, patience=budget.patience_now, polish=polish)
    stop, error, final = "", "", finals.Final()
    try:
        stop = explorer.run()
        finals.refine(s)
        final = finals.compare(s, default)
    except WorkerFault as fault:
        stop, error = stop or "the machine failed", str(fault)
    except KeyboardInterrupt:
        stop = "interrupted"
        s.interrupt.requested = True
    if final.best is None:
        final = finals.without_final(s)
    else:
        s.final_us = final.best_us
    if final.best is None and not error and not s.interrupt.requested and s.narrowed is not None:
        error = f"no candidate of {space.source} {'works' if s.tried else 'was tried'}"
    s.tell("done", stop)
    return Result(
        workload=s.key.workload,
        label=s.task.workload.label,
        kind=s.task.workload.kind,
        device=s.task.device,
        policy=s.key.policy,
        measured=s.measured,
        reused=s.reused,
        failed=dict(s.failed),
        best=final.best,
        best_us=final.best_us,
        default_us=final.default_us,
        baselines=final.baselines,
        baseline_errors=final.errors,
        winner=final.schedule.winner if final.schedule else "",
        deployed_us=final.schedule.latency_us if final.schedule else None,
        noise=final.noise,
        stop=stop,
        seconds=s.elapsed,
        restarts=s.worker.restarts - restarts,
        restart_s=s.worker.restart_s - restart_s,
        bytes_moved=s.worker.bytes_moved,
        others=final.schedule.others if final.schedule else None,
        interrupted=s.interrupt.requested,
        error=error,
    )


def _recall(s: Session) -> list[Measurement]:
    """Learn what was measured under this key before; answers the first timings, which are the study's objective."""
    key = s.key
    rank = {"screen": 0, "repeat": 1, "final": 2}
    every = s.store.measurements(key.workload, key.device, key.environment, key.policy)
    screens = []
    for m in sorted(every, key=lambda m: rank.get(m.stage, 0)):
        s.learn(m)
        if m.stage == "screen":
            screens.append(m)
    s.reused = sum(m.status is not Status.INVALID for m in screens)
    return screens
