"""What ``search`` and ``lookup`` answer: one object for a region, and their sum for a whole target.

A target's latency is the sum of its regions' latencies, each times how often the region occurs. Everything else of the
target (matrix products, attention) is left out, since nothing of it is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.cli.output import BUSY_NOTE, console, microseconds, ratio
from autotune.store.records import BUSY

Region = Mapping[str, Any]
LEVELS = ("exact", "other_rows", "other_device", "packaged", "none")
"""Match levels, best first."""


def total(target: str, device: str, regions: Sequence[Region]) -> dict[str, Any]:
    """The JSON object of a whole target.

    ``match`` is the worst among the regions. ``best`` is the sum of the fastest candidates, with the configuration for
    a target of one region; null if a region has none. ``deployed_us`` is the sum of what is deployed, where a baseline
    may have won. A baseline's latency is null, with the ``error``, where it could not be measured for every region.
    ``speedup`` is the fastest baseline over what is deployed.

    Args:
        regions: objects with ``workload``, ``label``, ``count``, ``match``, ``best``, ``baselines``, ``deployed_us``
            and, from a search, ``measured``, ``reused`` and ``failed``.
    """
    failed: Counter[str] = Counter()
    for region in regions:
        failed.update(region.get("failed", {}))
    best = _sum(regions, [_latency(region["best"]) for region in regions])
    deployed = _sum(regions, [region["deployed_us"] for region in regions])
    names = dict.fromkeys(name for region in regions for name in region["baselines"])
    baselines = {name: _baseline(regions, name) for name in names}
    fastest = min((b["latency_us"] for b in baselines.values() if b["latency_us"] is not None), default=None)
    return {
        "workload": target,
        "device": device,
        "match": max((region["match"] for region in regions), key=LEVELS.index, default="none"),
        "measured": sum(region.get("measured", 0) for region in regions),
        "reused": sum(region.get("reused", 0) for region in regions),
        "failed": dict(failed),
        "best": None if best is None else {"config": _config(regions), "latency_us": best},
        "baselines": baselines,
        "deployed_us": deployed,
        "speedup": fastest / deployed if fastest and deployed else None,
        "workloads": [dict(region) for region in regions],
    }


def _config(regions: Sequence[Region]) -> Any:
    return regions[0]["best"]["config"] if len(regions) == 1 else None


def _baseline(regions: Sequence[Region], name: str) -> dict[str, Any]:
    found = [region["baselines"].get(name, {}) for region in regions]
    out: dict[str, Any] = {"latency_us": _sum(regions, [_latency(baseline) for baseline in found])}
    errors = [baseline["error"] for baseline in found if "error" in baseline]
    return {**out, "error": errors[0]} if errors else out


def _latency(timed: Mapping[str, Any] | None) -> float | None:
    latency: float | None = (timed or {}).get("latency_us")
    return latency


def _sum(regions: Sequence[Region], latencies: Sequence[float | None]) -> float | None:
    """Weighted by count; None if there is no region or one lacks its latency."""
    known = [latency for latency in latencies if latency is not None]
    if not regions or len(known) < len(regions):
        return None
    weighted: float = sum(latency * region["count"] for latency, region in zip(known, regions, strict=True))
    return weighted


def print_table(answer: Mapping[str, Any]) -> None:
    """The regions of an answer as a table on stdout, in the order given, and their sum.

    ``noise`` is the interquartile range over the median of the winner's samples; ``runs`` is what a deployment runs,
    marked where other processes kept the machine too busy for that to be trusted; in the sum it is the
    latency of all that, to which ``speedup`` refers, whereas ``autotune`` is the best candidate even where a baseline
    won.
    """
    from rich.table import Table

    regions = answer["workloads"]
    names = list(dict.fromkeys(name for region in regions for name in region["baselines"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("region", overflow="fold", min_width=12)
    noisy = ["noise"] if any(region.get("noise") is not None for region in regions) else []
    for title in ("times", "match", *names, "autotune", *noisy, "speedup", "runs"):
        table.add_column(title, justify="left" if title in ("match", "runs") else "right", no_wrap=True)
    for region in regions:
        baselines = [microseconds(_latency(region["baselines"].get(name))) for name in names]
        table.add_row(
            region["label"] or region["workload"][:12],
            str(region["count"]),
            region["match"],
            *baselines,
            microseconds(_latency(region["best"])),
            *(_noise(region) for _ in noisy),
            ratio(region["speedup"]),
            _runs(region),
        )
    if len(regions) > 1 and answer["best"] is not None:
        sums = [microseconds(_latency(answer["baselines"].get(name))) for name in names]
        latency = microseconds(answer["best"]["latency_us"])
        table.add_section()
        table.add_row(
            "sum",
            "",
            answer["match"],
            *sums,
            latency,
            *("" for _ in noisy),
            ratio(answer["speedup"]),
            _deployed(answer),
        )
    console().print(table)
    if any(_busy(region) for region in regions):
        console().print(BUSY_NOTE, highlight=False)


def _deployed(answer: Mapping[str, Any]) -> str:
    """What a deployment takes for all regions; where baselines won that is less than the sum of the candidates."""
    latency = answer["deployed_us"]
    return "" if latency is None else f"{microseconds(latency)} in all"


def _busy(region: Region) -> bool:
    return (region.get("others_busy") or 0.0) > BUSY


def _runs(region: Region) -> str:
    winner = region.get("winner") or "–"
    return f"{winner} (busy)" if _busy(region) else winner


def _noise(region: Region) -> str:
    noise = region.get("noise")
    return "–" if noise is None else f"{noise:.0%}"
