"""How a kernel finds the elements of a tensor: axes that make a base once, and axes that are added to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autotune.compiler.kernel.nodes import Assign, Cast, Expr, Stmt, Var, sum_of
from autotune.compiler.targets.cuda.counts import Counts
from autotune.ir.graph import Output, Value


def fixed_index(axis: int) -> Var:
    """The index along an axis that makes the base."""
    return Var(f"i{axis}", "int64")


def moving_index(axis: int) -> Var:
    """The index along an axis that a walk moves on."""
    return Var(f"j{axis}")


class Access:
    """How one load, gather or output is addressed.

    Args:
        along: the axis that the lanes of a vector lie on.
        lanes: of a vector.
        fixed: the axes that make the base.
        moving: the axes that are added to it.

    Attributes:
        step: elements from one lane to the next.
        vector: whether all lanes are read or written at once: neighbours, aligned.
    """

    def __init__(
        self, tensor: Value | Output, along: int, lanes: int, fixed: Collection[int], moving: Collection[int]
    ) -> None:
        strides = dict(zip(tensor.axes, tensor.strides, strict=True))
        self.offset, self.step = tensor.offset, strides.get(along, 0)
        self.fixed = [(fixed_index(a), s) for a, s in strides.items() if a in fixed]
        # The axis of the lanes last, beside the number of the lane.
        ordered = sorted(strides, key=lambda a: a == along)
        self.moving = [(moving_index(a), strides[a]) for a in ordered if a in moving]
        aligned = self.offset % lanes == 0 and all(s % lanes == 0 for a, s in strides.items() if a != along)
        self.vector = lanes > 1 and self.step == 1 and aligned

    def base(self) -> Expr:
        """What the fixed axes make."""
        return Cast("int64", sum_of(self.fixed, self.offset))

    def at(self, base: Expr, lane: int) -> Expr:
        """The element of one lane."""
        return sum_of([(base, 1), *self.moving], lane * self.step)


def taken_apart(
    number: Expr, axes: Sequence[int], extents: Sequence[int], counts: Counts, index: Callable[[int], Var]
) -> list[Stmt]:
    """Sets ``index(axis)`` for each axis from one number; that of the first axis is what is left."""
    out: list[Stmt] = []
    for a in reversed(axes[1:]):
        rest = Var(f"rest_{index(a).name}", counts.type)
        out += [_set(index(a), counts.remainder(number, extents[a])), Assign(rest, counts.quotient(number, extents[a]))]
        number = rest
    return [*out, _set(index(axes[0]), number)]


def _set(index: Var, x: Expr) -> Assign:
    return Assign(index, Cast("int64", x) if index.dtype else x)
