"""The metrics of a scenario's times, and the form of a case in a result file.

**The ideal**, after ConCCL. With the computation and the collective each timed alone, on all devices, the ideal speedup
over doing one after the other is ``(T_gemm + T_comm) / max(T_gemm, T_comm)``. A strategy that takes ``T_c3`` has the
speedup ``(T_gemm + T_comm) / T_c3``, and realises ``(speedup - 1) / (ideal - 1)`` of the ideal.

The suite makes the ideal hard to reach. ``T_comm`` is that of the engine that is fastest by itself. Both times are the
best of the isolated runs, which take their turns among the concurrent ones, at the same clocks and temperatures;
``T_c3`` is a median. A large GEMM alone takes up to 7% more or less from one round to the next, as the GPU's power
allows, so a ratio of medians may exceed the ideal.

**A result file** of the C3 suite (:mod:`autotune.bench.form`) has ``suite`` ("c3"), ``schema``, ``ranks`` and
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
strategies to what they took in the search, which is another run; ``beside`` has the times of strategies that took part
in every comparison. ``t_gemm_median_ms`` and ``t_comm_median_by_engine_ms`` are the medians of the parts alone. Schema
1 has neither these nor the family ``naive_swapped``. More fields may follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.domains.c3.scenario import LONG
from autotune.task import REFERENCE

COMPUTE = "compute"
COMM = "comm:"
"""Names of the isolated times: "compute", and "comm:ENGINE" for each engine."""
SCHEMA = 2
FAMILIES = ("naive", "naive_swapped", "order", "partition", "copy_engine", "tuned")
"""Families of strategies by name; "tuned" is the best of all that was measured."""

_TIMES = ("t_gemm_ms", "t_comm_ms", "ideal", "sequential_ms")
_TEXTS = ("name", "kind", "class", "collective", "compute")


@dataclass(frozen=True)
class Isolated:
    """The computation and the collective by themselves.

    Attributes:
        compute: time of the computation, in any unit.
        engines: time of the collective by each engine that could be measured; at least one.
    """

    compute: float
    engines: Mapping[str, float]

    @classmethod
    def of(cls, times: Mapping[str, float], scale: float = 1.0) -> Isolated | None:
        """From times by name, with or without the mark of a reference; None where a part of it is missing."""
        plain = {name.removeprefix(REFERENCE): us * scale for name, us in times.items() if us and us > 0}
        engines = {name.removeprefix(COMM): us for name, us in plain.items() if name.startswith(COMM)}
        return cls(plain[COMPUTE], engines) if COMPUTE in plain and engines else None

    @property
    def comm(self) -> float:
        """Of the fastest engine."""
        return min(self.engines.values())

    @property
    def engine(self) -> str:
        """The fastest engine."""
        return min(self.engines, key=lambda name: self.engines[name])

    @property
    def longest(self) -> float:
        return max(self.compute, self.comm)

    @property
    def ideal(self) -> float:
        """The speedup that nobody can beat, if neither slows the other down."""
        return (self.compute + self.comm) / self.longest

    @property
    def kind(self) -> str:
        """The longer side: "compute", "communication", or "equal"."""
        if self.compute > LONG * self.comm:
            return "compute"
        return "communication" if self.comm > LONG * self.compute else "equal"

    def speedup(self, time: float) -> float:
        """Over the two one after the other."""
        return (self.compute + self.comm) / time

    def fraction(self, time: float) -> float | None:
        """Share of the ideal that ``time`` realises; None where there is nothing to gain."""
        gain = self.ideal - 1
        return (self.speedup(time) - 1) / gain if gain > 1e-6 else None

    def figures(self, time: float) -> dict[str, Any]:
        """Speedup, fraction of the ideal and time over the longer of the two."""
        fraction = self.fraction(time)
        return {
            "speedup": round(self.speedup(time), 4),
            "fraction": None if fraction is None else round(fraction, 4),
            "t_over_max": round(time / self.longest, 4),
        }


def c3_problems(case: object) -> list[str]:
    """Faults of a case, a line each; empty if it is of the form."""
    if not isinstance(case, Mapping):
        return ["it is not an object"]
    found = [f"{key} is not a text" for key in _TEXTS if not isinstance(case.get(key), str) or not case[key]]
    found += [f"{key} is not a number above 0" for key in _TIMES if not _positive(case.get(key))]
    if type(case.get("nbytes")) is not int or case["nbytes"] <= 0:
        found.append("nbytes is not a whole number above 0")
    engines = case.get("t_comm_by_engine_ms")
    if not isinstance(engines, Mapping) or not engines or not all(_positive(ms) for ms in engines.values()):
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
        f"{key} is not a number above 0" for key in ("ms", "speedup", "t_over_max") if not _positive(entry.get(key))
    ]
    fraction = entry.get("fraction", "")
    if fraction is not None and not (type(fraction) in (int, float) and math.isfinite(fraction)):
        found.append("fraction is neither null nor a number")
    if not isinstance(entry.get("strategy"), Mapping):
        found.append("strategy is not an object")
    return found


def _positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
