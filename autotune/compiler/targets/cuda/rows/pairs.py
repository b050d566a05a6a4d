"""Two reductions of one row joined at once: half of a warp's lanes carry the one, half the other.

After one exchange across the warp's halves, in which each half gives away what the other one goes on with, a pair costs
as many shuffles as one reduction alone. Layer norm's backward has two sums a row, and their shuffles are a fifth of
what it issues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.compiler.program.program import Pass, power_of_two
from autotune.compiler.targets.cuda.operators import accumulator, combine, identity

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.kernel import Rows


class Pairs:
    """The pairs among the reductions of one pass, and the lines that join them.

    Attributes:
        single: reductions that have no partner.
    """

    def __init__(self, rows: Rows, pas: Pass) -> None:
        self.r = rows
        self.pairs: list[tuple[int, int]] = []
        self.single = list(pas.reduce)
        if rows.warps == 1:  # every lane needs both results right away
            return
        waiting: dict[str, int] = {}
        for i in pas.reduce:
            v = rows.g.values[i]
            if accumulator(v.dtype) != "float32" or v.dtype == "bool":
                continue
            first = waiting.pop(v.op, None)
            if first is None:
                waiting[v.op] = i
            else:
                self.pairs.append((first, i))
        both = {i for pair in self.pairs for i in pair}
        self.single = [i for i in pas.reduce if i not in both]

    @property
    def carried(self) -> list[int]:
        """Reductions whose accumulators go through the warp's remaining shuffles: of a pair, the first one's."""
        return [*self.single, *(a for a, _ in self.pairs)]

    def halve(self) -> list[str]:
        """Lanes 0 to 15 go on with the first of each pair, the others with the second: in the first one's name."""
        out = ["upper = (lane & 16) != 0"] if self.pairs else []
        for a, b in self.pairs:
            v = self.r.g.values[a]
            out += [f"y = sel(upper, a{a}, a{b})", f"a{a} = sel(upper, a{b}, a{a})"]
            out.append("y = cuda.shfl_xor_sync(0xffffffff, y, 16)")
            out.append(f"a{a} = {combine(v.op, v.dtype, f'a{a}', 'y')}")
        return out

    def leave(self, place: Callable[[int, str], str]) -> tuple[list[str], list[int]]:
        """The first lane of each half leaves its part in shared memory; ``place(slot, part)`` is an index there."""
        slots, out = [], []
        for a, _ in self.pairs:
            slots.append(self.r.slot("float32"))
            self.r.slot("float32")  # the second one's, right behind
            out.append(f"    xfloat32[{place(slots[-1], f'(lane >> 4) * {self._apart} + warp')}] = a{a}")
        return (["if (lane & 15) == 0:", *out] if out else []), slots

    @property
    def _apart(self) -> int:
        return self.r.R * self.r.warps

    def collect(self, slots: list[int], place: Callable[[int, str], str]) -> list[str]:
        """Every lane reads a warp's part of one of the two."""
        out = []
        whole = power_of_two(self.r.warps)
        if self.pairs and whole < 32:
            out.append(f"upper = (lane & {whole}) != 0")
        for (a, b), slot in zip(self.pairs, slots, strict=True):
            v = self.r.g.values[a]
            if whole < 32:
                reads = [(a, f"sel(upper, int32({self._apart}), int32(0)) + part")]
            else:
                reads = [(a, "part"), (b, f"{self._apart} + part")]
            for i, part in reads:
                read = f"xfloat32[{place(slot, part)}]"
                mine = whole == self.r.warps
                out.append(f"a{i} = {read if mine else f'sel(mine, {read}, {identity(v.op, v.dtype)})'}")
        return out + (self.halve() if whole == 32 else [])

    def share(self) -> list[str]:
        """Every lane gets both results."""
        out = []
        across = min(16, power_of_two(self.r.warps))
        for a, b in self.pairs:
            out.append(f"y = cuda.shfl_xor_sync(0xffffffff, a{a}, {across})")
            out += [f"a{b} = sel(upper, a{a}, y)", f"a{a} = sel(upper, y, a{a})"]
        return out
