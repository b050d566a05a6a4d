"""How values of a region graph are computed in kernels, once for all schemes and targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.compiler.kernel.nodes import Cast, Const, Expr, Op, Select
from autotune.ir.graph import Value, compute_type

COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""The operator that takes one more term into a reduction."""


def pointwise(v: Value, args: Sequence[Expr]) -> Expr:
    """A pointwise value from its arguments, whose ``dtype`` is known."""
    if v.op == "where":
        return Select(*args)
    if v.op == "cast":
        return cast(args[0], v.dtype)
    return Op(v.op, tuple(args), args[0].dtype, v.dtype)


def cast(x: Expr, target: str) -> Expr:
    """``x`` in another arithmetic type; a boolean is 0 or 1 as a number, and a number true where it is not 0."""
    if x.dtype == target:
        return x
    if target == "bool":
        return x.differs(Const(0, x.dtype))
    if x.dtype == "bool":
        return Select(x, Const(1, target), Const(0, target))
    return Cast(target, x)


def stored(x: Expr, storage: str) -> Expr:
    """``x`` in the arithmetic type that its storage takes."""
    return cast(x, compute_type(storage))


def accumulator(dtype: str) -> str:
    """The type that a reduction of ``dtype`` is carried in."""
    return "int32" if dtype == "bool" else dtype


def term(x: Expr, dtype: str) -> Expr:
    """``x`` as a term of a reduction of ``dtype``."""
    return cast(x, accumulator(dtype) if x.dtype == "bool" else dtype)


def identity(op: str, dtype: str) -> Const:
    """The value that a reduction begins with."""
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
    """A reduction of several terms, pair by pair, so that none waits for all others."""
    level = list(terms)
    while len(level) > 1:
        pairs = [combine(op, dtype, level[k], level[k + 1]) for k in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]
