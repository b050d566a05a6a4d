"""``autotune search``: search a target's workloads on this machine and store what was learnt."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.cli.decided import add_step, decide_step, is_decided
from autotune.cli.options import (
    add_db,
    add_device,
    add_json,
    add_precision,
    add_scenario,
    add_target,
    check_modes,
    natural_int,
    positive_int,
    seconds,
)
from autotune.cli.output import TUNABLE, machine_output
from autotune.cli.report import print_table, total
from autotune.cli.searched import Searched, conclude, not_begun, reason, tune
from autotune.compiler.planner.ablation import ABLATIONS, PLANS
from autotune.domains.c3.cli.scenario import refuse_scenario
from autotune.errors import UserError, told
from autotune.measure.policy import CACHES, default_policy

if TYPE_CHECKING:
    from autotune.domains.fusion.program_spec import Captured
    from autotune.store import Store
    from autotune.tuner.result import Result
    from autotune.workload import Workload

SAMPLERS = ("tpe", "gp", "random", "brute")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "search",
        help="search a target on this machine and store the best",
        description="Search the configurations of a target's workloads on this machine, verify and time each, and "
        "store every measurement and the best. Interrupted or killed, the same command goes on where it was.",
    )
    add_target(parser, required=False)
    add_scenario(parser)
    more = "; fusion: several equal GPUs side by side too, as cuda:0,cuda:1 or cuda:all, each workload on one of them"
    add_device(parser, more)
    add_db(parser)
    about = "candidates to measure for each workload (default: while there is gain, 256 at most)"
    parser.add_argument("--trials", type=positive_int, metavar="N", help=about)
    about = (
        "seconds for the whole search, shared among its workloads, those that cost most first; the same command goes on"
        " with what was not begun by then"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help=about)
    parser.add_argument("--sampler", choices=SAMPLERS, default="tpe", help="who proposes (default: %(default)s)")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the sampler (default: 0)")
    about = "a narrowed copy of search_spaces/DOMAIN.toml"
    parser.add_argument("--space", metavar="FILE", help=about)
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
    if args.domain == "c3":
        from autotune.domains.c3.cli import search as c3_search

        return c3_search.run(args)
    refuse_scenario(args)
    if args.missed and (args.target or args.inputs or args.train or args.precision):
        left_out = "TARGET, --inputs, --train and --precision"
        raise UserError(f"--missed takes its workloads from the database: leave out {left_out}")
    if not args.missed and not args.target:
        raise UserError("name what to search: autotune search DOMAIN TARGET (`autotune workloads` lists built-in ones)")
    domain = args.domain or _only_domain(args)
    with machine_output(args.json) as emit:
        from autotune.device import resolve_devices
        from autotune.domains.c3.cli.scenario import serves
        from autotune.space import load_space
        from autotune.store import Store

        devices = resolve_devices(args.device)
        if args.mode != ["default"]:
            check_modes(args.mode)
        if args.space:  # a mistake in the file is told before the target is captured, which takes seconds
            load_space("fusion", devices[0].partition(":")[0], args.space)
        if domain is None and serves():
            return 0
        with Store.open(args.db) as store:
            if args.missed:
                done = _search_missed(args, devices, store, domain)
            else:
                found = _captured(args, devices[0], store)
                notes = {"capture": found.to_json()}
                one = _search(args, devices, store, args.target, found.workloads, args.timeout, notes)
                if is_decided(args):
                    steps = decide_step(args, devices[0], store, one, _command(args))
                    one = replace(one, answer={**one.answer, "steps": steps})
                done = [one]
        # One object: what c3 came to goes under its name where there is something else too.
        emit({**done[0].answer, **({"c3": done[1].answer} if len(done) > 1 else {})})
    return conclude(done, args.json)


def _only_domain(args: argparse.Namespace) -> str | None:
    """The domain that options of its own confine ``--missed`` to."""
    own = args.space or args.plans != "measured" or args.ablation != "full" or args.caches != "cold"
    return "fusion" if own else None


def _search_missed(
    args: argparse.Namespace, devices: Sequence[str], store: Store, domain: str | None
) -> list[Searched]:
    """Search what deployments missed: of ``domain``, or all of it, one domain after the other."""
    from autotune.domains.c3.cli import search as c3_search

    begin, device = time.monotonic(), devices[0]
    counted = _missed(store, device, args.domain)
    scenarios = c3_search.missed(store, device) if domain is None else []
    if not counted and not scenarios:
        how = "backend='autotune'" if domain else "backend='autotune' or autotune.overlap"
        raise UserError(f"{store.name} has no missed workload of this device: run the model with {how} first")
    done, left = [], args.timeout
    if counted:
        share = len(counted) / (len(counted) + len(scenarios))
        timeout = None if args.timeout is None else share * args.timeout
        done.append(_search(args, devices, store, "missed workloads", counted, timeout))
        if args.timeout is not None:
            left = max(1.0, args.timeout - (time.monotonic() - begin))
    if scenarios and not any(searched.interrupted for searched in done):
        done.append(c3_search.search_scenarios(args, device, store, "missed scenarios", scenarios, left))
    return done


def _search(
    args: argparse.Namespace,
    devices: Sequence[str],
    store: Store,
    name: str,
    counted: Sequence[tuple[Workload, int]],
    timeout: float | None,
    notes: Mapping[str, Any] | None = None,
) -> Searched:
    """Search workloads of which each is measured on one device, with the options of the command.

    Args:
        devices: no more of them are used than there are workloads.
        name: what to call them together.
        counted: workloads and how often each occurs.
        timeout: seconds for all of them.
        notes: of the run.
    """
    from autotune.api import time_weights
    from autotune.device import identify

    devices = devices[: len(counted)]
    where = identify(devices[0])
    many = f"{len(counted)} workloads" if len(counted) > 1 else "1 workload"
    print(f"{name}: {many} on {replace(where, count=len(devices)).label}, stored in {store.name}", file=sys.stderr)
    if store.get_calibration(where.fingerprint, args.domain or "fusion") is None:
        hint = "`autotune calibrate fusion` measures this device's, in about a minute"
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
    )
    reasons = {result.workload: reason(store, result) for result in results if not result.ok}
    if args.missed:
        for result in results:
            if result.winner and result.begun:
                store.clear_miss(result.workload, where.fingerprint)
    answer = {**_answer(name, ",".join(devices), counted, results), "not_begun": not_begun(len(counted), results)}
    return Searched(answer, results, reasons, print_table)


def _captured(args: argparse.Namespace, device: str, store: Store) -> Captured:
    from autotune.domains.fusion.program_spec import captured
    from autotune.domains.fusion.rederive import check_graph, check_source
    from autotune.ir.precision import asking

    def known(signature: str) -> list[tuple[Workload, int]] | None:
        """What an earlier run captured, if it is in the database as it was: else the target is captured again."""
        stored = store.captured(signature)
        intact = stored and not any(check_graph(w) or check_source(w) for w, _ in stored)
        return stored if intact else None

    with asking(args.precision):
        found = captured(args.target, args.inputs, device, train=args.train, known=known)
    if not found.workloads:
        raise UserError(f"{args.target} has no memory-intensive region that this version can tune: {TUNABLE}")
    return found


def _missed(store: Store, device: str, domain: str | None) -> list[tuple[Workload, int]]:
    """The workloads of ``domain``, or of every one but c3, that deployments on this device missed.

    Others may have written them: one without a graph, or whose program is not what it was made of, is told and left
    out.
    """
    from autotune.device import identify
    from autotune.task import DOMAINS

    found = []
    for miss in store.misses(identify(device).fingerprint):
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind not in DOMAINS or workload.kind == "c3":
            continue
        if domain in (None, workload.kind) and _is_intact(workload):
            found.append((workload, miss.count))
    return found


def _is_intact(workload: Workload) -> bool:
    """Whether a stored workload may be searched; tells why not."""
    if workload.kind != "fusion":
        return True
    from autotune.domains.fusion.rederive import check_graph, check_source

    why = check_graph(workload) or check_source(workload)
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
    words += ["--train"] if args.train else []
    words += ["--precision", args.precision] if args.precision else []
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
