"""C3's commands: options that describe a scenario, ``search`` and ``lookup``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.cli.options import positive_int
from autotune.cli.output import machine_output
from autotune.cli.searching import (
    SearchOutcome,
    call_on_node,
    conclude,
    describe_nodes,
    given_options,
    joined_cluster,
    not_begun,
    reason,
    tune,
)
from autotune.domain import identity_of
from autotune.domains.c3.match import C3Level, explain, match_scenario
from autotune.domains.c3.scenario import KIND, Compute, Program, Scenario, named_scenario, parse_bytes, parse_gemm
from autotune.domains.c3.strategy import KINDS
from autotune.errors import UserError, printable, quoted_command, safe_line
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import text
from autotune.space import load_space
from autotune.store import attached
from autotune.tuner.result import Result

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster

MOST_RANKS = 256
"""Maximum number of processes for a scenario from a database."""
SCENARIO = ("gemm", "compute", "collective", "bytes", "dtype", "layout")
"""Options that describe a C3 scenario, apart from the number of ranks."""


def search(args: argparse.Namespace) -> int:
    """Search strategies for a computation that overlaps a collective, with one process per rank."""
    _check(args)
    with machine_output(args.json) as emit, joined_cluster(args) as cluster:
        from autotune.device import resolve_device
        from autotune.store import Store

        device = cluster.device if cluster else resolve_device(args.device)
        if args.space:
            load_space("c3", device.partition(":")[0], args.space)
        described = None if args.missed or cluster else scenario_of(args, device)
        if cluster is None and serves():
            return 0
        with Store.open(args.db, existing=bool(args.missed and args.db)) as store:
            if cluster:
                gpus = _gpus(args, cluster)
                scenarios, name = call_on_node(cluster, _described, args, device, store, gpus=gpus)
            else:
                scenarios = missed(store, device) if described is None else [described[0]]
                name = "missed scenarios" if described is None else described[1]
            if not scenarios:
                raise UserError(
                    f"{store.name} has no missed c3 scenario of these devices: first run a model with autotune.overlap"
                )
            searched = search_scenarios(args, device, store, name, scenarios, args.timeout, cluster)
        emit(searched.answer)
    return conclude([searched], args.json)


def _gpus(args: argparse.Namespace, cluster: Cluster) -> int:
    """The number of GPUs per node for the search: ``--ranks``, or all GPUs of the largest node.

    Raises:
        UserError: no node has that many GPUs.
    """
    most = cluster.most_devices()
    if cluster.device != "cpu" and (args.ranks or 2) > most:
        raise UserError(f"--ranks {args.ranks or 2}: no node of the cluster has more than {most} GPUs")
    return args.ranks or most


def _described(args: argparse.Namespace, device: str, store: Store) -> tuple[list[Scenario], str]:
    """The scenarios of the command and a name for them; runs on a node that has the devices."""
    if args.missed:
        return missed(store, device), "missed scenarios"
    scenario, name = scenario_of(args, device)
    return [scenario], name


def search_scenarios(
    args: argparse.Namespace,
    device: str,
    store: Store,
    name: str,
    scenarios: Sequence[Scenario],
    timeout: float | None,
    cluster: Cluster | None = None,
) -> SearchOutcome:
    """Search scenarios in sequence with the command's options.

    Args:
        name: name of the scenarios together.
        timeout: seconds for all scenarios.
        cluster: cluster whose nodes search the scenarios in parallel.
    """
    workloads = [scenario.workload() for scenario in scenarios]
    many = f"{name}: {len(scenarios)} scenarios" if len(scenarios) > 1 else scenarios[0].label
    if cluster:
        label = describe_nodes(cluster)
    else:
        label = identity_of(workloads[0], device).label
    print(f"{many} on {label}, stored in {store.name}", file=sys.stderr)
    with deployment().deploying_from(args.db):
        results = tune(args, device, store, workloads, timeout, _command(args), cluster=cluster)
    described = {w.fingerprint: (w, s) for w, s in zip(workloads, scenarios, strict=True)}
    answers = [_one(store, result, described[result.workload][1], device) for result in results]
    if args.missed:
        for result in results:
            if result.winner and result.begun:
                kinds = cluster.kinds if cluster else []
                of = [kind.device for kind in kinds if kind.label == result.device]
                where = of[0] if of else identity_of(described[result.workload][0], device).fingerprint
                store.clear_miss(result.workload, where)
    left = not_begun(len(scenarios), results)
    reasons = {str(answer["fingerprint"]): str(answer["error"]) for answer in answers}
    return SearchOutcome({**_answer(name, label, answers), "not_begun": left}, results, reasons, _show)


def _show(answer: Mapping[str, Any]) -> None:
    from autotune.domains.c3.results import print_scenario

    for scenario in answer["workloads"]:
        print_scenario(scenario)


def _check(args: argparse.Namespace) -> None:
    if args.also:
        raise UserError("--also does not go with c3: name one scenario, or use --missed")
    if args.missed:
        given = [f"--{name}" for name in (*SCENARIO, "ranks", "inputs") if getattr(args, name) is not None]
        if args.target or given:
            raise UserError(
                f"--missed takes its scenarios from the database: leave out {', '.join(given) or args.target}"
            )


def missed(store: Store, device: str) -> list[Scenario]:
    """The scenarios that deployments on these devices missed, on any number of ranks.

    Other users may have written them. A message reports each scenario that is left out: if it needs more GPUs than
    there are, if it is damaged, or if its computation is a user's program, which a search would import and call.
    """
    from autotune.domains.c3.task import check_devices

    found = []
    for miss in store.misses():
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind != KIND:
            continue
        try:
            scenario = Scenario.from_json(workload.spec)
            if identity_of(workload, device).fingerprint != miss.device:
                continue
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, UserError) as error:
            why = f"it is damaged ({safe_line(error, 200)})"
            print(f"scenario {workload.fingerprint[:12]} is skipped: {why}", file=sys.stderr)
            continue
        try:
            check_program(scenario)
            if scenario.ranks > MOST_RANKS:
                raise UserError(f"{scenario.ranks} ranks are more than {MOST_RANKS}")
            check_devices(scenario.ranks, device)
        except UserError as why:
            print(f"{safe_line(scenario.label, 200)} is skipped: {why}", file=sys.stderr)
            continue
        found.append(scenario)
    return found


def check_program(scenario: Scenario) -> None:
    """Reject a scenario from a database whose computation would be imported by name.

    Raises:
        UserError: the computation is neither a GEMM nor a built-in workload; the message has a command to search it.
    """
    from autotune.domains.fusion.builtin import BUILTIN

    compute = scenario.compute
    if isinstance(compute, Program) and (compute.name not in BUILTIN or compute.inputs):
        s = scenario
        given = ("--collective", s.collective, "--bytes", str(s.nbytes), "--dtype", s.dtype, "--ranks", str(s.ranks))
        name = compute.name if len(compute.name) <= 200 else "..."
        command = quoted_command("autotune", "search", "c3", "--compute", name, "--inputs", "MODULE:CALLABLE", *given)
        raise UserError(f"a search runs no program that a database names; if it is yours, run: {command}")


def _command(args: argparse.Namespace) -> str:
    """The command to store with the run, without the database's URL, which may contain a password."""
    words = ["autotune", "search", "c3", *([args.target] if args.target else []), *(["--missed"] * args.missed)]
    names = (*SCENARIO, "inputs", "ranks", "device", "trials", "timeout", "sampler", "seed", "space")
    return shlex.join([*words, *given_options(args, names)])


