"""``autotune lookup kernel``: what calls of a kernel would run with."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.cli.commands.lookup import check_target
from autotune.cli.output import machine_output


def run(args: argparse.Namespace) -> int:
    """Look up; returns 0 whatever the match."""
    check_target(args)
    with machine_output(args.json) as emit:
        from autotune.device import environment, resolve_device
        from autotune.domain import place
        from autotune.domains.kernel.cli.report import figure_text, print_lookup
        from autotune.domains.kernel.declare import read_shapes
        from autotune.domains.kernel.kernel import words
        from autotune.domains.kernel.task import is_declared, resolve
        from autotune.domains.kernel.tunable import find
        from autotune.domains.kernel.workloads import workloads_of
        from autotune.store import attach_named

        device = resolve_device(args.device)
        kernel = resolve(args.target, "" if is_declared(args.target) else args.space or "")
        shapes = read_shapes(args.shapes) if args.shapes else None
        workloads, found = workloads_of(kernel, args.target, shapes, device, reference=False), []
        store = attach_named(args.db, args.db_read)
        try:
            for workload in workloads:
                where, key = place(workload, device), dict(workload.spec["key"])
                match = find(kernel, key, store, where, environment(device), strict=args.strict)
                found.append(
                    {
                        "workload": workload.fingerprint,
                        "label": workload.label,
                        "key": key,
                        "match": str(match.level),
                        "config": match.config,
                        "tuned": None if match.tuned is None else dict(match.tuned),
                        "tuned_words": words(match.tuned or {}),
                        "distance": match.distance,
                        "latency_us": None if kernel.objective else match.latency_us,
                        "figure": figure_text(kernel.objective, match.latency_us),
                        "winner": match.schedule.winner if match.schedule else None,
                        "baselines": dict(match.schedule.baselines) if match.schedule else {},
                        "changed": match.changed,
                        "reason": match.reason,
                    }
                )
        finally:
            if store is not None:
                store.close()
        answer: dict[str, Any] = {"target": args.target, "kernel": kernel.name, "device": device, "keys": found}
        emit(answer)
        if not args.json:
            print_lookup(answer)
    return 0
