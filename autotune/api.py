"""Search from Python: the functions behind ``autotune search``."""

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
    from autotune.measure.pool import BaselinePool, CompilePool
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
    """Search a target's workloads on this machine and store the results.

    A search of a user's program ends by timing the program's step. Families of regions that slow the step down are left
    to Inductor from then on (:mod:`autotune.bench.decide`); the decision is logged. Timing the step resets Dynamo in
    this process. The step is timed under this process's settings of torch's precision and determinism
    (:mod:`autotune.numerics`), and a deployment applies the verdict under the same settings.

    Args:
        target: workloads; or a program whose memory-intensive regions are tuned: a built-in name, a
            "package.module:callable", or a callable or module.
        inputs: for a program given by name, a "package.module:callable" that makes its example inputs. For a
            callable, the inputs themselves on the device: a tuple or list of positional arguments, or a single one.
        kwargs: keyword example inputs of a program given as a callable.
        device: "auto", "cpu", "cuda" or "cuda:N". "cuda:0,cuda:1" (or a list) or "cuda:all" searches on several equal
            GPUs in parallel, each with a share of the workloads.
        db: database; None for $AUTOTUNE_DB or the default file.
        train: search a program's forward and backward pass, even if nothing in it requires grad.
        step: time the whole step of a program: the forward pass without gradients or, with ``train``, both passes.
        mode: one or several modes of ``torch.compile`` to time the step in.
        step_timeout: seconds for each mode.
        precision: of a program's regions: "default", or "strict", without approximations beyond a few roundings; None
            for $AUTOTUNE_PRECISION or the default. A deployment finds only the schedules that were searched under its
            own $AUTOTUNE_PRECISION.
        options: as of :func:`tune_workloads`.

    Returns:
        One result for each workload, in order. If the time ran out, only results of the workloads that were begun.

    Raises:
        UserError: invalid arguments.
    """
    from autotune.device import resolve_devices
    from autotune.ir.nodes import asking
    from autotune.store import Store

    given = isinstance(target, Workload) or (isinstance(target, Sequence) and not isinstance(target, str))
    if given and precision is not None:
        raise UserError("a captured workload has a precision: `precision` goes with a program")
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
    """Time a program's step, and store which families of regions are deployed.

    Args:
        target: as of :func:`search`; ``inputs`` and ``kwargs`` too.
        command: stored with the verdicts.
        say: called with one line: the decision, or the reason for none.
        options: further options of :func:`autotune.bench.decide.decide_and_store`.
    """
    from autotune.bench.decide import decide_and_store
    from autotune.domains.fusion.program_spec import resolve

    if isinstance(target, str):
        try:
            fn, (args, given), label = resolve(target, inputs, device, matmul_precision)
        except UserError as error:  # the search's results are stored and must still be shown
            say(f"WARNING: no verdict, since the step was not timed: {error}")
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
    """Weights that divide a search's time among workloads: more for those with more time to save.

    The time of a memory-intensive region grows with the bytes it moves. But a region ten times as large does not
    deserve ten times the search, and a small one needs a few candidates too. So the weight is the number of the
    region's occurrences times the square root of its mebibytes, at least 1. A workload whose domain cannot compute its
    bytes counts as one mebibyte.

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
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
    notes: Mapping[str, Any] | None = None,
    measurer: Measurer | None = None,
    pool: CompilePool | None = None,
    baselines: BaselinePool | None = None,
    cluster: Cluster | None = None,
    **options: Any,
) -> list[Result]:
    """Search several workloads on one device or on several.

    One device searches its workloads in turn, in one worker and one compile pool. Several devices search in parallel,
    each with its own process, worker and compile pool (:mod:`autotune.tuner.dealing`).

    Workloads without a winner come before those with one, and within both the largest weights come first
    (:func:`autotune.tuner.turns.order`). Workloads left when the time runs out are not begun, except the first
    one with work to do. Running the same search again continues with them.

    A workload is skipped if an earlier search of it ran out of candidates or gain, or had at least half of the time it
    would get now. It is not skipped if ``trials`` requests more candidates. Without work left, no process is started.

    Args:
        device: as for :func:`search`. At most one device is used per workload.
        plans: the ways to cut a region into kernels that are searched: "measured" (the most promising, chosen by
            measured time), "model" (the cost model's best) or "greedy" (the largest groups).
        progress: called after every candidate and at each change of phase.
        command: stored with the run in the database; ``notes``, as JSON, in its summary.
        measurer: the measuring worker, which stays open; it must measure by ``policy``. None starts one for this call.
            Only valid with one device.
        pool: likewise the processes that compile candidates; ``baselines`` those that compile baselines.
        cluster: a Ray cluster, whose devices run the search; it replaces ``device``. Each kind of device has its own
            results, with its name in ``device``.
        options: of :class:`autotune.tuner.options.SearchOptions`: ``trials``, ``timeout``, ``sampler``, ...

    Returns:
        One result for each workload that was begun or had no work left, in the order of ``workloads``. If the time ran
        out, the others have an earlier search's result (with ``begun`` False), or none. If the user interrupted, the
        list is shorter too, and the result of the current workload has ``interrupted`` set.

    Warns:
        BusyMachine: other processes disturbed a final comparison on the CPU; another search repeats it.

    Raises:
        UserError: invalid arguments or search-space file.
    """
    import contextlib
    import warnings
    from dataclasses import replace

    from autotune import numerics
    from autotune.device import resolve_devices
    from autotune.domain import policy_for
    from autotune.tuner.context import Context
    from autotune.tuner.dealing import side_by_side
    from autotune.tuner.options import SearchOptions
    from autotune.tuner.result import BusyMachine, busy_note
    from autotune.tuner.turns import Turns, alone, order

    if not workloads:
        raise UserError("nothing to search: the list of workloads is empty")
    chosen = SearchOptions(**{**options, **_method(plans)})  # raises UserError before anything is started
    if cluster is not None:
        device = [cluster.device]
    devices = resolve_devices(device) if isinstance(device, str) else list(device)
    devices = devices[: len({w.fingerprint for w in workloads})]
    if len(devices) > 1:
        _check_several(workloads, devices)
        if measurer is not None or pool is not None or baselines is not None:
            raise UserError("your own measurer or pool searches on one device: leave it out, or name one device")
    results: list[Result] = []
    each = None if chosen.timeout is None else chosen.timeout / len(workloads)
    settings = numerics.read(["cpu"]) if chosen.numerics is None else chosen.numerics
    context = Context(
        store=store,
        device=devices[0],
        policy=(chosen.policy or policy_for(workloads[0], devices[0]).within(each)).under(settings),
        options=chosen,
        lent=(measurer, pool, baselines),
        report=progress,
        _worker=measurer,
        _pool=pool,
        _baselines=baselines,
    )
    turns = Turns(workloads, [chosen.weights.get(w.fingerprint, 1.0) for w in workloads], chosen, len(devices))
    if cluster is None:  # a cluster orders them by the results stored for its devices
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
        results[-1] = replace(results[-1], interrupted=True)  # keep the result so far
    finally:
        store.finish_run(run.id, state, {**(notes or {}), "workloads": [r.to_json() for r in results]})
    if note := busy_note(results):
        warnings.warn(note, BusyMachine, stacklevel=2)
    places = {w.fingerprint: i for i, w in enumerate(workloads)}
    return sorted(results, key=lambda r: places[r.workload])


def _check_several(workloads: Sequence[Workload], devices: Sequence[str]) -> None:
    """Check that workloads can be searched on several devices in parallel, with results that hold for each of them."""
    from autotune.device import check_equal
    from autotune.domain import identity_of

    if (twice := next((d for d in devices if d != "cpu" and devices.count(d) > 1), None)) is not None:
        raise UserError(f"{twice} is named twice: name every device once")
    if any(identity_of(workload, devices[0]).count > 1 for workload in workloads):
        raise UserError("a workload that uses several devices is searched by one process: name the first device")
    check_equal(devices)


def _method(plans: str) -> dict[str, Any]:
    """The option for ``plans``, the domain's method; none for the whole search."""
    if plans == "measured":
        return {}
    from autotune.compiler.planner.beam import check_plans

    check_plans(plans)
    return {"method": plans}


def _command(workloads: Sequence[Workload], devices: Sequence[str]) -> str:
    names = ", ".join(w.label or w.fingerprint[:12] for w in workloads[:4])
    return f"search {names}{', ...' if len(workloads) > 4 else ''} on {', '.join(devices)}"
