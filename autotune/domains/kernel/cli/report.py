"""What the commands print of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.cli.output import BUSY_NOTE, console, microseconds, ratio
from autotune.domains.kernel.space import config_words
from autotune.store.records import BUSY

if TYPE_CHECKING:
    from autotune.domains.kernel.kernel import Objective
    from autotune.store import Store


def objective_of(spec: Mapping[str, Any]) -> Objective | None:
    """What a stored workload is tuned for in the place of time."""
    from autotune.domains.kernel.kernel import Objective

    told = spec.get("objective")
    return Objective(lambda call: 0.0, told["unit"], told["direction"], told["name"]) if told else None


def figure_text(objective: Objective | None, cost: float | None) -> str:
    """What was measured, in its unit."""
    if objective is None or cost is None:
        return microseconds(cost)
    return f"{objective.figure(cost):.4g} {objective.unit}"


def with_figures(answer: Mapping[str, Any], target: str, store: Store) -> dict[str, Any]:
    """The answer of a search, with figures in the kernel's unit beside what the search calls latencies."""
    regions = []
    for region in answer["workloads"]:
        workload = store.get_workload(region["workload"])
        spec = workload.spec if workload is not None else {}
        objective = objective_of(spec)
        default = region["baselines"].get("default", {}).get("latency_us") or region["default_us"]
        costs = {"best": region["deployed_us"] or (region["best"] or {}).get("latency_us"), "default": default}
        figures = {name: figure_text(objective, cost) for name, cost in costs.items()}
        more = {"key": spec.get("key"), "figures": figures}
        if objective is not None:
            more["objective"] = spec["objective"]
        regions.append({**region, **more})
    return {**answer, "target": target, "workloads": regions}


def print_search(answer: Mapping[str, Any]) -> None:
    """The keys that were searched, as a table on stdout.

    ``best`` is what is deployed, ``speedup`` the default's figure over it, ``runs`` what a call runs with from now on.
    """
    from rich.table import Table

    names = list(dict.fromkeys(name for region in answer["workloads"] for name in region["metrics"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("key", overflow="fold", min_width=12)
    for title in ("tried", "failed", "default", "best", "speedup", *names):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("runs", overflow="fold")
    for region in answer["workloads"]:
        figures = region["figures"]
        table.add_row(
            region["label"],
            str(region["measured"] + region["reused"]),
            str(sum(region["failed"].values()) or "–"),
            figures["default"],
            figures["best"],
            ratio(region["speedup"]),
            *(f"{region['metrics'][name]:.4g}" if name in region["metrics"] else "–" for name in names),
            _runs(region),
        )
    console().print(table)
    if any((region.get("others_busy") or 0.0) > BUSY for region in answer["workloads"]):
        console().print(BUSY_NOTE, highlight=False)


def _runs(region: Mapping[str, Any]) -> str:
    if region["best"] is None:
        return "default (nothing could be measured)"
    if region["winner"] == "default":
        return "default"
    busy = " (busy)" if (region.get("others_busy") or 0.0) > BUSY else ""
    return config_words(region["best"]["config"]) + busy


def print_lookup(answer: Mapping[str, Any]) -> None:
    """What calls would run with, as a table on stdout, and why where it is no exact match."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("key", "match", "measured", "runs", "why"):
        table.add_column(title, overflow="fold", no_wrap=title == "match")
    for found in answer["keys"]:
        table.add_row(
            found["label"], found["match"], found["figure"], config_words(found["config"]), found["reason"] or "–"
        )
    console().print(table)
