"""Accumulators over the rows, as a thread carries each for one column: how they begin, take a row, and join others.

A sum, product, maximum or minimum is one number. Running moments are a mean "m" and the squared deviations "s" from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import Assign, Const, Expr, Select, Stmt, Var
from autotune.compiler.kernel.reducers import ZERO
from autotune.compiler.program.program import Column

SEEN, SHARE = Var("cnt", "float32"), Var("rn", "float32")
"""Rows that the thread has added, and one over them."""
JOINED, TOGETHER, WEIGHT = Var("na", "float32"), Var("nt", "float32"), Var("wb", "float32")
"""Rows that are joined so far, those with the next part's, and the share of the latter."""
Parts = dict[str, list[Var]]
"""Of each part of an accumulator, a variable a lane."""


def parts_of(c: Column) -> tuple[str, ...]:
    """How the variables of an accumulator's parts are told apart."""
    return ("m", "s") if c.kind == "moments" else ("",)


def beginning(c: Column) -> Const:
    """What each part begins with."""
    return Const(0, "float32") if c.kind == "moments" else lower.identity(c.kind, c.dtype)


def taken(n: int, c: Column, x: Expr, held: Sequence[Expr], new: Sequence[Var]) -> list[Stmt]:
    """Takes ``x`` of one more row into accumulator number ``n``: from the parts ``held`` to the ``new`` ones."""
    if c.kind != "moments":
        return [Assign(new[0], lower.combine(c.kind, c.dtype, held[0], x))]
    (mean, square), away = held, Var(f"d{n}", "float32")
    return [
        Assign(away, x - mean),
        Assign(new[0], mean + away * SHARE),
        Assign(new[1], square + away * (x - new[0])),
    ]


def merged(c: Column, parts: Parts, other: Callable[[Var], Expr], rows: Expr) -> list[Stmt]:
    """Takes other rows' accumulators, ``other(x)`` for each variable, which stand for ``rows`` rows.

    Means and squared deviations go by Chan, Golub and LeVeque; ``JOINED`` counts the rows so far.
    """
    if c.kind != "moments":
        return [Assign(x, lower.combine(c.kind, c.dtype, x, other(x))) for x in parts[""]]
    own, apart = Var("nb", "float32"), Var("dm", "float32")
    out: list[Stmt] = [Assign(own, rows), Assign(TOGETHER, JOINED + own)]
    out.append(Assign(WEIGHT, Select(TOGETHER > ZERO, own / TOGETHER, ZERO)))
    for mean, square in zip(parts["m"], parts["s"], strict=True):
        out += [
            Assign(apart, other(mean) - mean),
            Assign(square, square + other(square) + apart * apart * JOINED * WEIGHT),
            Assign(mean, mean + apart * WEIGHT),
        ]
    return [*out, Assign(JOINED, TOGETHER)]
