"""Expressions for the values of a region graph, and per-thread state of reductions, for all schemes and targets.

A thread holds a reduction in fields, which are initialised, updated with elements, merged with those of another thread,
and finished. Every reduction across threads (shuffles, shared memory, blocks of a cluster) reads the other thread's
fields and calls :meth:`Reducer.merge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Op, Select, Stmt, Var
from autotune.compiler.program.program import Pass
from autotune.ir.graph import Graph, Value, compute_type

ZERO, ONE = Const(0.0, "float32"), Const(1.0, "float32")
LOWEST = Const(float("-inf"), "float32")
COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""The operator that adds one more term to a reduction."""


def pointwise(v: Value, args: Sequence[Expr]) -> Expr:
    """A pointwise value from its arguments, which have a ``dtype``."""
    if v.op == "where":
        return Select(*args)
    if v.op == "cast":
        return cast(args[0], v.dtype)
    return Op(v.op, tuple(args), args[0].dtype, v.dtype)


def cast(x: Expr, target: str) -> Expr:
    """``x`` in another arithmetic type; a boolean becomes 0 or 1, and a nonzero number becomes true."""
    if x.dtype == target:
        return x
    if target == "bool":
        return x.differs(Const(0, x.dtype))
    if x.dtype == "bool":
        return Select(x, Const(1, target), Const(0, target))
    return Cast(target, x)


def stored(x: Expr, storage: str) -> Expr:
    """``x`` in the arithmetic type of its storage type."""
    return cast(x, compute_type(storage))


def accumulator(dtype: str) -> str:
    """The type of the accumulator of a reduction of ``dtype``."""
    return "int32" if dtype == "bool" else dtype


def term(x: Expr, dtype: str) -> Expr:
    """``x`` as a term of a reduction of ``dtype``."""
    return cast(x, accumulator(dtype) if x.dtype == "bool" else dtype)


def identity(op: str, dtype: str) -> Const:
    """The neutral element of a reduction."""
    of = accumulator(dtype)
    if op in ("sum", "prod"):
        return Const(int(op == "prod"), of)
    if of == "float32":
        return Const(-math.inf if op == "max" else math.inf, of)
    bits = 31 if of == "int32" else 63
    return Const(-(2**bits) if op == "max" else 2**bits - 1, of)


def combine(op: str, dtype: str, a: Expr, b: Expr) -> Expr:
    """One step of a reduction."""
    of = accumulator(dtype)
    return Op(COMBINE[op], (a, b), of, of)


