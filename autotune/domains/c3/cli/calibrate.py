"""``autotune calibrate c3``: measure, once for these devices, what choosing a strategy without a search needs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autotune.cli.output import machine_output
from autotune.domains.c3.cli.scenario import ranks_of, serves
from autotune.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns 0, or 1 if nothing could be measured."""
    if args.report:
        raise UserError("--report is of fusion; `python -m benchmarks.c3` tells how well the heuristics of c3 do")
    with machine_output(args.json) as emit:
        from autotune.device import resolve_device
        from autotune.store import Calibration, Store
        from autotune.task import place

        device = resolve_device(args.device)
        ranks = ranks_of(args, device)
        if serves():
            return 0
        with Store.open(args.db) as store:
            where = place(_any_workload(ranks), device)
            print(f"calibrating {where.label}, stored in {store.name}", file=sys.stderr)
            figures = _measure(device, ranks)
            if figures:
                store.put_calibration(Calibration(store.put_device(where), "c3", figures))
            answer = {"device": where.label, "ranks": ranks, "figures": dict(figures)}
            emit(answer)
    if not args.json:
        kinds = Counter(name.partition(".")[0] for name in figures)
        print("\n".join([where.label, *(f"{kind}: {count} figures" for kind, count in kinds.items())]))
    return 0 if figures else 1


def _any_workload(ranks: int) -> Any:
    """A workload on so many ranks: devices are the same for all of them."""
    from autotune.domains.c3.scenario import Gemm, Scenario

    return Scenario(Gemm(64, 64, 64, "f32"), "all_gather", 4096 * ranks, ranks, "f32").workload()


def _measure(device: str, ranks: int) -> Mapping[str, float]:
    from autotune.domains.c3.calibration.calibrate import calibrate
    from autotune.domains.c3.measuring.ranks import Ranks
    from autotune.measure.worker import WorkerFault
    from autotune.task import policy_for

    def told(name: str, seconds: float | None) -> None:
        took = "could not be measured" if seconds is None else f"{seconds:.1f} s"
        print(f"{name}: {took}", file=sys.stderr, flush=True)

    with contextlib.closing(Ranks(None, device, policy_for(_any_workload(ranks), device), ranks=ranks)) as group:
        try:
            return calibrate(group, told)
        except WorkerFault as fault:
            print(f"autotune: NOT CALIBRATED: {fault}", file=sys.stderr)
            return {}
