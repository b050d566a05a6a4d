"""Joining what several threads carry, where many reductions do so side by side: their exchanges overlap.

Online pairs find their maximum first and then move each sum to it once. That is an exponential a sum, where merging
pair by pair takes two a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.compiler.kernel.nodes import Assign, Expr, Stmt, Var
from autotune.compiler.kernel.reducers import OnlineSoftmax, Plain, finite, maximum, moved


@dataclass(frozen=True)
class Part:
    """What someone else carries: statements to run before it is read, and how each variable of it is read."""

    before: Sequence[Stmt]
    values: Mapping[Var, Expr]


def exchange(
    plain: Sequence[Plain], online: Sequence[OnlineSoftmax], partners: Sequence[Callable[[Expr], Expr]]
) -> list[Stmt]:
    """Joins with one partner after the other; ``partners`` answer how a number of theirs is read."""
    if not partners:
        return []
    best = {o: _named("best", o.peak) for o in online}
    out: list[Stmt] = [Assign(b, o.peak) for o, b in best.items()]
    for partner in partners:
        out += [Assign(_named("other", b), partner(b)) for b in best.values()]
        out += [Assign(b, maximum(b, _named("other", b))) for b in best.values()]
    shift = Var("sm", "float32")
    for o, b in best.items():
        out += [Assign(shift, finite(b)), Assign(o.total, moved(o.total, o.peak, shift)), Assign(o.peak, b)]
    sums = [*plain, *(Plain("sum", "float32", o.total, o.total) for o in online)]
    for partner in partners:
        out += [Assign(_named("other", p.carried), partner(p.carried)) for p in sums]
        out += [s for p in sums for s in p.merge([_named("other", p.carried)])]
    return out


def joined(plain: Sequence[Plain], online: Sequence[OnlineSoftmax], parts: Sequence[Part]) -> list[Stmt]:
    """Sets each variable to what several parts make together."""
    if len(parts) == 1:
        return [*parts[0].before, *(Assign(var, x) for var, x in parts[0].values.items())]
    out: list[Stmt] = []
    for k, part in enumerate(parts if online else ()):
        peaks = [(o.peak, part.values[o.peak]) for o in online]
        out += [*part.before, *(Assign(peak, maximum(peak, x) if k else x) for peak, x in peaks)]
    shift = {o: _named("best", o.peak) for o in online}
    out += [Assign(shift[o], finite(o.peak)) for o in online]
    for k, part in enumerate(parts):
        out += part.before
        out += [Assign(_named("other", p.carried) if k else p.carried, part.values[p.carried]) for p in plain]
        out += [s for p in plain if k for s in p.merge([_named("other", p.carried)])]
        for o in online:
            total = moved(part.values[o.total], part.values[o.peak], shift[o])
            out.append(Assign(o.total, o.total + total if k else total))
    return out


def _named(prefix: str, var: Var) -> Var:
    return Var(f"{prefix}_{var.name}", var.dtype)
