"""Elements behind a mean and the variance about it: of a thread before each pack, of both sides of each join.

Threads have equally many unless a row does not fill the last pack of all of them, or warps are no power of two. Then
the number goes along as ``nc``.
"""

from __future__ import annotations

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Operand, Select, Stmt, Var
from autotune.compiler.kernel.reducers import ONE, ZERO, reciprocal
from autotune.compiler.targets.cuda.rows.shape import Shape

BEFORE, WEIGHT = Var("rm", "float32"), Var("wm", "float32")
"""For a pack that joins a thread's: one over the elements before it (0 if none), and the weight of the difference of
means."""
COUNT = Var("nc", "float32")


def weights(pack: Operand, vec: int) -> list[Stmt]:
    """Sets ``BEFORE`` and ``WEIGHT`` for the thread's pack number ``pack``."""
    if isinstance(pack, int):
        values = (1 / (pack * vec) if pack else 0.0, pack * vec / (pack + 1))
        return [Assign(x, Const(value, "float32")) for x, value in zip((BEFORE, WEIGHT), values, strict=True)]
    packs, elements = Var("kf", "float32"), Const(float(vec), "float32")
    return [
        Assign(packs, Cast("float32", pack)),
        Assign(BEFORE, Select(pack > 0, reciprocal(packs * elements), ZERO)),
        Assign(WEIGHT, packs * elements * reciprocal(packs + ONE)),
    ]


class Elements:
    """How many elements of a row each thread stands for while the threads are joined.

    Attributes:
        uneven: whether threads may have different numbers.
        each: elements of each thread, where they have not.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.uneven = shape.full != shape.packs or shape.whole_warps != shape.warps
        self.each = float(shape.full * shape.vec)

    def begin(self) -> list[Stmt]:
        """Once a pass is walked and before its threads are joined."""
        if not self.uneven:
            return []
        full, vec = self.shape.full, self.shape.vec
        least = Const(float(full * vec), "float32")
        if full == self.shape.packs:
            return [Assign(COUNT, least)]
        inside = self.shape.column(full) < self.shape.columns
        return [Assign(COUNT, Select(inside, Const(float((full + 1) * vec), "float32"), least))]

    def sides(self, other: Expr) -> float | tuple[Expr, Expr]:
        """The elements of both sides of a join; ``other`` are those of the other one where numbers differ."""
        return (COUNT, other) if self.uneven else self.each

    def joined(self, other: Expr) -> list[Stmt]:
        """After a join."""
        if self.uneven:
            return [Assign(COUNT, COUNT + other)]
        self.each *= 2
        return []
