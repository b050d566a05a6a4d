"""``autotune search c3``: search how a computation and a collective share the devices, with ranks of its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.cli.output import machine_output
from autotune.cli.searching import Searched, at, conclude, joined, nodes_told, not_begun, reason, tune
from autotune.domains.c3.cli.scenario import SCENARIO, scenario_of, serves
from autotune.errors import UserError, pasted, told
from autotune.runtime.deployment import deployment

if TYPE_CHECKING:
    from autotune.domains.c3.scenario import Scenario
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster
    from autotune.tuner.result import Result

MOST_RANKS = 256
"""Processes that a scenario from a database may ask for."""


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    _check(args)
    with machine_output(args.json) as emit, joined(args) as cluster:
        from autotune.device import resolve_device
        from autotune.space import load_space
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
                scenarios, name = at(cluster, _described, args, device, store, gpus=gpus)
            else:
                scenarios = missed(store, device) if described is None else [described[0]]
                name = "missed scenarios" if described is None else described[1]
            if not scenarios:
                raise UserError(
                    f"{store.name} has no missed c3 scenario of these devices: run a model with autotune.overlap"
                )
            searched = search_scenarios(args, device, store, name, scenarios, args.timeout, cluster)
        emit(searched.answer)
    return conclude([searched], args.json)


def _gpus(args: argparse.Namespace, cluster: Cluster) -> int:
    """How many GPUs of one node are searched on: ``--ranks``, or all of the node that has most.

    Raises:
        UserError: no node has so many.
    """
    most = cluster.most_devices()
    if cluster.device != "cpu" and (args.ranks or 2) > most:
        raise UserError(f"--ranks {args.ranks or 2}: no node of the cluster has more than {most} GPUs")
    return args.ranks or most


def _described(args: argparse.Namespace, device: str, store: Store) -> tuple[list[Scenario], str]:
    """The scenarios of the command and what to call them, on a node that has the devices."""
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
) -> Searched:
    """Search scenarios one after the other, with the options of the command.

    Args:
        name: what to call them together.
        timeout: seconds for all of them.
        cluster: on whose nodes they are searched, side by side.
    """
    from autotune.domain import place

    workloads = [scenario.workload() for scenario in scenarios]
    many = f"{name}: {len(scenarios)} scenarios" if len(scenarios) > 1 else scenarios[0].label
    if cluster:
        label = nodes_told(cluster)
    else:
        label = place(workloads[0], device).label
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
                where = of[0] if of else place(described[result.workload][0], device).fingerprint
                store.clear_miss(result.workload, where)
    left = not_begun(len(scenarios), results)
    reasons = {str(answer["fingerprint"]): str(answer["error"]) for answer in answers}
    return Searched({**_answer(name, label, answers), "not_begun": left}, results, reasons, _show)


def _show(answer: Mapping[str, Any]) -> None:
    from autotune.domains.c3.cli.report import print_scenario

    for scenario in answer["workloads"]:
        print_scenario(scenario)


def _check(args: argparse.Namespace) -> None:
    if args.also:
        raise UserError("--also is of other domains: a c3 search takes one scenario, or --missed")
    if args.missed:
        given = [f"--{name}" for name in (*SCENARIO, "ranks", "inputs") if getattr(args, name) is not None]
        if args.target or given:
            raise UserError(
                f"--missed takes its scenarios from the database: leave out {', '.join(given) or args.target}"
            )


def missed(store: Store, device: str) -> list[Scenario]:
    """The scenarios that deployments on these devices missed, on any number of ranks.

    Others may have written them. What is told and left out: those for which there are too few GPUs, those that are
    damaged, and those whose computation is a program of the user's, which a search would import and call.
    """
    from autotune.domain import place
    from autotune.domains.c3.scenario import KIND, Scenario
    from autotune.domains.c3.task import check_devices

    found = []
    for miss in store.misses():
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind != KIND:
            continue
        try:
            scenario = Scenario.from_json(workload.spec)
            if place(workload, device).fingerprint != miss.device:
                continue
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, UserError) as error:
            print(
                f"scenario {workload.fingerprint[:12]} is left out: it is damaged ({told(error, 200)})", file=sys.stderr
            )
            continue
        try:
            check_program(scenario)
            if scenario.ranks > MOST_RANKS:
                raise UserError(f"{scenario.ranks} ranks are more than {MOST_RANKS}")
            check_devices(scenario.ranks, device)
        except UserError as why:
            print(f"{told(scenario.label, 200)} is left out: {why}", file=sys.stderr)
            continue
        found.append(scenario)
    return found


def check_program(scenario: Scenario) -> None:
    """Refuse a scenario from a database whose computation would be imported by name.

    Raises:
        UserError: its computation is neither a GEMM nor a built-in workload; says how to search it by hand.
    """
    from autotune.domains.c3.scenario import Program
    from autotune.domains.fusion.builtin import BUILTIN

    compute = scenario.compute
    if isinstance(compute, Program) and (compute.name not in BUILTIN or compute.inputs):
        s = scenario
        given = ("--collective", s.collective, "--bytes", str(s.nbytes), "--dtype", s.dtype, "--ranks", str(s.ranks))
        name = compute.name if len(compute.name) <= 200 else "..."
        command = pasted("autotune", "search", "c3", "--compute", name, "--inputs", "MODULE:CALLABLE", *given)
        raise UserError(f"programs are never taken from a database; if it is yours, search it by hand: {command}")


def _command(args: argparse.Namespace) -> str:
    """The command to note with the run; without the database's URL, which may hold a password."""
    words = [
        "autotune",
        "search",
        "c3",
        *([args.target] if args.target else []),
        *(["--missed"] if args.missed else []),
    ]
    for name in (*SCENARIO, "inputs", "ranks", "device", "trials", "timeout", "sampler", "seed", "space"):
        value = getattr(args, name, None)  # a search of all that was missed has no options of scenarios
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _one(store: Store, result: Result, scenario: Scenario, device: str) -> dict[str, Any]:
    from autotune.domains.c3.cli.report import deployed_config, figures, strategy_label

    side = device.partition(":")[0]
    config = deployed_config(result.best, result.winner, side)
    return {
        **result.to_json(),
        "fingerprint": result.workload,
        "label": scenario.label,
        "scenario": scenario.to_json(),
        "match": "exact" if result.winner else "none",
        "strategy": config,
        "strategy_label": None if config is None else strategy_label(config, side),
        **figures(result.baselines, result.references, result.deployed_us),
        "error": "" if result.ok else reason(store, result),
    }


def _answer(name: str, device: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One scenario's answer with itself as the only one of ``workloads``; the sums of several."""
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
