"""``autotune search``: search a target's workloads on this machine and store what was learnt."""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.cli.options import (
    DEFAULT,
    add_db,
    add_device,
    add_json,
    add_target,
    command_of,
    every_domain,
    natural_int,
    positive_int,
    seconds,
)
from autotune.cli.output import machine_output, microseconds, print_table, total
from autotune.cli.searching import Searched, add_ray, at, conclude, joined, nodes_told, not_begun, reason, tune, warn
from autotune.domain import domain_of
from autotune.errors import UserError, told
from autotune.tuner.proposals.samplers import DEFAULT as SAMPLER
from autotune.tuner.proposals.samplers import SAMPLERS

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster, Kind
    from autotune.tuner.result import Result
    from autotune.workload import Workload


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "search",
        command="search",
        help="search a target on this machine and store the best",
        description="Search the configurations of a target's workloads on this machine, verify and time each, and "
        "store every measurement and the best. Interrupted or killed, the same command goes on where it was.",
    )
    add_target(parser, required=False)
    more = "; several equal GPUs side by side too, as cuda:0,cuda:1 or cuda:all, each workload on one of them"
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
    parser.add_argument("--sampler", choices=SAMPLERS, default=SAMPLER, help="who proposes (default: %(default)s)")
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
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    own = command_of(args.domain, "search")
    return own(args) if own is not None else search(args, Steps())


class Steps:
    """What a search does with a domain's own options, step by step; as it is, for a domain that has none.

    Where a cluster searches, :meth:`capture` and :meth:`finish` are called on a node that has the device.
    """

    def check(self, args: argparse.Namespace, devices: Sequence[str]) -> None:
        """See that the options suit the devices; raises UserError."""

    def confines(self, args: argparse.Namespace) -> bool:
        """Whether the options confine ``--missed``, which names no domain, to this one."""
        return False

    def capture(
        self, args: argparse.Namespace, device: str, store: Store
    ) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any]]:
        """The target's workloads, how often each occurs, and notes for the run."""
        return domain_of(args.domain).workloads_of(args.target, args.inputs), {}

    def options(self, args: argparse.Namespace, device: str) -> Mapping[str, Any]:
        """More of :func:`autotune.api.tune_workloads`."""
        return {}

    def finish(self, args: argparse.Namespace, device: str, store: Store, searched: Searched, command: str) -> Searched:
        """What is done with what was searched, at the end."""
        return searched

    def words(self, args: argparse.Namespace) -> list[str]:
        """The options as words of the command, which is noted with the run."""
        return []


def search(args: argparse.Namespace, steps: Steps) -> int:
    """Search a target's workloads, or what deployments missed; returns the exit code."""
    if args.also and not args.target:
        raise UserError("--also is beside a TARGET: name the first one there")
    if args.missed and (args.target or args.inputs):
        raise UserError("--missed takes its workloads from the database: leave out TARGET and --inputs")
    if not args.missed and not args.target:
        raise UserError("name what to search: autotune search DOMAIN TARGET (`autotune workloads` lists built-in ones)")
    domain = args.domain or (DEFAULT if steps.confines(args) else None)
    with machine_output(args.json) as emit, joined(args) as cluster:
        from autotune.device import resolve_devices
        from autotune.store import Store

        devices = [cluster.device] if cluster else resolve_devices(args.device)
        steps.check(args, devices)
        if domain is None and any(other.serves() for other in every_domain().values()):
            return 0
        with Store.open(args.db, existing=bool(args.missed and args.db)) as store:
            if args.missed:
                done = _search_missed(args, devices, store, steps, domain, cluster)
            else:
                done = _search_targets(args, devices, store, steps, cluster)
        # One object: what further domains, or kinds of devices, came to goes under their names.
        first, *others = done
        emit({**done[first].answer, **{name: done[name].answer for name in others}})
    return conclude(list(done.values()), args.json)


def _search_targets(
    args: argparse.Namespace, devices: Sequence[str], store: Store, steps: Steps, cluster: Cluster | None
) -> dict[str, Searched]:
    """Search TARGET, and others that are given beside it: what several of them compute is searched once."""
    each = {of.target: of for of in _each_target(args)}
    captured: dict[str, Sequence[tuple[Workload, int]]] = {}
    notes: list[Mapping[str, Any]] = []
    for name, of in each.items():
        captured[name], noted, args.space = at(cluster, _captured, of, devices[0], store, steps)
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
    done = _search(args, devices, store, steps, ", ".join(each), every, args.timeout, about, cluster, numerics)
    finished: dict[str, Searched] = {}
    for i, (name, searched) in enumerate(done.items()):
        for target, of in each.items():
            own = searched if one else _part(searched, target, captured[target])
            own = _finished(of, devices[0], store, own, steps, cluster, cluster.kinds[i] if cluster else None)
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
    args: argparse.Namespace, device: str, store: Store, steps: Steps
) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any], str | None]:
    """The target's workloads, notes for the run, and the space that is searched."""
    counted, notes = steps.capture(args, device, store)
    return counted, notes, args.space


