"""``autotune search c3``: search how a computation and a collective share the devices, with ranks of its own."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.cli.c3_scenario import scenario_of, serves
from autotune.cli.options import SCENARIO
from autotune.cli.output import machine_output
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.c3.scenario import Scenario
    from autotune.store import Store
    from autotune.tuner.result import Result


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    _check(args)
    with machine_output(args.json) as emit:
        from autotune.device import resolve_device
        from autotune.store import Store
        from autotune.task import place
        from autotune.tuner.space import load_space

        device = resolve_device(args.device)
        if args.space:
            load_space("c3", device.partition(":")[0], args.space)
        described = None if args.missed else scenario_of(args, device)
        if serves():
            return 0
        with Store.open(args.db) as store:
            scenarios = _missed(store, device) if described is None else [described[0]]
            name = "missed scenarios" if described is None else described[1]
            workloads = [scenario.workload() for scenario in scenarios]
            where = place(workloads[0], device)
            many = f"{name}: {len(scenarios)} scenarios" if len(scenarios) > 1 else scenarios[0].label
            print(f"{many} on {where.label}, stored in {store.name}", file=sys.stderr)
            if store.get_calibration(where.fingerprint, "c3") is None:
                hint = "`autotune calibrate c3` measures these devices', in a minute or two"
                print(f"heuristics: by rule; {hint}", file=sys.stderr)
            results = _tune(args, device, store, scenarios)
            answers = [_one(store, r, s, device) for r, s in zip(results, scenarios, strict=False)]
            if args.missed:
                for result, workload in zip(results, workloads, strict=False):
                    if result.winner:
                        store.clear_miss(result.workload, place(workload, device).fingerprint)
        emit(_answer(name, where.label, answers))
    if not args.json:
        from autotune.cli.c3_report import print_scenario

        for answer in answers:
            print_scenario(answer)
    for result, answer in zip(results, answers, strict=True):
        if not result.ok and not result.interrupted:
            why = answer["error"] or result.stop
            print(f"autotune: NOTHING COULD BE MEASURED for {result.label}: {why}", file=sys.stderr)
    if any(result.interrupted for result in results):
        raise KeyboardInterrupt
    return 0 if any(result.ok for result in results) else 1


def _check(args: argparse.Namespace) -> None:
    if args.train or args.plans != "measured" or args.ablation != "full":
        raise UserError("--train, --plans and --ablation are of fusion: leave them out")
    if args.missed:
        given = [f"--{name}" for name in (*SCENARIO, "ranks", "inputs") if getattr(args, name) is not None]
        if args.target or given:
            raise UserError(
                f"--missed takes its scenarios from the database: leave out {', '.join(given) or args.target}"
            )


def _missed(store: Store, device: str) -> list[Scenario]:
    """The scenarios that deployments on these devices missed, on any number of ranks."""
    from autotune.c3.scenario import KIND, Scenario
    from autotune.task import place

    found = []
    for miss in store.misses():
        workload = store.get_workload(miss.workload)
        if workload is not None and workload.kind == KIND and place(workload, device).fingerprint == miss.device:
            found.append(Scenario.from_json(workload.spec))
    if not found:
        raise UserError(f"{store.name} has no missed c3 scenario of these devices: run a model with autotune.overlap")
    return found


def _tune(args: argparse.Namespace, device: str, store: Store, scenarios: Sequence[Scenario]) -> list[Result]:
    from autotune.api import tune_workloads
    from autotune.cli.progress import ProgressDisplay
    from autotune.tuner.result import BusyMachine, busy_note

    with ProgressDisplay(of=len(scenarios)) as display, warnings.catch_warnings():
        warnings.simplefilter("ignore", BusyMachine)  # told in our own words, after the display has gone
        results = tune_workloads(
            [scenario.workload() for scenario in scenarios],
            device,
            store,
            trials=args.trials,
            timeout=args.timeout,
            sampler=args.sampler,
            seed=args.seed,
            space_file=args.space,
            progress=display.show,
            command=_command(args),
        )
    if note := busy_note(results):
        print(f"autotune: WARNING: {note}", file=sys.stderr)
    return results


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
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _one(store: Store, result: Result, scenario: Scenario, device: str) -> dict[str, Any]:
    from autotune.cli.c3_report import deployed_config, figures, strategy_label
    from autotune.cli.search import reason

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
