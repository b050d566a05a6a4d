"""Two reductions of one row joined at once: half of a warp's lanes carry the one, half the other.

After one exchange across the warp's halves, in which each half gives away what the other one goes on with, a pair costs
as many shuffles as one reduction alone. Layer norm's backward has two sums a row, and their shuffles are a fifth of
what it issues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Select, Stmt, Var, when
from autotune.compiler.kernel.reducers import Plain
from autotune.compiler.targets.cuda.device import shuffle
from autotune.compiler.targets.cuda.rows.shape import LANE, PART, WARP, Shape
from autotune.compiler.targets.cuda.rows.slots import Slots

UPPER, OTHER = Var("upper", "bool"), Var("y", "float32")


@dataclass(frozen=True)
class Pair:
    """Two reductions of the same kind, and the slot of the first one's parts; the second one's is right behind."""

    first: Plain
    second: Plain
    slot: int


class Pairs:
    """The pairs among the reductions of one pass, and the statements that join them.

    Attributes:
        single: reductions that have no partner.
        carried: reductions whose accumulators go through the warp's remaining shuffles: of a pair, the first one's.
    """

    def __init__(self, shape: Shape, slots: Slots, reducers: Iterable[Plain]) -> None:
        self.shape, self.slots = shape, slots
        self.single, self.pairs = list(reducers), list[Pair]()
        waiting: dict[str, Plain] = {}
        for r in self.single if shape.warps > 1 else []:  # lanes of a single warp need both results right away
            if r.dtype == "float32" and r.op in waiting:
                self.pairs.append(Pair(waiting.pop(r.op), r, slots.take("float32")))
                slots.take("float32")  # the second one's, right behind
            elif r.dtype == "float32":
                waiting[r.op] = r
        both = [r for pair in self.pairs for r in (pair.first, pair.second)]
        self.single = [r for r in self.single if r not in both]
        self.carried = [*self.single, *(pair.first for pair in self.pairs)]
        self._apart = shape.rows_per_block * shape.warps  # elements between the slots of a pair

    def halve(self) -> list[Stmt]:
        """Lanes 0 to 15 go on with the first of each pair, the others with the second: in the first one's name."""
        out: list[Stmt] = [Assign(UPPER, (LANE & 16).differs(0))] if self.pairs else []
        for pair in self.pairs:
            a, b = pair.first.carried, pair.second.carried
            out += [Assign(OTHER, Select(UPPER, a, b)), Assign(a, Select(UPPER, b, a))]
            out += [Assign(OTHER, shuffle(OTHER, 16)), *pair.first.merge([OTHER])]
        return out

    def leave(self) -> list[Stmt]:
        """The first lane of each half leaves its part in shared memory."""
        parts = ((LANE >> 4) * self._apart, WARP)
        writes = [Assign(self.slots.at("float32", p.slot, *parts), p.first.carried) for p in self.pairs]
        return [when((LANE & 15).equals(0), writes)] if writes else []

    def collect(self) -> list[Stmt]:
        """Every lane reads a warp's part of one of the two."""
        whole = self.shape.whole_warps
        out: list[Stmt] = [Assign(UPPER, (LANE & whole).differs(0))] if self.pairs and whole < 32 else []
        for pair in self.pairs:
            second = Select(UPPER, Cast("int32", Const(self._apart)), Cast("int32", Const(0)))
            places: list[tuple[Plain, tuple[Expr, ...]]] = [(pair.first, (second, PART))]
            if whole == 32:
                places = [(pair.first, (PART,)), (pair.second, (Const(self._apart), PART))]
            for r, parts in places:
                out.append(Assign(r.carried, self.slots.part(r.identity[0], pair.slot, *parts)))
        return out + (self.halve() if whole == 32 else [])

    def share(self) -> list[Stmt]:
        """Every lane gets both results."""
        out: list[Stmt] = []
        across = min(16, self.shape.whole_warps)
        for pair in self.pairs:
            a, b = pair.first.carried, pair.second.carried
            out += [Assign(OTHER, shuffle(a, across))]
            out += [Assign(b, Select(UPPER, a, OTHER)), Assign(a, Select(UPPER, OTHER, a))]
        return out
