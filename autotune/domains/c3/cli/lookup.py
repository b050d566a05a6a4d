"""``autotune lookup c3``: which strategy a scenario would be deployed with."""

from __future__ import annotations

import argparse
import sys

from autotune.cli.output import machine_output
from autotune.domains.c3.cli.scenario import scenario_of


def run(args: argparse.Namespace) -> int:
    """Look up; returns 0 whatever the match."""
    with machine_output(args.json) as emit:
        from autotune.device import environment, resolve_device
        from autotune.domain import place
        from autotune.domains.c3.cli.report import figures, print_scenario, strategy_label
        from autotune.domains.c3.deploy.match import C3Level, explain, match_scenario
        from autotune.errors import printable
        from autotune.runtime.ladder import text
        from autotune.store import attach_named

        device = resolve_device(args.device)
        side = device.partition(":")[0]
        scenario, name = scenario_of(args, device)
        workload = scenario.workload()
        store = attach_named(args.db, args.db_read)
        try:
            identity = place(workload, device)
            env = environment(device)
            found = match_scenario(scenario, store, identity, env, strict=args.strict, side=side)
            ladder = explain(scenario, found, store, identity, env) if args.explain else ()
        finally:
            if store is not None:
                store.close()
        measured = found.schedule if found.level is C3Level.EXACT else None  # another scenario's times are not ours
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
            "strategy_label": strategy_label(found.config, side),
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
