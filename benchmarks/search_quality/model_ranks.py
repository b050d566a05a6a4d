"""Rank correlations between the cost models and a database's measurements of a device.

python -m benchmarks.search_quality.model_ranks --db tuned.db --device cuda:0
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.compiler.planner.beam import shape_us
from autotune.compiler.planner.cost import Costs
from autotune.compiler.planner.groups import read_text
from autotune.device import DeviceIdentity, identify, resolve_device
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.store import Store
from autotune.store.records import Measurement
from autotune.task import Status, config_key
from autotune.workload import Workload

FEWEST = 8
"""Minimum number of measured schedules of a workload, or of workloads, for a rank correlation."""


def report(store: Store, device: str) -> dict[str, Any]:
    """Compare the models with everything measured on a device.

    Args:
        device: the device's fingerprint; it need not be this machine's.

    Returns:
        Rank correlations for ``--json``, null if there are too few measurements. ``latency_spearman``, for the
        latency-evaluator, is the median over ``workloads`` of the correlation among their schedules.
        ``delta_spearman``, for the delta-evaluator, is over the best schedules of all workloads. ``plan_pairs`` counts
        pairs of plans of one region, and ``plan_pairs_right`` those in the right order.
    """
    identity = store.get_device(device)
    found = store.get_calibration(device, "fusion")
    figures = found.figures if found else {}
    measured: dict[str, list[Measurement]] = {}
    for m in store.measurements(device=device, status=Status.OK):
        if m.stage != "final" and m.latency_us is not None:
            measured.setdefault(m.key.workload, []).append(m)
    ranks: list[dict[str, Any]] = []
    best: list[tuple[float, float]] = []
    ordered = right = 0
    for fingerprint, several in measured.items():
        workload = store.get_workload(fingerprint)
        if workload is None or workload.kind != "fusion" or identity is None:
            continue
        try:
            task = _task(workload, identity, figures)
        except (Unsupported, ValueError):
            continue
        pairs = [(us, m.latency_us or 0.0) for m in _latest(several) if (us := task.predict(m.config)) is not None]
        if len(pairs) >= FEWEST:
            ranks.append({"label": workload.label, "schedules": len(pairs), "spearman": spearman(pairs)})
        plans = _plans(task, several)
        if plans:
            best.append(min(plans, key=lambda p: p[1]))
        for i, a in enumerate(plans):
            for b in plans[:i]:
                ordered += 1
                right += (a[0] < b[0]) == (a[1] < b[1])
    return {
        "calibrated": found is not None,
        "latency_spearman": statistics.median(r["spearman"] for r in ranks) if ranks else None,
        "workloads": sorted(ranks, key=lambda r: r["spearman"]),
        "delta_spearman": spearman(best) if len(best) >= FEWEST else None,
        "workloads_compared": len(best),
        "plan_pairs": ordered,
        "plan_pairs_right": right,
    }


def _task(workload: Workload, identity: DeviceIdentity, figures: Mapping[str, float]) -> FusionTask:
    if identity.kind == "cpu":
        return FusionTask(workload, "cpu").under("", figures)
    target = "sm_" + identity.capability.replace(".", "")
    return FusionTask(workload, "cuda:0", target=target, sms=identity.units).under("", figures)


def _latest(several: Iterable[Measurement]) -> list[Measurement]:
    """The latest measurement of each schedule, a repeated one if there is one."""
    found: dict[str, Measurement] = {}
    for m in sorted(several, key=lambda m: m.stage == "repeat"):
        found[config_key(m.config)] = m
    return list(found.values())


def _plans(task: FusionTask, several: Iterable[Measurement]) -> list[tuple[float, float]]:
    """(modelled, best measured) microseconds of each plan of a region."""
    best: dict[str, float] = {}
    for m in _latest(several):
        text = str(m.config.get("plan", task.plan.text))
        best[text] = min(best.get(text, float("inf")), m.latency_us or float("inf"))
    costs = Costs(task.graph, task.estimates)
    out = []
    for text, us in best.items():
        try:
            out.append((shape_us(task.graph, costs, read_text(text)), us))
        except ValueError:
            continue
    return out


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation; ties share the mean of their ranks; 0 if one side is constant."""
    a, b = (_ranks([p[k] for p in pairs]) for k in (0, 1))
    try:
        return statistics.correlation(a, b)
    except statistics.StatisticsError:
        return 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v) - 1) / 2 for v in values]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", required=True)
    parser.add_argument("--device", default="cuda:0", help="a device of this machine (%(default)s)")
    options = parser.parse_args(argv)
    with Store.open(options.db) as store:
        print(json.dumps(report(store, identify(resolve_device(options.device)).fingerprint), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
