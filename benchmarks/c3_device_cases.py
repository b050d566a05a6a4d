"""The cases of a result file of :mod:`benchmarks.c3_device`, from the ranks' answers, and the file's summary.

Every case has ``name`` and ``part``, and maps in ``us`` what was run to microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Scenario, format_bytes

LARGE, ENOUGH = 64 << 20, 0.9
"""From this size on copies should have so much of NCCL's bandwidth."""

Case = dict[str, Any]


def of_bandwidth(size: int, scenario: Scenario, us: Mapping[str, float]) -> Case:
    """A case of one collective and size.

    Args:
        size: the nominal one; what divides among the ranks was measured.
        us: by the name of the way; its first word is the engine's.
    """
    op = scenario.collective
    each = (scenario.ranks - 1) / scenario.ranks * (2 if op == "all_reduce" else 1) * scenario.nbytes
    best: dict[str, str] = {}
    for name in sorted(us, key=lambda n: us[n]):
        best.setdefault(name.partition(" ")[0], name)
    base = us.get("nccl") or us.get("gloo")
    ratio = base / us[best["copy"]] if base and "copy" in best else None
    return {
        "name": f"{op} {format_bytes(size)}",
        "part": "bandwidth",
        "collective": op,
        "size": size,
        "nbytes": scenario.nbytes,
        "us": dict(us),
        "gb_s": {name: round(each / t / 1e3, 2) for name, t in us.items()},
        "best": best,
        "copy_over_base": ratio and round(ratio, 4),
        "enough": None if ratio is None else ratio >= ENOUGH,
    }


def of_power(name: str, operands: str, answers: Sequence[Mapping[str, Any]]) -> Case:
    """A case of all ranks' answers: the slowest rank's times, the median rank's clock and power."""

    def over(what: str, pick: Callable[[list[float]], float]) -> dict[str, float]:
        values = {run: [a["runs"][run].get(what) for a in answers] for run in answers[0]["runs"]}
        known = {run: [v for v in found if v is not None] for run, found in values.items()}
        return {run: round(pick(found), 2) for run, found in known.items() if found}

    us, mhz = over("us", max), over("mhz", statistics.median)
    held: dict[str, dict[str, float]] = {run: {} for run in us}
    for answer in answers:
        for run, found in answer["runs"].items():
            for why, share in found.get("held", {}).items():
                held[run][why] = max(share, held[run].get(why, 0.0))
    slower = us["both"] / max(us["gemm"], us["copies"])
    clock = mhz["gemm"] / mhz["both"] if mhz.get("gemm") and mhz.get("both") else None
    return {
        "name": name,
        "part": "power",
        "operands": operands,
        "us": us,
        "us_at_first": over("first", max),
        "mhz": mhz,
        "watt": over("watt", statistics.median),
        "held": held,
        "limit_w": answers[0].get("limit_w"),
        "most_mhz": answers[0].get("most_mhz"),
        "slowdown": round(slower, 4),  # over the longer of the two alone
        "clock_drop": clock and round(clock, 4),  # the GEMM's clock alone over that during copies
        "slowdown_at_equal_clock": clock and round(slower / clock, 4),
    }


def of_partition(gemm: Gemm, us: Mapping[str, float], sms: Mapping[str, int]) -> Case:
    """A case of one GEMM; all by how many SMs were to be kept from it."""
    whole = us.get("0")
    return {
        "name": f"{gemm.label} on fewer SMs",
        "part": "partition",
        "us": dict(us),
        "sms": {name: sms[name] for name in us},
        "slowdown": {name: round(t / whole, 4) for name, t in us.items()} if whole else {},
    }


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By collective, from which size on copies are as fast, and whether they have enough from 64 MiB up."""
    found = {}
    for op in COLLECTIVES:
        own = [c for c in cases if c["part"] == "bandwidth" and c["collective"] == op]
        large = [c["enough"] for c in own if c["size"] >= LARGE]
        if own:
            found[op] = {"crossover_bytes": crossover(own), "enough_from_64MiB": all(large) if large else None}
    return found


def crossover(cases: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest size from which on copies are at least as fast; None where they are not at the largest."""
    found = None
    for case in sorted(cases, key=lambda c: -c["size"]):
        if case["copy_over_base"] is None or case["copy_over_base"] < 1:
            break
        found = int(case["size"])
    return found