def tree(op: str, dtype: str, terms: Sequence[Expr]) -> Expr:
    """A reduction of several terms as a balanced tree, which shortens the dependency chain."""
    level = list(terms)
    while len(level) > 1:
        pairs = [combine(op, dtype, level[k], level[k + 1]) for k in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def _of_floats(name: str) -> Callable[..., Expr]:
    return lambda *args: Op(name, args, "float32", "float32")


exp, maximum, minimum, reciprocal = map(_of_floats, ("exp", "maximum", "minimum", "reciprocal"))


def finite(x: Expr) -> Expr:
    """The number to subtract for a maximum ``x``: 0 for an infinite one, which minus itself would be NaN."""
    return Select(Op("isinf", (x,), "float32", "bool"), ZERO, x)


def moved(total: Expr, peak: Expr, shift: Expr) -> Expr:
    """A sum of exponentials with ``shift`` subtracted instead of ``peak``."""
    return total * exp(peak - shift)


class Reducer:
    """The state of a reduction in one thread."""

    state: ClassVar[tuple[str, ...]]
    """The names of its variables."""

    @property
    def fields(self) -> tuple[Var, ...]:
        """The variables of the state."""
        return tuple(getattr(self, name) for name in self.state)

    @property
    def identity(self) -> tuple[Const, ...]:
        """The first value of each field."""
        raise NotImplementedError

    def begin(self) -> list[Stmt]:
        return [Assign(f, x) for f, x in zip(self.fields, self.identity, strict=True)]

    def merge(self, other: Sequence[Expr]) -> list[Stmt]:
        """Merge the fields of another thread, for other elements of the same row."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plain(Reducer):
    """A sum, product, maximum or minimum of type ``dtype``."""

    state = ("carried",)
    op: str
    dtype: str
    carried: Var
    result: Var

    @property
    def identity(self) -> tuple[Const, ...]:
        return (identity(self.op, self.dtype),)

    def update(self, lanes: Sequence[Expr]) -> list[Stmt]:
        """Update with the elements of one pack."""
        return self.merge([tree(self.op, self.dtype, [term(x, self.dtype) for x in lanes])])

    def merge(self, other: Sequence[Expr]) -> list[Stmt]:
        return [Assign(self.carried, combine(self.op, self.dtype, self.carried, other[0]))]

    def finish(self) -> Assign:
        return Assign(self.result, self.carried.differs(0) if self.dtype == "bool" else self.carried)


@dataclass(frozen=True)
class OnlineSoftmax(Reducer):
    """A running maximum and the sum of exponentials of the differences from it.

    The difference is computed before the exponential. So the scale is exactly 1 while the maximum does not change,
    thousands of steps do not drift, and large scores cause no cancellation.
    """

    state = ("peak", "total")
    peak: Var
    total: Var

    @property
    def identity(self) -> tuple[Const, ...]:
        return (LOWEST, ZERO)

    def update(self, lanes: Sequence[Expr]) -> list[Stmt]:
        """Update with the scores of one pack."""
        name = self.peak.name
        peak, shift, scale = (Var(f"{x}{name}", "float32") for x in ("m", "s", "r"))
        terms = [exp(x - shift) for x in lanes]
        return [
            Assign(peak, maximum(self.peak, tree("max", "float32", lanes))),
            Assign(shift, finite(peak)),
            Assign(scale, Select(self.peak.equals(peak), ONE, exp(self.peak - shift))),
            Assign(self.total, self.total * scale + tree("sum", "float32", terms)),
            Assign(self.peak, peak),
        ]

    def take_one(self, score: Expr) -> list[Stmt]:
        """Update with one score by one exponential: the scale of the sum if the maximum changes, else the term.

        :meth:`settle` corrects a sum whose maximum is infinite.
        """
        low, high, term = (Var(x, "float32") for x in ("lo", "hi", "te"))
        return [
            Assign(low, minimum(self.peak, score)),
            Assign(high, maximum(self.peak, score)),
            Assign(term, Select(low.equals(LOWEST), ZERO, exp(low - high))),
            Assign(self.total, Select(score > self.peak, self.total * term + ONE, self.total + term)),
            Assign(self.peak, high),
        ]

    def take_group(self, scores: Sequence[Expr]) -> list[Stmt]:
        """Update with several scores, in sequence to save registers: an exponential each, and one for the scale."""
        high, shift = Var("hi", "float32"), Var("sm", "float32")
        return [
            Assign(high, self.peak),
            *(Assign(high, maximum(high, x)) for x in scores),
            Assign(shift, finite(high)),
            Assign(self.total, moved(self.total, self.peak, shift)),
            *(Assign(self.total, self.total + exp(x - shift)) for x in scores),
            Assign(self.peak, high),
        ]

    def settle(self) -> Assign:
        """Make the sum infinite if the maximum is infinite."""
        infinite = Const(float("inf"), "float32")
        return Assign(self.total, Select(self.peak.equals(infinite), infinite, self.total))

    def merge(self, other: Sequence[Expr]) -> list[Stmt]:
        peak, shift = Var("mm", "float32"), Var("sm", "float32")

        def scale(x: Expr) -> Expr:
            return Select(x.equals(peak), ONE, exp(x - shift))

        return [
            Assign(peak, maximum(self.peak, other[0])),
            Assign(shift, finite(peak)),
            Assign(self.total, self.total * scale(self.peak) + other[1] * scale(other[0])),
            Assign(self.peak, peak),
        ]

    def rescaled(self, result: Var, peak: Expr, shift: Expr) -> list[Stmt]:
        """The sum of ``exp(score - shift)`` for its users, from the sum with ``peak`` subtracted."""
        carried = Var("sh", "float32")
        return [Assign(carried, finite(peak)), Assign(result, moved(self.total, carried, shift))]


@dataclass(frozen=True)
class MeanAndSquares(Reducer):
    """The sum of a thread's elements and the sum of their squared deviations from the thread's mean.

    Two such pairs merge without loss (Chan, Golub and LeVeque, 1979). If both sides have ``n`` elements, that is

        square = square_a + square_b + (total_a - total_b)^2 / (2 n)

    Attributes:
        results: the variables of their values, the sum first.
        sides: elements of each side of a merge: one number if both have as many, else an expression for each.
    """

    state = ("total", "square")
    total: Var
    square: Var
    results: tuple[Var, Var]
    sides: float | tuple[Expr, Expr] = 1.0

    @property
    def identity(self) -> tuple[Const, ...]:
        return (ZERO, ZERO)

    def update(self, lanes: Sequence[Expr], before: Expr, weight: Expr) -> list[Stmt]:
        """Update with the elements of one pack.

        Args:
            before: the inverse of the number of elements before the pack; 0 if none.
            weight: the weight of the difference of means.
        """
        name, count = self.total.name, len(lanes)
        total, mean, distance = (Var(f"p{name}_{x}", "float32") for x in ("s", "m", "d"))
        offsets = [Var(f"p{name}_{lane}", "float32") for lane in range(count)]
        out: list[Stmt] = [Assign(total, tree("sum", "float32", lanes))]
        out.append(Assign(mean, total * Const(1 / count, "float32")))
        if count > 1:
            out += [Assign(offset, x - mean) for offset, x in zip(offsets, lanes, strict=True)]
            out.append(Assign(self.square, self.square + tree("sum", "float32", [x * x for x in offsets])))
        return [
            *out,
            Assign(distance, mean - self.total * before),
            Assign(self.square, self.square + distance * distance * weight),
            Assign(self.total, self.total + total),
        ]

    def merge(self, other: Sequence[Expr]) -> list[Stmt]:
        distance = Var("dm", "float32")
        if isinstance(self.sides, float):
            apart = self.total - other[0]
            weight: Expr = Const(1 / (2 * self.sides), "float32")
        else:
            a, b = self.sides
            own, others = (
                total * Select(n > ZERO, reciprocal(n), ZERO) for total, n in ((self.total, a), (other[0], b))
            )
            apart, weight = own - others, a * b * reciprocal(maximum(a + b, ONE))
        return [
            Assign(distance, apart),
            Assign(self.square, self.square + other[1] + distance * distance * weight),
            Assign(self.total, self.total + other[0]),
        ]

    def finish(self, one_by_one: bool) -> list[Stmt]:
        """The row's results; the squared deviations are NaN if an element is infinite.

        In a pack of several elements, an infinity minus the pack's mean gives NaN. With elements ``one_by_one``, the
        squared deviations become infinite, like the sum.
        """
        squares = self.square + self.total * ZERO if one_by_one else self.square
        return [Assign(self.results[0], self.total), Assign(self.results[1], squares)]


@dataclass(frozen=True)
class PassReducers:
    """The reductions of one pass over a row, in the order in which a pass returns their fields."""

    plain: dict[int, Plain]
    online: tuple[OnlineSoftmax, ...]
    moments: tuple[MeanAndSquares, ...]

    @property
    def all(self) -> list[Reducer]:
        return [*self.plain.values(), *self.online, *self.moments]

    @property
    def fields(self) -> list[Var]:
        return [f for r in self.all for f in r.fields]


def reducers_of(graph: Graph, pas: Pass) -> PassReducers:
    """The reductions of ``pas``: the accumulator of value ``i`` is ``a<i>``, and its result is ``v<i>``."""

    values = graph.values
    carried = [Var(f"a{i}", accumulator(v.dtype)) for i, v in enumerate(values)]
    result = [Var(f"v{i}", v.dtype) for i, v in enumerate(values)]
    moments = ((carried[m.total], carried[m.square], (result[m.total], result[m.square])) for m in pas.moments)
    return PassReducers(
        {i: Plain(values[i].op, values[i].dtype, carried[i], result[i]) for i in pas.reduce},
        tuple(OnlineSoftmax(carried[o.peak], carried[o.total]) for o in pas.online),
        tuple(MeanAndSquares(*of) for of in moments),
    )
