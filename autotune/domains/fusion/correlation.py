"""How well the cost models order what was measured: Spearman's rank correlation with the measurements in the database.

1 is the same order, 0 none. The latency-evaluator is asked about the schedules of one workload at a time, the
delta-evaluator about the best of different workloads and about different plans of one region.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.compiler.planner.beam import shape_us
from autotune.compiler.planner.cost import Costs
from autotune.compiler.planner.groups import read_text
from autotune.device import DeviceIdentity
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.task import Status
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store.records import Measurement
    from autotune.store.store import Store

FEWEST = 8
"""Measured schedules of a workload, or workloads, from which an order says something."""


@dataclass(frozen=True)
class WorkloadRanks:
    """One workload's schedules: how many there are with a prediction, and the correlation."""

    label: str
    schedules: int
    spearman: float


@dataclass(frozen=True)
class Report:
    """Rank correlations on one device; None where too little was measured.

    Attributes:
        latency: the latency-evaluator's: median over workloads of the correlation among their schedules.
        delta: the delta-evaluator's over the best of every workload; ``plans`` among the plans of regions that have
            several, ``ordered`` pairs of them of which ``right`` are in the right order.
        calibrated: whether the device has a calibration.
    """

    calibrated: bool
    latency: float | None
    workloads: tuple[WorkloadRanks, ...]
    delta: float | None
    compared: int
    ordered: int
    right: int

    def to_json(self) -> dict[str, Any]:
        return {
            "calibrated": self.calibrated,
            "latency_spearman": self.latency,
            "workloads": [{"label": w.label, "schedules": w.schedules, "spearman": w.spearman} for w in self.workloads],
            "delta_spearman": self.delta,
            "workloads_compared": self.compared,
            "plan_pairs": self.ordered,
            "plan_pairs_right": self.right,
        }


def report(store: Store, device: str) -> Report:
    """Compare the models with everything measured on a device.

    Args:
        device: fingerprint; it needs not be this machine's.
    """
    identity = store.get_device(device)
    found = store.get_calibration(device, "fusion")
    figures = found.figures if found else {}
    measured: dict[str, list[Measurement]] = {}
    for m in store.measurements(device=device, status=Status.OK):
        if m.stage != "final" and m.latency_us is not None:
            measured.setdefault(m.key.workload, []).append(m)
    ranks: list[WorkloadRanks] = []
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
            ranks.append(WorkloadRanks(workload.label, len(pairs), spearman(pairs)))
        plans = _plans(task, several)
        if plans:
            best.append(min(plans, key=lambda p: p[1]))
        for i, a in enumerate(plans):
            for b in plans[:i]:
                ordered += 1
                right += (a[0] < b[0]) == (a[1] < b[1])
    return Report(
        calibrated=found is not None,
        latency=statistics.median(r.spearman for r in ranks) if ranks else None,
        workloads=tuple(sorted(ranks, key=lambda r: r.spearman)),
        delta=spearman(best) if len(best) >= FEWEST else None,
        compared=len(best),
        ordered=ordered,
        right=right,
    )


def _task(workload: Workload, identity: DeviceIdentity, figures: Mapping[str, float]) -> FusionTask:
    if identity.kind == "cpu":
        return FusionTask(workload, "cpu").under("", figures)
    target = "sm_" + identity.capability.replace(".", "")
    return FusionTask(workload, "cuda:0", target=target, sms=identity.units).under("", figures)


def _latest(several: Iterable[Measurement]) -> list[Measurement]:
    """One measurement for each schedule, the repeated one where there is one."""
    from autotune.task import config_key

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
    """Spearman's rank correlation, equal values sharing the mean of their ranks; 0 where one side is all equal."""
    a, b = (_ranks([p[k] for p in pairs]) for k in (0, 1))
    mean = (len(pairs) - 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    bottom = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return top / bottom if bottom else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v) - 1) / 2 for v in values]
