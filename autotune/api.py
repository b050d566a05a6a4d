"""Searching from Python: what ``autotune search`` calls."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError, printable
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.bench.decide import Decision
    from autotune.measure.baselines import BaselinePool
    from autotune.measure.pool import CompilePool
    from autotune.measure.worker import Measurer
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster
    from autotune.tuner.result import Progress, Result


def search(
    target: Workload | Sequence[Workload] | str | Callable[..., Any],
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str | Sequence[str] = "auto",
    db: str | os.PathLike[str] | None = None,
    train: bool = False,
    step: bool = True,
    mode: str | Sequence[str] = "default",
    step_timeout: float = 120.0,
    precision: str | None = None,
    **options: Any,
) -> list[Result]:
    """Search a target's workloads on this machine and store what was learnt.

    A search of a program of the user's ends with its step: families of regions that it is faster without are left to
    Inductor from then on (:mod:`autotune.bench.decide`), which is logged. What Dynamo has compiled in this process is
    forgotten by that. The step is timed under this process's settings of torch's precision and determinism
    (:mod:`autotune.numerics`), and a deployment obeys the verdict under the same ones.

    Args:
        target: workloads; or a program whose memory-intensive regions are tuned: a built-in name, a
            "package.module:callable", or a callable or module.
        inputs: "package.module:callable" that makes the example inputs of a program given by name; the inputs
            themselves (a tuple or list of positional arguments, or the only one, on the device) of one given as a
            callable.
        kwargs: keyword example inputs of a program given as a callable.
        device: "auto", "cpu", "cuda" or "cuda:N"; or several equal GPUs that search side by side, each its share of the
            workloads: "cuda:0,cuda:1" (or a list), or "cuda:all".
        db: database; None for $AUTOTUNE_DB or the default file.
        train: search a program's forward and backward pass, whether or not something of it requires grad.
        step: whether to time the whole step of a program, the forward pass without gradients or, with ``train``, both.
        mode: of ``torch.compile``, or several, for which the step is timed.
        step_timeout: seconds for each mode.
        precision: of a program's regions: "default", or "strict", without approximations beyond a few roundings; None
            for $AUTOTUNE_PRECISION or the default. Deployment finds what was searched under its own
            $AUTOTUNE_PRECISION.
        options: as of :func:`tune_workloads`.

    Returns:
        One result for each workload, in order; for those that were begun, where the time was up before.

    Raises:
        UserError: a mistake in the arguments.
    """
    from autotune.device import resolve_devices
    from autotune.ir.precision import asking
    from autotune.store import Store

    given = isinstance(target, Workload) or (isinstance(target, Sequence) and not isinstance(target, str))
    if given and precision is not None:
        raise UserError("a workload was captured with its precision: give `precision` with a program")
    devices = resolve_devices(device)
    with asking(precision), Store.open(db) as store:
        counted: Sequence[tuple[Workload, int]]
        if isinstance(target, Workload):
            counted = [(target, 1)]
        elif isinstance(target, Sequence) and not isinstance(target, str):
            counted = [(workload, 1) for workload in target]
        else:
            from autotune.domains.fusion.program_spec import captured, workloads_of

            if isinstance(target, str):
                if kwargs:
                    raise UserError("kwargs go with a callable; a program given by name takes its inputs from `inputs`")
                found = captured(target, inputs, devices[0], train=train, known=store.captured)
                options.setdefault("notes", {"capture": found.to_json()})
                counted = found.workloads
            else:
                counted = workloads_of(target, _positional(inputs), dict(kwargs or {}), train=train)
        options.setdefault("weights", time_weights(counted))
        results = tune_workloads([workload for workload, _ in counted], devices, store, **options)
        given = not isinstance(target, (Workload, Sequence)) or (isinstance(target, str) and ":" in target)
        if step and given and any(r.winner for r in results) and not any(r.interrupted or r.fault for r in results):
            log = logging.getLogger("autotune")
            decide_target(
                store,
                target,
                inputs,
                kwargs,
                device=devices[0],
                train=train,
                modes=[mode] if isinstance(mode, str) else mode,
                limit_s=step_timeout,
                command="autotune.search",
                say=lambda line: log.log(logging.WARNING if line.startswith("WARNING") else logging.INFO, "%s", line),
                searched={workload.fingerprint for workload, _ in counted},
            )
        return results


def decide_target(
    store: Store,
    target: Any,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str,
    matmul_precision: str | None = None,
    command: str,
    say: Callable[[str], None],
    **options: Any,
) -> list[Decision]:
    """Let a program's step decide what is deployed.

    Args:
        target: as of :func:`search`; ``inputs`` and ``kwargs`` too.
        command: to be stored with the verdicts.
        say: told in one line what was decided, or why nothing was.
        options: more of :func:`autotune.bench.decide.decide_and_store`.
    """
    from autotune.bench.decide import decide_and_store
    from autotune.domains.fusion.program_spec import resolve

    if isinstance(target, str):
        try:
            fn, (args, given), label = resolve(target, inputs, device, matmul_precision)
        except UserError as error:  # what was searched is stored, and is to be shown
            say(f"WARNING: the step was not timed: {error}")
            return []
        note = {"target": printable(label), "inputs": printable(inputs or "")}
    else:
        fn, args, given = target, _positional(inputs), dict(kwargs or {})
        note = {"target": str(getattr(target, "__qualname__", type(target).__qualname__))}
    note["command"] = command
    return decide_and_store(store, fn, args, given, device=device, note=note, say=say, **options)


def _positional(inputs: Any) -> tuple[Any, ...]:
    return () if inputs is None else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def time_weights(counted: Sequence[tuple[Workload, int]]) -> dict[str, float]:
    """What each workload's share of a search's time should be: more where more time can be won.

    A memory-intensive region costs time by the bytes it moves, but a candidate of a region ten times as large is not
    worth ten times as much searching, and a small one needs a few candidates all the same. So the weight is how often
    the region occurs, times the square root of its mebibytes where it has more than one. What moves no
    bytes that its domain could tell counts as one mebibyte.

    Args:
        counted: workloads and how often each occurs.

    Returns:
        Fingerprint to weight, for :func:`tune_workloads`.
    """
    from autotune.domain import domain_of

    def weight(workload: Workload) -> float:
        return max(1.0, math.sqrt(domain_of(workload.kind).bytes_moved(workload) / 2**20))

    return {workload.fingerprint: count * weight(workload) for workload, count in counted}


def tune_workloads(
    workloads: Sequence[Workload],
    device: str | Sequence[str],
    store: Store,
    *,
    plans: str = "measured",
    ablation: str = "full",
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
    notes: Mapping[str, Any] | None = None,
    measurer: Measurer | None = None,
    pool: CompilePool | None = None,
    baselines: BaselinePool | None = None,
    cluster: Cluster | None = None,
    **options: Any,
) -> list[Result]:
    """Search several workloads on one device, one after the other, in one worker and one compile pool; or on several
    side by side, each with a process, a worker and a compile pool of its own (:mod:`autotune.tuner.devices.dealing`).

    Those with the largest weights come first, those that have no winner yet before those that have one
    (:func:`autotune.tuner.devices.turns.order`). What is left when the time is up is not begun, but for one that is the
    first with anything to do; the same search goes on with it.

    What an earlier search has come to the end of, with at least half of the time it would get now, is not searched
    again, unless ``trials`` asks for so many more candidates. Where nothing is left to do nothing is started.

    Args:
        device: as for :func:`search`. No more devices are used than there are workloads.
        plans: which ways to cut a region into kernels are searched: "measured" (the most promising, chosen by what
            they take), "model" (the one that the cost model likes best) or "greedy" (the largest groups).
        ablation: a search without one of its parts, for comparison; see :mod:`autotune.compiler.planner.methods`.
        progress: called after every candidate and at each change of phase.
        command: noted with the run in the database; ``notes``, as JSON, in its summary.
        measurer: the measuring worker, which stays open; it must measure by ``policy``. None starts one, for this call.
            Of one device only.
        pool: the same of the processes that compile candidates; ``baselines`` of those that compile baselines.
        cluster: a Ray cluster, on whose devices all is searched; ``device`` is left to it. Each kind of device has
            results of its own, whose ``device`` is what it is called.
        options: of :class:`autotune.tuner.options.SearchOptions`: ``trials``, ``timeout``, ``sampler``, ...

    Returns:
        One result for each workload that was begun, or that there was nothing left to do for, in the order of
        ``workloads``. Where the time was up before the others, what an earlier search came to (with ``begun`` False),
        and nothing for those that have none. Fewer than ``workloads`` too where the user interrupted, which the result
        of the one that was being searched says.

    Warns:
        BusyMachine: other processes disturbed a final comparison on the CPU; searching again makes it again.

    Raises:
        UserError: a mistake in the arguments or in the search-space file.
    """
    import contextlib
    import warnings
    from dataclasses import replace

    from autotune.device import resolve_devices
    from autotune.domain import policy_for
    from autotune.tuner.context import Context
    from autotune.tuner.devices.dealing import side_by_side
    from autotune.tuner.devices.turns import Turns, alone, order
    from autotune.tuner.options import SearchOptions
    from autotune.tuner.result import BusyMachine, busy_note

    if not workloads:
        raise UserError("there is nothing to search: no workload was given")
    chosen = SearchOptions(**{**options, **_method(plans, ablation)})  # mistakes are told before anything is started
    if cluster is not None:
        device = [cluster.device]
    devices = resolve_devices(device) if isinstance(device, str) else list(device)
    devices = devices[: len({w.fingerprint for w in workloads})]
    if len(devices) > 1:
        _check_several(workloads, devices)
        if measurer is not None or pool is not None or baselines is not None:
            raise UserError("a measurer or a pool of your own searches on one device: leave it out, or name one device")
    results: list[Result] = []
    context = Context(
        store=store,
        device=devices[0],
        policy=chosen.policy or policy_for(workloads[0], devices[0]),
        options=chosen,
        lent=(measurer, pool, baselines),
        report=progress,
        _worker=measurer,
        _pool=pool,
        _baselines=baselines,
    )
    turns = Turns(workloads, [chosen.weights.get(w.fingerprint, 1.0) for w in workloads], chosen, len(devices))
    if cluster is None:  # a cluster orders them by what its devices have searched
        turns = turns.chosen(order(context, turns))
    run = store.start_run(command or _command(workloads, devices), owner=context.owner)
    context.run = run.id
    state = "failed"
    try:
        if cluster is not None:
            found = cluster.search(context, turns)
        else:
            found = side_by_side(context, devices, turns) if len(devices) > 1 else alone(context, turns)
        with contextlib.closing(context), context.interrupt, contextlib.closing(found):
            for result in found:
                results.append(result)
        if any(r.interrupted for r in results):
            state = "interrupted"
        elif any(r.ok for r in results):
            state = "done"
    except KeyboardInterrupt:
        state = "interrupted"
        if not results:
            raise
        results[-1] = replace(results[-1], interrupted=True)  # what is known already is not lost
    finally:
        store.finish_run(run.id, state, {**(notes or {}), "workloads": [r.to_json() for r in results]})
    if note := busy_note(results):
        warnings.warn(note, BusyMachine, stacklevel=2)
    places = {w.fingerprint: i for i, w in enumerate(workloads)}
    return sorted(results, key=lambda r: places[r.workload])


def _check_several(workloads: Sequence[Workload], devices: Sequence[str]) -> None:
    """See that workloads can be searched on several devices side by side, and what is found holds for all of them."""
    from autotune.device import check_equal
    from autotune.domain import place

    if (twice := next((d for d in devices if d != "cpu" and devices.count(d) > 1), None)) is not None:
        raise UserError(f"{twice} is named twice: name every device once")
    if any(place(workload, devices[0]).count > 1 for workload in workloads):
        raise UserError("what takes several devices itself is searched by one process: name the first of its devices")
    check_equal(devices)


def _method(plans: str, ablation: str) -> dict[str, Any]:
    """The options that the user's words stand for: the domain's method, and the sampler where they decide it."""
    if (plans, ablation) == ("measured", "full"):
        return {}
    from autotune.compiler.planner.methods import choose
    from autotune.tuner.proposals.samplers import NONE

    method, searched = choose(plans, ablation)
    return {"method": method} if searched else {"method": method, "sampler": NONE}


def _command(workloads: Sequence[Workload], devices: Sequence[str]) -> str:
    names = ", ".join(w.label or w.fingerprint[:12] for w in workloads[:4])
    return f"search {names}{', ...' if len(workloads) > 4 else ''} on {', '.join(devices)}"
