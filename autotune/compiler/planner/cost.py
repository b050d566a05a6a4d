"""The delta-evaluator: a cost formula for plans that takes microseconds to evaluate.

FusionStitching (arXiv 2009.10924, section 5.4) scores a fusion by ``f = T_saved_memory + T_saved_launches -
T_penalty``. Savings are relative to one kernel per operator, so comparing the scores of a region's plans is comparing
their times. These are bytes over bandwidth, launches, and penalties for the costs of fusion. Penalties are operators
recomputed in several groups, reductions that leave too few threads busy, and more values between passes than an SM can
hold.

Everything here works on the region's graph and sets of its values; no group's graph is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from autotune.compiler.program.columns import SECTOR_BYTES, piece_bytes
from autotune.compiler.program.passes import find_moments
from autotune.compiler.program.rewrites import FEWEST
from autotune.compiler.program.vectors import unit_axis
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph
from autotune.ir.nodes import POINTWISE


@dataclass(frozen=True)
class Figures:
    """The speed of a device: measured by ``autotune calibrate fusion``, else of a class of devices.

    Attributes:
        copy_gbs: bytes read and written by a large copy, in 10^9 a second, with cold caches.
        l2_gbs: the same for data in the last-level cache; ``l2_mib`` is its size.
        first_us: the time of a launch before its first byte, timed by itself.
        next_us: the additional time of another kernel after it.
        ops_gs: light operators (as fused multiply-adds) in 10^9 a second, on all ``units`` compute units.
        heavy_gs: operators of special functions, in the same unit (their cost in ``autotune.ir.nodes`` over time).
        sector_bytes: the bytes that the memory moves at least.
    """

    copy_gbs: float = 4100.0
    l2_gbs: float = 7000.0
    l2_mib: float = 50.0
    first_us: float = 2.5
    next_us: float = 1.3
    ops_gs: float = 12000.0
    heavy_gs: float = 9000.0
    units: float = 132.0
    sector_bytes: float = SECTOR_BYTES
    calibrated: bool = False

    def copy_us(self, nbytes: float) -> float:
        """Microseconds of a kernel that moves so many bytes and does nothing else."""
        return self.first_us + nbytes / self.copy_gbs / 1e3

    @classmethod
    def of(cls, side: str, found: Mapping[str, float], arch: str = "", units: int = 0) -> Figures:
        """The figures of a device: measured ones from ``found``, and those of its class for the rest.

        Args:
            side: "cuda" or "cpu".
            arch: the architecture, such as "sm_90".
            units: the device's multiprocessors or processors; 0 for those of the class.
        """
        names = {f.name for f in fields(cls)} - {"calibrated", "sector_bytes"}
        known = {k: float(v) for k, v in found.items() if k in names and v > 0}
        base = CLASSES.get(arch, CLASSES[side])
        if units:
            scale = units / base.units
            base = replace(base, units=float(units), ops_gs=base.ops_gs * scale, heavy_gs=base.heavy_gs * scale)
        return replace(base, **known, calibrated=bool(known))


CLASSES: Mapping[str, Figures] = {
    "cuda": Figures(),
    "sm_80": Figures(1600.0, 3500.0, 40.0, ops_gs=8000.0, heavy_gs=6000.0, units=108.0),
    "sm_86": Figures(700.0, 2000.0, 6.0, ops_gs=9000.0, heavy_gs=6000.0, units=82.0),
    "sm_89": Figures(800.0, 3500.0, 72.0, ops_gs=18000.0, heavy_gs=9000.0, units=128.0),
    "sm_100": Figures(7000.0, 10000.0, 126.0, ops_gs=14000.0, units=148.0),
    "sm_120": Figures(1500.0, 5000.0, 96.0, ops_gs=20000.0, heavy_gs=9000.0, units=170.0),
    "cpu": Figures(20.0, 60.0, 16.0, 10.0, 8.0, 20.0, 8.0, 2.0, sector_bytes=1.0),
}
"""Rough figures by class of device: an H200 by default, other GPUs by architecture, and a small CPU."""

HEAVY = 4
"""Cost above which operators count as special functions."""
KEPT_WORDS = 40_000.0
"""32-bit words of values between passes that an SM can hold."""


@dataclass(frozen=True)
class GroupCost:
    """The work of one group.

    Attributes:
        bytes: bytes moved to and from memory, scratch included.
        scratch: bytes of these that are scratch.
        light, heavy: operations, in units of a fused multiply-add.
        lanes: elements that the narrowest loop can process at the same time.
        row_words: 32-bit words of the longest row that is used again after its reduction, so that an SM must hold it.
        loaded: bytes that are loaded again if an SM cannot hold that row.
    """

    bytes: float
    scratch: float
    light: float
    heavy: float
    lanes: float
    row_words: float
    loaded: float

    def us(self, f: Figures) -> float:
        """Microseconds without the launch."""
        cached = self.scratch if self.scratch < f.l2_mib * 2**20 / 2 else 0.0
        again = self.loaded if self.row_words > KEPT_WORDS else 0.0
        memory = (self.bytes + again - cached) / f.copy_gbs / 1e3 + cached / f.l2_gbs / 1e3
        compute = self.light / f.ops_gs / 1e3 + self.heavy / f.heavy_gs / 1e3
        # Too few independent rows leave units idle: the penalty of fusing into one row-wise kernel.
        busy = min(1.0, max(self.lanes, 1.0) / (f.units * 512.0))
        idle = math.sqrt(max(busy, 1.0 / f.units))
        return max(memory, compute) / idle + 0.15 * min(memory, compute)


class Costs:
    """Costs of sets of values of one region."""

    def __init__(self, graph: Graph, figures: Figures) -> None:
        self.graph, self.figures = graph, figures
        self.size = [float(graph.size(v.axes)) for v in graph.values]
        self._lane_axis = unit_axis(graph)

    @cached_property
    def loaded(self) -> list[float]:
        """Bytes moved by reading each load or gather once."""
        out = []
        for v in self.graph.values:
            n = 0.0
            if v.op in ("load", "gather"):
                n = min(float(self.graph.size(self.graph.moving(v))), float(self.graph.input_numel(v.slot)))
                n *= STORAGE_BYTES[self.graph.inputs[v.slot]]
            out.append(n)
        return out

    @cached_property
    def _ops(self) -> list[tuple[float, float]]:
        """(light, heavy) operations to compute each value once; those of a reduction count its argument's elements."""
        out = []
        for i, v in enumerate(self.graph.values):
            light = heavy = 0.0
            if v.op in REDUCTIONS:
                light = self.size[v.args[0]]
            elif v.op in POINTWISE:
                cost = POINTWISE[v.op].cost * self.size[i]
                light, heavy = (cost, 0.0) if POINTWISE[v.op].cost <= HEAVY else (0.0, cost)
            out.append((light, heavy))
        return out

    def stored(self, i: int) -> float:
        """Bytes of value ``i`` in scratch."""
        v = self.graph.values[i]
        return self.size[i] * float(STORAGE_BYTES[v.dtype])

    def written(self, k: int) -> float:
        """Bytes of output ``k``."""
        out = self.graph.outputs[k]
        return float(self.graph.size(out.axes)) * float(STORAGE_BYTES[out.dtype])

    def _shared_by_all(self, inside: Sequence[int]) -> set[int]:
        """Reductions to one number with enough elements that all blocks share them.

        They do if no larger value of the group depends on one (see ``autotune.compiler.program.rewrites``).
        """
        g = self.graph
        whole = {i for i in inside if g.values[i].op in REDUCTIONS and self.size[i] == 1.0}
        whole = {i for i in whole if self.size[g.values[i].args[0]] >= FEWEST}
        after = set(whole)
        for i in inside if whole else ():
            if not after.isdisjoint(g.values[i].args):
                if max(self.size[i], *(self.size[a] for a in g.values[i].args)) > 1.0:
                    return set()
                after.add(i)
        return whole

    @cached_property
    def _of_moments(self) -> set[int]:
        """Values between a sum and the sum of squared deviations from its mean: one walk computes both."""
        g = self.graph
        overs = {v.over for v in g.values if v.op == "sum"}
        squares = {g.values[m.square].args[0] for over in overs for m in find_moments(g, over)}
        return squares | {a for square in squares for a in g.values[square].args}

    def _walked_again(self, inside: Sequence[int]) -> set[int]:
        """Reductions inside after which their rows are needed again, for another reduction or at full size."""
        g = self.graph
        waits: dict[int, set[int]] = {}
        again: set[int] = set()
        for i in inside:
            v = g.values[i]
            waits[i] = {r for a in v.args for r in waits.get(a, ())}
            if v.op in REDUCTIONS:
                waits[i].add(i)
            elif i not in self._of_moments:
                again |= {r for r in waits[i] if self.size[r] < self.size[i]}
        return again

    def _spread(self, i: int, again: bool, shared: bool) -> tuple[float, float]:
        """For a reduction: elements of its argument that are processed at the same time, and words an SM has to hold.

        One block computes a reduction to one number, or all blocks share it. For other reductions up to a thousand
        threads share a row, and up to four SMs hold it. If rows are walked again and adjacent elements belong to
        different rows, 256 threads share a sector's 16 short elements, and a cluster of eight holds them.
        """
        v = self.graph.values[i]
        row = self.size[v.args[0]] / max(self.size[i], 1.0)
        if not again:
            return row if shared else self.size[i] * min(row, 1024.0), 0.0
        if self._lane_axis in v.axes:
            return self.size[i] * min(row, 256.0) / 16, row * 16 / 8
        return self.size[i] * min(row, 1024.0), row / 4

    @cached_property
    def sectors(self) -> dict[int, float]:
        """Bytes moved to walk each reduction's rows, over the bytes of the rows: more than 1 for parts of sectors."""
        sector = int(self.figures.sector_bytes)
        pieces = {i: piece_bytes(self.graph, i) for i, v in enumerate(self.graph.values) if v.op in REDUCTIONS}
        return {i: (n + sector - math.gcd(n, sector)) / n if n else 1.0 for i, n in pieces.items()}

    def group(
        self, inside: Iterable[int], taken: Iterable[int], left: Iterable[int], outputs: Sequence[int]
    ) -> GroupCost:
        """A group's cost.

        Args:
            inside: values it computes (loads included).
            taken: values it reads from scratch.
            left: values it writes to scratch.
            outputs: numbers of the region's outputs that it writes.
        """
        g, inside = self.graph, tuple(inside)
        slots: dict[int, float] = {}
        lanes, row_words = float("inf"), 0.0
        light = heavy = 0.0
        most = max([1.0, *(self.size[i] for i in inside)])
        shared, again = self._shared_by_all(inside), self._walked_again(inside)
        for i in inside:
            v = g.values[i]
            light += self._ops[i][0]
            heavy += self._ops[i][1]
            if v.op in ("load", "gather"):
                slots[v.slot] = max(slots.get(v.slot, 0.0), self.loaded[i])
            elif v.op in REDUCTIONS and self.size[v.args[0]] > 1:
                together, words = self._spread(i, i in again, i in shared)
                lanes, row_words = min(lanes, together), max(row_words, words)
        scratch = sum(map(self.stored, taken)) + sum(map(self.stored, left))
        written = sum(map(self.written, outputs))
        total = (sum(slots.values()) + scratch + written) * max((self.sectors[i] for i in again), default=1.0)
        return GroupCost(total, scratch, light, heavy, min(lanes, most), row_words, sum(slots.values()))


def plan_us(groups: Sequence[float], launches: int, f: Figures) -> float:
    """Microseconds of a plan: the sum of its groups' times without launches, and the time of its launches."""
    return sum(groups) + f.first_us + f.next_us * (launches - 1)
