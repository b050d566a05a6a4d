"""What ``search`` and ``lookup`` answer: one object for a region, and their sum for a whole target.

A target's latency is the sum of its regions' latencies, each times how often the region occurs. Everything else of the
target (matrix products, attention) is left out, since nothing of it is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.cli.output import console, microseconds, ratio

Region = Mapping[str, Any]
LEVELS = ("exact", "other_rows", "none")
"""Match levels, best first."""


def total(target: str, device: str, regions: Sequence[Region]) -> dict[str, Any]:
    """The JSON object of a whole target.

    ``match`` is the worst among the regions. ``best`` holds the sum of what is deployed (a baseline where one won) and,
    for a target of one region, its configuration; null if a region has no latency. ``baselines`` holds those that every
    region has; ``speedup`` is the fastest of them over ``best``.

    Args:
        regions: objects with ``workload``, ``label``, ``count``, ``match``, ``best``, ``baselines``, ``deployed_us``
            and, from a search, ``measured``, ``reused`` and ``failed``.
    """
    failed: Counter[str] = Counter()
    for region in regions:
        failed.update(region.get("failed", {}))
    deployed = _sum(regions, lambda region: region["deployed_us"])
    names = list(dict.fromkeys(name for region in regions for name in region["baselines"]))
    sums = {name: _sum(regions, lambda region, name=name: _latency(region["baselines"].get(name))) for name in names}
    baselines = {name: {"latency_us": value} for name, value in sums.items() if value is not None}
    config = (regions[0]["best"] or {}).get("config") if len(regions) == 1 else None
    fastest = min((b["latency_us"] for b in baselines.values()), default=None)
    return {
        "workload": target,
        "device": device,
        "match": max((region["match"] for region in regions), key=LEVELS.index, default="none"),
        "measured": sum(region.get("measured", 0) for region in regions),
        "reused": sum(region.get("reused", 0) for region in regions),
        "failed": dict(failed),
        "best": None if deployed is None else {"config": config, "latency_us": deployed},
        "baselines": baselines,
        "speedup": fastest / deployed if fastest and deployed else None,
        "workloads": [dict(region) for region in regions],
    }


def _latency(baseline: Mapping[str, Any] | None) -> float | None:
    return None if baseline is None else baseline["latency_us"]


def _sum(regions: Sequence[Region], latency: Any) -> float | None:
    """Weighted by count; None if there is no region or one lacks its latency."""
    values = [latency(region) for region in regions]
    if not values or None in values:
        return None
    return float(sum(value * region["count"] for value, region in zip(values, regions, strict=True)))


def print_table(answer: Mapping[str, Any]) -> None:
    """The regions of an answer as a table on stdout, in the order given, and their sum."""
    from rich.table import Table

    regions = answer["workloads"]
    names = list(dict.fromkeys(name for region in regions for name in region["baselines"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("region", overflow="fold")
    for title in ("times", "match", *names, "autotune", "speedup", "runs"):
        table.add_column(title, justify="left" if title in ("match", "runs") else "right")
    for region in regions:
        baselines = [microseconds(_latency(region["baselines"].get(name))) for name in names]
        best = region["best"] or {}
        table.add_row(
            region["label"] or region["workload"][:12],
            str(region["count"]),
            region["match"],
            *baselines,
            microseconds(best.get("latency_us")),
            ratio(region["speedup"]),
            region.get("winner") or "–",
        )
    if len(regions) > 1 and answer["best"] is not None:
        sums = [microseconds(_latency(answer["baselines"].get(name))) for name in names]
        latency = microseconds(answer["best"]["latency_us"])
        table.add_section()
        table.add_row("sum of what runs", "", answer["match"], *sums, latency, ratio(answer["speedup"]), "")
    console().print(table)
