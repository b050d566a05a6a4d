"""``autotune search``: search a target's workloads on this machine and store what was learnt."""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.cli import domains
from autotune.cli.cluster import add_ray, at, joined, nodes_told, warn
from autotune.cli.decided import add_step
from autotune.cli.options import (
    add_db,
    add_device,
    add_json,
    add_precision,
    add_target,
    natural_int,
    positive_int,
    seconds,
)
from autotune.cli.output import machine_output, microseconds
from autotune.cli.report import print_table, total
from autotune.cli.searched import Searched, conclude, not_begun, reason, tune
from autotune.compiler.planner.methods import ABLATIONS, PLANS
from autotune.errors import UserError, told
from autotune.measure.policy import CACHES, default_policy
from autotune.tuner.proposals.samplers import DEFAULT, SAMPLERS

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster, Kind
    from autotune.tuner.result import Result
    from autotune.workload import Workload


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "search",
        help="search a target on this machine and store the best",
        description="Search the configurations of a target's workloads on this machine, verify and time each, and "
        "store every measurement and the best. Interrupted or killed, the same command goes on where it was.",
    )
    add_target(parser, required=False)
    domains.add_arguments("search", parser)
    more = "; fusion: several equal GPUs side by side too, as cuda:0,cuda:1 or cuda:all, each workload on one of them"
    add_device(parser, more)
    add_ray(parser)
    add_db(parser)
    about = "candidates to measure for each workload (default: while there is gain, 256 at most)"
    parser.add_argument("--trials", type=positive_int, metavar="N", help=about)
    about = (
        "seconds for the whole search, shared among its workloads, those that cost most first; the same command goes on"
        " with what was not begun by then"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help=about)
    parser.add_argument("--sampler", choices=SAMPLERS, default=DEFAULT, help="who proposes (default: %(default)s)")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the sampler (default: 0)")
    about = "a narrowed copy of search_spaces/DOMAIN.toml"
    parser.add_argument("--space", metavar="FILE", help=about)
    about = (
        "search another target in the same run, with its own --inputs: what both compute is searched once; may be given"
        " several times"
    )
    parser.add_argument("--also", nargs="+", action="append", default=[], metavar=("TARGET", "INPUTS"), help=about)
    about = (
        "search what deployments missed, as the database has recorded it, instead of a target: of every domain, or of"
        " DOMAIN alone"
    )
    parser.add_argument("--missed", action="store_true", help=about)
    about = "search the forward and the backward pass of TARGET, whether or not something of it requires a gradient"
    parser.add_argument("--train", action="store_true", help=about)
    about = (
        "which ways to cut a region into kernels are searched: the most promising by what they take (measured, the"
        " default), the one that the cost model likes best (model), the largest groups (greedy)"
    )
    parser.add_argument("--plans", choices=PLANS, default="measured", help=about)
    about = (
        "what the caches hold when a candidate of fusion is timed: nothing of its inputs (cold, the default), or what"
        " the run before left there (warm), for regions whose inputs the step has just written, as in recurrences;"
        " what was decided last is deployed"
    )
    parser.add_argument("--caches", choices=CACHES, default="cold", help=about)
    about = "search without one of its parts, for comparison: %(choices)s"
    parser.add_argument("--ablation", choices=ABLATIONS, default="full", metavar="NAME", help=about)
    add_step(parser)
    add_precision(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    own = domains.own("search", args, args.domain)
    code: int = own.run(args) if own is not None else search(args)
    return code


@dataclass(frozen=True)
class Program:
    """What a domain does with a target beside naming its workloads.

    Attributes:
        check: sees that the command's options suit the devices; raises UserError.
        capture: the target's workloads, how often each occurs, and notes for the run.
        finish: what is done with what was searched, at the end.
    """

    check: Callable[[argparse.Namespace, Sequence[str]], None]
    capture: Callable[[argparse.Namespace, str, Store], tuple[Sequence[tuple[Workload, int]], Mapping[str, Any]]]
    finish: Callable[[argparse.Namespace, str, Store, Searched, str], Searched]


def search(args: argparse.Namespace, program: Program | None = None) -> int:
    """Search a target's workloads, or what deployments missed; returns the exit code."""
    if args.also and not args.target:
        raise UserError("--also is beside a TARGET: name the first one there")
    if args.missed and (args.target or args.inputs or args.train or args.precision or args.matmul_precision):
        left_out = "TARGET, --inputs, --train, --precision and --matmul-precision"
        raise UserError(f"--missed takes its workloads from the database: leave out {left_out}")
    if not args.missed and not args.target:
        raise UserError("name what to search: autotune search DOMAIN TARGET (`autotune workloads` lists built-in ones)")
    domain = args.domain or _only_domain(args)
    with machine_output(args.json) as emit, joined(args) as cluster:
        from autotune.device import resolve_devices
        from autotune.store import Store

        devices = [cluster.device] if cluster else resolve_devices(args.device)
        if program:
            program.check(args, devices)
        if domain is None and any(module.serves() for module in domains.searching_missed().values()):
            return 0
        with Store.open(args.db, existing=bool(args.missed and args.db)) as store:
            if args.missed:
                done = _search_missed(args, devices, store, domain, cluster)
            else:
                done = _search_targets(args, devices, store, program, cluster)
        # One object: what further domains, or kinds of devices, came to goes under their names.
        first, *others = done
        emit({**done[first].answer, **{name: done[name].answer for name in others}})
    return conclude(list(done.values()), args.json)


def _search_targets(
    args: argparse.Namespace,
    devices: Sequence[str],
    store: Store,
    program: Program | None,
    cluster: Cluster | None,
) -> dict[str, Searched]:
    """Search TARGET, and others that are given beside it: what several of them compute is searched once."""
    each = {of.target: of for of in _each_target(args)}
    captured: dict[str, Sequence[tuple[Workload, int]]] = {}
    notes: list[Mapping[str, Any]] = []
    for name, of in each.items():
        captured[name], noted, args.space = at(cluster, _captured, of, devices[0], store, program)
        notes.append(noted)
    counts: Counter[str] = Counter()
    workloads: dict[str, Workload] = {}
    for counted in captured.values():
        for workload, count in counted:
            workloads.setdefault(workload.fingerprint, workload)
            counts[workload.fingerprint] += count
    every = [(workload, counts[fingerprint]) for fingerprint, workload in workloads.items()]
    one = len(each) == 1
    about = notes[0] if one else {"captures": [noted["capture"] for noted in notes if "capture" in noted]}
    # What each target's module sets stays set: all of them are measured under what the last one leaves.
    about = {**about, "numerics": (numerics := notes[-1].get("numerics", {}))}
    done = _search(args, devices, store, ", ".join(each), every, args.timeout, about, cluster, numerics)
    finished: dict[str, Searched] = {}
    for i, (name, searched) in enumerate(done.items()):
        for target, of in each.items():
            own = searched if one else _part(searched, target, captured[target])
            if program:
                kind = cluster.kinds[i] if cluster else None
                own = _finished(of, devices[0], store, own, program, cluster, kind)
            finished[name if one else name.replace(str(args.domain), f"{args.domain} {target}", 1)] = own
    return finished


def _each_target(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The command's arguments for each target by itself.

    Raises:
        UserError: a target is given twice, or with more than its inputs.
    """
    found = [args]
    for words in args.also:
        if len(words) > 2:
            raise UserError(f"--also {shlex.join(words)}: give a target, and its inputs where it takes some")
        own = copy.copy(args)
        own.target, own.inputs = words[0], words[1] if len(words) == 2 else None
        if any(own.target == other.target for other in found):
            raise UserError(f"--also {own.target}: it is given twice")
        found.append(own)
    return found


def _part(searched: Searched, target: str, counted: Sequence[tuple[Workload, int]]) -> Searched:
    """What of a search was for one target."""
    own = frozenset(workload.fingerprint for workload, _ in counted)
    results = [result for result in searched.results if result.workload in own]
    answer = _answer(target, searched.answer["device"], counted, results)
    answer["not_begun"] = not_begun(len(own), results)
    return replace(searched, answer=answer, results=results, captured=own)


def _captured(
    args: argparse.Namespace, device: str, store: Store, program: Program | None
) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any], str | None]:
    """The target's workloads, notes for the run, and the space that is searched."""
    notes: Mapping[str, Any] = {}
    if program:
        counted, notes = program.capture(args, device, store)
    else:
        counted = domains.workloads_of(args)
    return counted, notes, args.space


def _finished(
    args: argparse.Namespace,
    device: str,
    store: Store,
    searched: Searched,
    program: Program,
    cluster: Cluster | None,
    kind: Kind | None,
) -> Searched:
    """What a target came to on a kind of device, after the program's last part was done on such a device."""
    try:
        found: Searched = at(cluster, program.finish, args, device, store, searched, _command(args), kind=kind)
    except UserError as error:
        if cluster is None:
            raise
        warn(f"the search is done and stored; what follows it was not: {error}")
        return searched
    return found


def _only_domain(args: argparse.Namespace) -> str | None:
    """The domain that options of its own confine ``--missed`` to."""
    own = args.space or args.plans != "measured" or args.ablation != "full" or args.caches != "cold"
    return domains.DEFAULT if own else None


def _search_missed(
    args: argparse.Namespace, devices: Sequence[str], store: Store, domain: str | None, cluster: Cluster | None
) -> dict[str, Searched]:
    """Search what deployments missed: of ``domain``, or all of it; what domains search by themselves comes last."""
    begin, device = time.monotonic(), devices[0]
    counted = at(cluster, _missed, args, device, store)
    own = domains.searching_missed() if domain is None and cluster is None else {}
    others = {name: found for name, module in own.items() if (found := module.missed(store, device))}
    if not counted and not others:
        how = "backend='autotune'" if domain else "backend='autotune' or autotune.overlap"
        raise UserError(f"{store.name} has no missed workload of this device: run the model with {how} first")
    done: dict[str, Searched] = {}
    left = len(counted) + sum(map(len, others.values()))

    def granted(count: int) -> float | None:
        """Seconds for so many of those that are left."""
        if args.timeout is None:
            return None
        rest = args.timeout - (time.monotonic() - begin) if done else args.timeout
        return float(max(1.0, rest) * count / left)

    if counted:
        timeout = granted(len(counted))
        done = _search(args, devices, store, "missed workloads", counted, timeout, None, cluster)
        left -= len(counted)
    for name, found in others.items():
        if not any(searched.interrupted for searched in done.values()):
            done[name] = own[name].search_missed(args, device, store, found, granted(len(found)))
            left -= len(found)
    return done


def _search(
    args: argparse.Namespace,
    devices: Sequence[str],
    store: Store,
    name: str,
    counted: Sequence[tuple[Workload, int]],
    timeout: float | None,
    notes: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    numerics: Mapping[str, Any] | None = None,
) -> dict[str, Searched]:
    """Search workloads of which each is measured on one device, with the options of the command.

    Args:
        devices: no more of them are used than there are workloads.
        name: what to call them together.
        counted: workloads and how often each occurs.
        timeout: seconds for all of them.
        notes: of the run.
        cluster: whose devices are searched on in the place of ``devices``.
        numerics: of the targets' program; None for those of this process.

    Returns:
        By domain; of a cluster with several kinds of devices, by kind too.
    """
    from autotune.api import time_weights
    from autotune.device import identify

    devices = devices[: len(counted)]
    many = f"{len(counted)} workloads" if len(counted) > 1 else "1 workload"
    kind = args.domain or domains.DEFAULT
    if cluster:
        print(f"{name}: {many} on {nodes_told(cluster)}, stored in {store.name}", file=sys.stderr)
    else:
        where = identify(devices[0])
        print(f"{name}: {many} on {replace(where, count=len(devices)).label}, stored in {store.name}", file=sys.stderr)
        if "calibrate" in domains.commands(kind) and store.get_calibration(where.fingerprint, kind) is None:
            hint = f"`autotune calibrate {kind}` measures this device's, in about a minute"
            print(f"cost models: built-in figures; {hint}", file=sys.stderr)
    results = tune(
        args,
        devices,
        store,
        [workload for workload, _ in counted],
        timeout,
        _command(args),
        weights=time_weights(counted),
        plans=args.plans,
        ablation=args.ablation,
        policy=default_policy(devices[0], args.caches) if args.caches != "cold" else None,
        notes=notes,
        numerics=numerics,
        cluster=cluster,
    )
    if cluster is None:
        return {kind: _searched(args, store, name, ",".join(devices), where.fingerprint, counted, results)}
    done = {}
    for met in cluster.kinds:
        own = [result for result in results if result.device == met.label]
        done[f"{kind} on {met.label}"] = _searched(args, store, name, met.label, met.device, counted, own)
    return done


def search_in_step(
    args: argparse.Namespace, device: str, store: Store, searched: Searched, workloads: Sequence[Workload]
) -> Sequence[Result]:
    """Search regions that lie in memory otherwise in a target's step than the search saw, and say what came of them.

    Args:
        searched: the target's search. Of ``--timeout`` each gets what it would have got there, beside the others.
    """
    from autotune.api import time_weights

    counted = [(workload, 1) for workload in workloads]
    timeout = args.timeout
    if timeout is not None:
        every = [(workload, 1) for workload in store.get_workloads(searched.captured).values()]
        of = sum(time_weights(every).values())
        timeout *= min(1.0, sum(time_weights(counted).values()) / of) if of else 1.0
    (more,) = _search(args, [device], store, "regions as they lie in the step", counted, timeout).values()
    for result in more.results:
        if result.winner and result.begun:
            took = f"{microseconds(result.deployed_us)} by {result.winner}"
            print(f"autotune: {result.label}, as it lies in the step: {took}", file=sys.stderr)
    return more.results


def _searched(
    args: argparse.Namespace,
    store: Store,
    name: str,
    device: str,
    fingerprint: str,
    counted: Sequence[tuple[Workload, int]],
    results: Sequence[Result],
) -> Searched:
    """What a search came to on one kind of device, of that name and fingerprint."""
    reasons = {result.workload: reason(store, result) for result in results if not result.ok}
    if args.missed:
        for result in results:
            if result.winner and result.begun:
                store.clear_miss(result.workload, fingerprint)
    answer = {**_answer(name, device, counted, results), "not_begun": not_begun(len(counted), results)}
    return Searched(answer, results, reasons, print_table, frozenset(workload.fingerprint for workload, _ in counted))


def _missed(args: argparse.Namespace, device: str, store: Store) -> list[tuple[Workload, int]]:
    """The workloads of the domain, or of every one that does not search them by itself, that deployments on this device
    missed.

    Others may have written them: one without a graph, or whose program is not what it was made of, is told and left
    out.
    """
    from autotune import task
    from autotune.device import identify

    known, found = task.domains().keys() - domains.searching_missed().keys(), []
    for miss in store.misses(identify(device).fingerprint):
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind not in known:
            continue
        if args.domain in (None, workload.kind) and _is_intact(workload):
            found.append((workload, miss.count))
    return found


def _is_intact(workload: Workload) -> bool:
    """Whether a stored workload may be searched; tells why not."""
    from autotune.task import domain_hook

    damage = domain_hook(workload.kind, "damage")
    why = damage(workload) if damage else None
    if why:
        hint = "running the model again stores it anew"
        print(f"autotune: WARNING: {workload.fingerprint[:12]} is left out: {told(why, 500)}; {hint}", file=sys.stderr)
    return not why


def _command(args: argparse.Namespace) -> str:
    """The command to note with the run; without the database's URL, which may hold a password."""
    words = ["autotune", "search", *(["--missed"] if args.missed else [args.domain, args.target])]
    for name in ("inputs", "device", "trials", "timeout", "sampler", "seed", "space"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    words += ["--ray", args.ray] if args.ray else []
    words += [word for also in args.also for word in ("--also", *also)]
    words += ["--rows", ",".join(map(str, args.rows))] if args.rows else []
    words += ["--train"] if args.train else []
    words += ["--precision", args.precision] if args.precision else []
    words += ["--matmul-precision", args.matmul_precision] if args.matmul_precision else []
    words += ["--plans", args.plans] if args.plans != "measured" else []
    words += ["--caches", args.caches] if args.caches != "cold" else []
    words += ["--ablation", args.ablation] if args.ablation != "full" else []
    return shlex.join(words)


def _answer(
    name: str, device: str, counted: Sequence[tuple[Workload, int]], results: Sequence[Result]
) -> dict[str, Any]:
    counts = {workload.fingerprint: count for workload, count in counted}
    regions = [
        {**result.to_json(), "count": counts[result.workload], "match": "exact" if result.winner else "none"}
        for result in results
    ]
    return total(name, device, regions)
