"""A case of the C3 suite in a result file: its form, its validation, and its fields on a page.

A result file of the C3 suite (:mod:`benchmarks.form`) has ``suite`` ("c3"), ``schema``, ``ranks`` and
``summary``. A case has

========================  ============================================================================================
``name``                  as the list of scenarios has it
``kind``                  which takes longer, as measured: ``compute``, ``equal`` or ``communication``
``class``                 which was expected to
``collective``            all_gather, all_to_all, reduce_scatter or all_reduce
``compute``, ``nbytes``   the computation's label; bytes of the larger of a rank's two buffers
``t_gemm_ms``             the computation alone: the fastest of the comparison's rounds, the median in schema 1
``t_comm_ms``             the collective alone, likewise, by the engine that is fastest so
``t_comm_by_engine_ms``   by each engine that works
``ideal``                 speedup that nobody can beat
``sequential_ms``         one after the other
``strategies``            for each family of :mod:`benchmarks.c3.families` null, where none of it
                          worked, or an object with ``ms``, ``speedup``, ``fraction`` (of the ideal; null where that
                          is 1), ``t_over_max``, ``strategy``, ``label`` and ``engine_seen`` (null where not profiled)
========================  ============================================================================================

All other times of a case are medians of one comparison, taken in turn, of the slowest rank. ``measured`` maps
strategies to their times in the search, which is another run; ``beside`` has the times of strategies that took part
in every comparison. ``t_gemm_median_ms`` and ``t_comm_median_by_engine_ms`` are the medians of the parts alone. Schema
1 has neither these nor the family ``naive_swapped``. More fields may follow.

The suite makes the ideal hard to reach. ``T_comm`` is that of the engine that is fastest by itself. Both times are the
best of the isolated runs, which take their turns among the concurrent ones, at the same clocks and temperatures;
``T_c3`` is a median. A large GEMM alone takes up to 7% more or less from one round to the next, as the GPU's power
allows, so a ratio of medians may exceed the ideal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.charts import Exhibit
from autotune.domains.c3.results import Chart, against_ideal

SCHEMA = 2
FAMILIES = ("naive", "naive_swapped", "order", "partition", "copy_engine", "tuned")
"""Families of strategies by name; "tuned" is the best of all that was measured."""

_TIMES = ("t_gemm_ms", "t_comm_ms", "ideal", "sequential_ms")
_TEXTS = ("name", "kind", "class", "collective", "compute")
_ROWS = {
    "compute": ("computation", "#2563eb"),
    "nccl": ("NCCL kernels", "#9333ea"),
    "copies": ("copies", "#d97706"),
    "kernels": ("Numba kernels", "#16a34a"),
    "gloo": ("gloo", "#9333ea"),
    "copy": ("copies through shared memory", "#d97706"),
}
_STRATEGIES = 40
"""Strategies of a search that are listed."""


def c3_problems(case: object) -> list[str]:
    """Faults of a case, a line each; empty if it is of the form."""
    if not isinstance(case, Mapping):
        return ["it is not an object"]
    found = [f"{key} is not a text" for key in _TEXTS if not isinstance(case.get(key), str) or not case[key]]
    found += [f"{key} is not a number above 0" for key in _TIMES if not is_positive(case.get(key))]
    if type(case.get("nbytes")) is not int or case["nbytes"] <= 0:
        found.append("nbytes is not a whole number above 0")
    engines = case.get("t_comm_by_engine_ms")
    if not isinstance(engines, Mapping) or not engines or not all(is_positive(ms) for ms in engines.values()):
        found.append("t_comm_by_engine_ms does not map engines to times")
    strategies = case.get("strategies")
    if not isinstance(strategies, Mapping):
        return [*found, "strategies is not an object"]
    since_2 = "t_gemm_median_ms" in case
    for name in FAMILIES:
        if name not in strategies:
            if since_2 or name != "naive_swapped":
                found.append(f"strategies lacks {name}")
        elif strategies[name] is not None:
            found += [f"strategies.{name}: {fault}" for fault in _strategy_problems(strategies[name])]
    return found


def _strategy_problems(entry: object) -> list[str]:
    if not isinstance(entry, Mapping):
        return ["it is neither null nor an object"]
    found = [
        f"{key} is not a number above 0" for key in ("ms", "speedup", "t_over_max") if not is_positive(entry.get(key))
    ]
    fraction = entry.get("fraction", "")
    if fraction is not None and not (type(fraction) in (int, float) and math.isfinite(fraction)):
        found.append("fraction is neither null nor a number")
    if not isinstance(entry.get("strategy"), Mapping):
        found.append("strategy is not an object")
    return found


def is_positive(value: object) -> bool:
    """Return True for a finite number above 0; truth values are none."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