def _finished(
    args: argparse.Namespace,
    device: str,
    store: Store,
    searched: Searched,
    steps: Steps,
    cluster: Cluster | None,
    kind: Kind | None,
) -> Searched:
    """What a target came to on a kind of device, after the last step was done on such a device."""
    try:
        found: Searched = at(cluster, steps.finish, args, device, store, searched, _command(args, steps), kind=kind)
    except UserError as error:
        if cluster is None:
            raise
        warn(f"the search is done and stored; what follows it was not: {error}")
        return searched
    return found


def _search_missed(
    args: argparse.Namespace,
    devices: Sequence[str],
    store: Store,
    steps: Steps,
    domain: str | None,
    cluster: Cluster | None,
) -> dict[str, Searched]:
    """Search what deployments missed: of ``domain``, or all of it; what domains search by themselves comes last."""
    begin, device = time.monotonic(), devices[0]
    counted = at(cluster, _missed, args, device, store)
    own = every_domain() if domain is None and cluster is None else {}
    others = {name: found for name, other in own.items() if (found := other.missed(store, device))}
    if not counted and not others:
        how = "backend='autotune'" if domain else "backend='autotune' or autotune.overlap"
        raise UserError(f"{store.name} has no missed workload of this device: run the model with {how} first")
    done: dict[str, Searched] = {}
    left = len(counted) + sum(found.count for found in others.values())

    def granted(count: int) -> float | None:
        """Seconds for so many of those that are left."""
        if args.timeout is None:
            return None
        rest = args.timeout - (time.monotonic() - begin) if done else args.timeout
        return float(max(1.0, rest) * count / left)

    if counted:
        timeout = granted(len(counted))
        done = _search(args, devices, store, steps, "missed workloads", counted, timeout, None, cluster)
        left -= len(counted)
    for name, found in others.items():
        if not any(searched.interrupted for searched in done.values()):
            done[name] = found.search(args, granted(found.count))
            left -= found.count
    return done


def _search(
    args: argparse.Namespace,
    devices: Sequence[str],
    store: Store,
    steps: Steps,
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
    kind = args.domain or DEFAULT
    if cluster:
        print(f"{name}: {many} on {nodes_told(cluster)}, stored in {store.name}", file=sys.stderr)
    else:
        where = identify(devices[0])
        print(f"{name}: {many} on {replace(where, count=len(devices)).label}, stored in {store.name}", file=sys.stderr)
        if command_of(kind, "calibrate") and store.get_calibration(where.fingerprint, kind) is None:
            hint = f"`autotune calibrate {kind}` measures this device's, in about a minute"
            print(f"cost models: built-in figures; {hint}", file=sys.stderr)
    results = tune(
        args,
        devices,
        store,
        [workload for workload, _ in counted],
        timeout,
        _command(args, steps),
        weights=time_weights(counted),
        notes=notes,
        numerics=numerics,
        cluster=cluster,
        **steps.options(args, devices[0]),
    )
    if cluster is None:
        return {kind: _searched(args, store, name, ",".join(devices), where.fingerprint, counted, results)}
    done = {}
    for met in cluster.kinds:
        own = [result for result in results if result.device == met.label]
        done[f"{kind} on {met.label}"] = _searched(args, store, name, met.label, met.device, counted, own)
    return done


def search_in_step(
    args: argparse.Namespace,
    device: str,
    store: Store,
    steps: Steps,
    searched: Searched,
    workloads: Sequence[Workload],
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
    (more,) = _search(args, [device], store, steps, "regions as they lie in the step", counted, timeout).values()
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
    from autotune.device import identify

    known, found = [name for name, domain in every_domain().items() if not domain.own_missed], []
    for miss in store.misses(identify(device).fingerprint):
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind not in known:
            continue
        if args.domain in (None, workload.kind) and _is_intact(workload):
            found.append((workload, miss.count))
    return found


def _is_intact(workload: Workload) -> bool:
    """Whether a stored workload may be searched; tells why not."""
    if why := domain_of(workload.kind).damage(workload):
        hint = "running the model again stores it anew"
        print(f"autotune: WARNING: {workload.fingerprint[:12]} is left out: {told(why, 500)}; {hint}", file=sys.stderr)
    return not why


def _command(args: argparse.Namespace, steps: Steps) -> str:
    """The command to note with the run; without the database's URL, which may hold a password."""
    words = ["autotune", "search", *(["--missed"] if args.missed else [args.domain, args.target])]
    for name in ("inputs", "device", "trials", "timeout", "sampler", "seed", "space"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    words += ["--ray", args.ray] if args.ray else []
    words += [word for also in args.also for word in ("--also", *also)]
    return shlex.join([*words, *steps.words(args)])


def _answer(
    name: str, device: str, counted: Sequence[tuple[Workload, int]], results: Sequence[Result]
) -> dict[str, Any]:
    counts = {workload.fingerprint: count for workload, count in counted}
    regions = [
        {**result.to_json(), "count": counts[result.workload], "match": "exact" if result.winner else "none"}
        for result in results
    ]
    return total(name, device, regions)
