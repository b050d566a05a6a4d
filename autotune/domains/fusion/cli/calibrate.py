"""``autotune calibrate fusion``: measure what the cost models need to know of a device, and how well they do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from autotune.cli.output import machine_output, microseconds
from autotune.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Calibrate or report; returns 0, or 1 if nothing could be measured."""
    with machine_output(args.json) as emit:
        from autotune.device import identify, resolve_device
        from autotune.store import Store

        device = resolve_device(args.device)
        with Store.open(args.db) as store:
            fingerprint = store.put_device(identify(device))
            if args.report:
                answer = _report(store, fingerprint)
            else:
                answer = {"device": identify(device).label, "figures": _measure(store, device, fingerprint)}
            emit(answer)
    if not args.json:
        print("\n".join(_lines(answer)))
    return 0 if args.report or answer["figures"] else 1


def _measure(store: Any, device: str, fingerprint: str) -> Mapping[str, float]:
    from autotune.domains.fusion.calibrate import calibrate
    from autotune.domains.fusion.task import FusionTask
    from autotune.measure.policy import default_policy
    from autotune.measure.worker import Measurer, Worker
    from autotune.store import Calibration

    policy = default_policy(device)
    workers: list[Worker] = []

    def measurer(task: FusionTask) -> Measurer:
        if not workers:
            workers.append(Worker(task.workload, device, policy))
        workers[0].open(task.workload)
        return workers[0]

    def told(name: str, us: float | None) -> None:
        print(f"{name}: {microseconds(us) if us is not None else 'could not be run'}", file=sys.stderr, flush=True)

    try:
        figures = calibrate(device, measurer, told)
    finally:
        for worker in workers:
            worker.close()
    if figures:
        store.put_calibration(Calibration(fingerprint, "fusion", figures))
    return figures


def _report(store: Any, fingerprint: str) -> dict[str, Any]:
    from autotune.domains.fusion.correlation import report

    found = report(store, fingerprint)
    if not found.workloads and not found.compared:
        raise UserError(f"{store.name} has no fusion measurements of this device: run a search first")
    return found.to_json()


_ABOUT = {
    "copy_gbs": "copy, 10^9 bytes a second",
    "l2_gbs": "the same through the last-level cache",
    "first_us": "a launch by itself, us",
    "next_us": "another launch after it, us",
    "ops_gs": "light operators, 10^9 a second",
    "heavy_gs": "special functions, 10^9 a second in the cost of light ones",
}


def _lines(answer: Mapping[str, Any]) -> list[str]:
    if "figures" in answer:
        figures = answer["figures"]
        missing = [
            f"{about}: not measured, the built-in figure stays" for n, about in _ABOUT.items() if n not in figures
        ]
        return [answer["device"], *(f"{_ABOUT[n]}: {value:.4g}" for n, value in figures.items()), *missing]
    state = "calibrated" if answer["calibrated"] else "not calibrated: built-in figures, `autotune calibrate fusion`"
    lines = [f"cost models are {state}"]
    latency, delta = answer["latency_spearman"], answer["delta_spearman"]
    told = (
        "too few schedules measured" if latency is None else f"{latency:.2f}, the median of {len(answer['workloads'])}"
    )
    lines.append(
        f"latency-evaluator, schedules of a workload: Spearman {told}{'' if latency is None else ' workloads'}"
    )
    lines += [f"  {w['spearman']:5.2f}  {w['label']} ({w['schedules']} schedules)" for w in answer["workloads"]]
    told = "too few workloads measured" if delta is None else f"{delta:.2f}"
    lines.append(f"delta-evaluator, best of {answer['workloads_compared']} workloads: Spearman {told}")
    if answer["plan_pairs"]:
        lines.append(f"  plans of one region: {answer['plan_pairs_right']} of {answer['plan_pairs']} pairs in order")
    return lines