# ---- on a page ------------------------------------------------------------------------------------------------------


def case_exhibits(case: Mapping[str, Any]) -> Sequence[Exhibit]:
    """Sections of a page about a case."""
    about = f"The line is the ideal. Alone: computation {case['t_gemm_ms']:.4g} ms, "
    about += ", ".join(f"{engine} {ms:.4g} ms" for engine, ms in case["t_comm_by_engine_ms"].items()) + "."
    chart = against_ideal(speedups(case), over_sequential(case))
    shown = [Exhibit("Against the ideal", about, chart=chart)]
    for panel in timeline(case)["vconcat"] if case.get("timeline") else ():
        name, _, run = panel.pop("title").partition(": ")
        about = f"Both streams of rank 0, by the profiler: {run}."
        shown.append(Exhibit(f"What ran when: {name}", about, chart=panel))
    heads = ("family", "ms", "speedup", "of the ideal", "strategy")
    rows = [
        (name.replace("_", " "), s["ms"], s["speedup"], s["fraction"], s["label"])
        for name, s in case["strategies"].items() if s
    ]  # fmt: skip
    shown.append(Exhibit("Families of strategies", heads=heads, rows=rows))
    measured = sorted((case.get("measured") or {}).items(), key=lambda item: item[1])[:_STRATEGIES]
    if measured:
        about = "In the search, which is another run than the comparison above."
        shown.append(Exhibit("Strategies measured", about, heads=("strategy", "ms"), rows=measured, folded=True))
    return shown


def speedups(case: Mapping[str, Any]) -> dict[str, float]:
    """Family to speedup over sequential; those that worked."""
    found = {"sequential": 1.0}
    for name in FAMILIES:
        if entry := case["strategies"].get(name):
            found[name.replace("_", " ")] = case["sequential_ms"] / entry["ms"]
    return found


def over_sequential(case: Mapping[str, Any]) -> float:
    """The ideal over what one after the other took in the same comparison."""
    longest: float = max(case["t_gemm_ms"], case["t_comm_ms"])
    return float(case["sequential_ms"]) / longest


def timeline(case: Mapping[str, Any]) -> Chart:
    """Timelines of a case, naively overlapped and tuned, on one scale; the times are rank 0's."""
    runs = {name: case["timeline"][name] for name in ("naive", "tuned") if name in case["timeline"]}
    rows = [
        {
            "run": name,
            "row": _ROWS[span["row"]][0],
            "name": span["name"],
            "start": span["start_us"] / 1e3,
            "end": (span["start_us"] + span["us"]) / 1e3,
            "us": span["us"],
        }
        for name, run in runs.items()
        for span in run["spans"]
    ]
    colours = {words: colour for words, colour in _ROWS.values() if any(row["row"] == words for row in rows)}
    used = list(colours)
    panels = []
    for name, run in runs.items():
        entry = case["strategies"].get(name)
        panels.append(
            {
                "title": f"{name}: {run['us'] / 1e3:.3g} ms" + (f", {entry['label']}" if entry else ""),
                "height": 26 * len({row["row"] for row in rows if row["run"] == name}),
                "data": {"values": [row for row in rows if row["run"] == name]},
                "mark": {"type": "bar", "stroke": "#ffffff", "strokeWidth": 0.5},
                "encoding": {
                    "y": {"field": "row", "type": "nominal", "sort": used, "title": None},
                    "x": {
                        "field": "start",
                        "type": "quantitative",
                        "title": "ms",
                        "scale": {"domain": [0, max(r["us"] for r in runs.values()) / 1e3], "nice": False},
                    },
                    "x2": {"field": "end"},
                    "color": {
                        "field": "row",
                        "type": "nominal",
                        "legend": None,
                        "scale": {"domain": used, "range": list(colours.values())},
                    },
                    "tooltip": [{"field": "name"}, {"field": "us"}, {"field": "start", "title": "from, ms"}],
                },
            }
        )
    return {"title": f"{case['name']}: what ran when, on rank 0", "vconcat": panels}
