"""The metrics of a scenario's times.

After ConCCL: with the computation and the collective each timed alone, on all devices, the ideal speedup
over doing one after the other is ``(T_gemm + T_comm) / max(T_gemm, T_comm)``. A strategy that takes ``T_c3`` has the
speedup ``(T_gemm + T_comm) / T_c3``, and realises ``(speedup - 1) / (ideal - 1)`` of the ideal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.domains.c3.scenario import LONG
from autotune.task import REFERENCE

COMPUTE = "compute"
COMM = "comm:"
"""Names of the isolated times: "compute", and "comm:ENGINE" for each engine."""


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
