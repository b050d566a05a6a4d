"""Places in shared memory where the parts of a row's reductions meet."""

from __future__ import annotations

from autotune.compiler.kernel.nodes import Cast, Const, Expr, Item, Select, Var
from autotune.compiler.targets.cuda.device import Shared
from autotune.compiler.targets.cuda.rows.shape import MINE, ROW_GROUP, Shape

PARITY = Var("par", "int32")
"""Where the present row's half of the arrays begins."""


class Places:
    """Slots in arrays, one array for each type.

    Attributes:
        counts: slots given out, by type.
    """

    def __init__(self, name: str, elements: int) -> None:
        """``elements`` of a slot; arrays are called ``name`` and the type."""
        self.name, self.elements = name, elements
        self.counts: dict[str, int] = {}

    def take(self, dtype: str) -> int:
        """The number of a new slot."""
        slot = self.counts.get(dtype, 0)
        self.counts[dtype] = slot + 1
        return slot

    def array(self, dtype: str) -> Var:
        return Var(f"{self.name}{dtype}", dtype)

    def arrays(self, halves: int = 1) -> list[Shared]:
        return [Shared(self.array(t), n * self.elements * halves, t) for t, n in self.counts.items()]


class Slots(Places):
    """Slots for the parts of the warps of a block's rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__("x", shape.rows_per_block * shape.warps)
        self.shape = shape

    def at(self, dtype: str, slot: int, *part: Expr) -> Item:
        """A part's place; ``part`` is a sum. Unsigned, as all indices of shared memory: Numba wraps a negative index
        round, five instructions each."""
        index = PARITY + slot * self.elements + ROW_GROUP * self.shape.warps
        for x in part:
            index = index + x
        return self.array(dtype)[Cast("uint32", index)]

    def part(self, nothing: Const, slot: int, *part: Expr) -> Expr:
        """What a lane reads there: ``nothing`` where no warp is that it could read."""
        read = self.at(nothing.dtype, slot, *part)
        return read if self.shape.whole_warps == self.shape.warps else Select(MINE, read, nothing)