def _one(store: Store, result: Result, scenario: Scenario, device: str) -> dict[str, Any]:
    from autotune.domains.c3.results import deployed_config, figures

    side = device.partition(":")[0]
    config = deployed_config(result.best, result.winner, side)
    return {
        **result.to_json(),
        "fingerprint": result.workload,
        "label": scenario.label,
        "scenario": scenario.to_json(),
        "match": "exact" if result.winner else "none",
        "strategy": config,
        "strategy_label": None if config is None else KINDS[side].of(config).label,
        **figures(result.baselines, result.references, result.deployed_us),
        "error": "" if result.ok else reason(store, result),
    }


def _answer(name: str, device: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A single scenario's answer, with itself under ``workloads``; or the sums of several scenarios."""
    failed: Counter[str] = Counter()
    for answer in answers:
        failed.update(answer["failed"])
    return {
        **(answers[0] if len(answers) == 1 else {}),
        "workload": name,
        "device": device,
        "match": "exact" if answers and all(a["match"] == "exact" for a in answers) else "none",
        "measured": sum(a["measured"] for a in answers),
        "reused": sum(a["reused"] for a in answers),
        "failed": dict(failed),
        "workloads": list(answers),
    }


def lookup(args: argparse.Namespace) -> int:
    """Look up the strategy with which a scenario would be deployed; returns 0 at every match level."""
    with machine_output(args.json) as emit:
        from autotune.device import environment, resolve_device
        from autotune.domains.c3.results import figures, print_scenario

        device = resolve_device(args.device)
        scenario, name = scenario_of(args, device)
        workload = scenario.workload()
        with attached(args.db, args.db_read) as store:
            identity = identity_of(workload, device)
            env = environment(device)
            found = match_scenario(scenario, store, identity, env, strict=args.strict)
            ladder = explain(scenario, found, store, identity, env) if args.explain else ()
        measured = found.schedule if found.level is C3Level.EXACT else None  # else it is for another scenario
        baselines = measured.rivals if measured else {}
        best = {"config": dict(found.config), "latency_us": measured.latency_us} if measured else None
        answer = {
            "workload": name,
            "fingerprint": workload.fingerprint,
            "label": scenario.label,
            "scenario": scenario.to_json(),
            "device": identity.label,
            "match": str(found.level),
            "best": best,
            "baselines": {name: {"latency_us": us} for name, us in baselines.items()},
            "winner": found.schedule.winner if found.schedule else "",
            "strategy": dict(found.config),
            "strategy_label": found.label,
            "tuned": found.tuned.to_json() if found.tuned else None,
            "tuned_label": found.tuned.label if found.tuned else None,
            "distance": found.distance,
            "reason": found.reason,
            "others_busy": measured.others if measured else None,
            **figures(baselines, measured.references if measured else {}, measured.latency_us if measured else None),
        }
        if ladder:
            answer["ladder"] = [step.to_json() for step in ladder]
        emit(answer)
        if not args.json:
            print_scenario(answer)
            if ladder:
                print(*("", *map(printable, text(scenario.label, ladder).splitlines())), sep="\n")
            if found.reason:
                print(found.reason, file=sys.stderr)
    return 0


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """Add options that describe a C3 scenario instead of ``TARGET``."""
    group = parser.add_argument_group("c3", "describe a scenario: a computation that overlaps a collective")
    group.add_argument("--gemm", metavar="MxNxK", help="the computation: a matrix product, such as 8192x28672x8192")
    about = "another computation: a built-in fusion workload, or package.module:callable with --inputs"
    group.add_argument("--compute", metavar="SPEC", help=about)
    group.add_argument("--collective", metavar="NAME", help="all_gather, all_to_all, reduce_scatter or all_reduce")
    about = "size of the larger of a rank's two buffers, such as 512MiB"
    group.add_argument("--bytes", metavar="SIZE", help=about)
    add_ranks(group)
    about = "data type of both: bf16, f16 or f32 (default: of a named scenario; else bf16 on GPUs, f32 on a CPU)"
    group.add_argument("--dtype", metavar="TYPE", help=about)
    about = (
        "layout of the GEMM's matrices, n not transposed or t transposed, such as nt for a linear layer (default: nn)"
    )
    group.add_argument("--layout", metavar="nn|nt|tn|tt", help=about)


def add_ranks(parser: argparse._ActionsContainer) -> None:
    """Add ``--ranks``."""
    about = "processes, each with one device (default: all GPUs, or 2 on a CPU; under torchrun, its processes)"
    parser.add_argument("--ranks", type=positive_int, metavar="N", help=about)


def scenario_of(args: argparse.Namespace, device: str) -> tuple[Scenario, str]:
    """The scenario and its name.

    Args:
        device: the resolved device.

    Raises:
        UserError: the scenario is described twice or not at all, or is invalid.
    """
    if args.target is not None:
        given = [f"--{name}" for name in (*SCENARIO, "inputs") if name != "dtype" and getattr(args, name) is not None]
        if given:
            raise UserError(f"{args.target} is the name of a scenario: leave out {', '.join(given)}")
        entry = named_scenario(args.target)
        return entry.scenario(ranks_of(args, device), args.dtype or entry.dtype or _dtype(device)), args.target
    if args.gemm is None and args.compute is None:
        raise UserError("name a scenario (`autotune workloads` lists them), or give --gemm, --collective and --bytes")
    missing = [f"--{name}" for name in ("collective", "bytes") if getattr(args, name) is None]
    if missing:
        raise UserError(f"a scenario also needs {' and '.join(missing)}")
    dtype = args.dtype or _dtype(device)
    compute, nbytes = _compute(args, dtype), parse_bytes(args.bytes)
    scenario = Scenario(compute, args.collective, nbytes, ranks_of(args, device), dtype)
    return scenario, scenario.label


def ranks_of(args: argparse.Namespace, device: str) -> int:
    """The number of processes.

    Raises:
        UserError: fewer than 2, more than this host has GPUs, or another number than torchrun started.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if _under_torchrun() else 0
    if world and args.ranks not in (None, world):
        raise UserError(f"--ranks {args.ranks}: torchrun started {world} processes")
    ranks: int = args.ranks or world
    if device.startswith("cuda"):
        import torch

        count = torch.cuda.device_count()
        ranks = ranks or count
        if not world and ranks > count:
            raise UserError(f"--ranks {ranks}: this machine has {count} GPU{'s' if count > 1 else ''}")
    ranks = ranks or 2
    if ranks < 2:
        raise UserError(f"a collective needs 2 ranks or more, not {ranks}; --device cpu takes any number of ranks")
    return ranks


def serves() -> bool:
    """Under torchrun, serve the first process until it has finished; return at once in the first process.

    Returns:
        True if this process served and has no further work.
    """
    if not _under_torchrun():
        return False
    from autotune.domains.c3.measuring.agents import serve_agent

    return serve_agent()


def _under_torchrun() -> bool:
    if "RANK" not in os.environ:
        return False
    from autotune.domains.c3.measuring.agents import under_torchrun

    return under_torchrun()


def _dtype(device: str) -> str:
    return "bf16" if device.startswith("cuda") else "f32"


def _compute(args: argparse.Namespace, dtype: str) -> Compute:
    if args.gemm is not None:
        if args.compute is not None or args.inputs is not None:
            raise UserError(f"--gemm and {'--compute' if args.compute is not None else '--inputs'} exclude each other")
        return parse_gemm(args.gemm, dtype, args.layout or "nn")
    if args.layout is not None:
        raise UserError("--layout goes with --gemm")
    if ":" in args.compute:
        from autotune.domains.fusion.program_spec import load_callable

        load_callable(args.compute, args.inputs)  # report an error in it before any process starts
    else:
        from autotune.domains.fusion.builtin import BUILTIN

        if args.compute not in BUILTIN or args.inputs is not None:
            raise UserError(
                f"--compute {args.compute}: name a built-in fusion workload (`autotune workloads` lists them), or"
                " your own package.module:callable with --inputs"
            )
    return Program(args.compute, args.inputs or "")
