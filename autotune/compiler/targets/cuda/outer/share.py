"""Joins of the outer scheme that the threads of a warp share out: each joins one column of its strip.

A thread has ``vec`` columns, and all threads with the same ones would join the same partial results. Where a strip has
no more columns than a warp has threads, each of them takes one column, and the groups that are left over take turns
with the parts. Between, a column's results have the names of the thread's first lane; :func:`spread` gives each thread
its own columns' again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.outer.lanes import Field

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.outer.kernel import Outer

WARP = 32


def width(o: Outer) -> int:
    """Columns of a strip."""
    return o.X * o.e.vec


def shares(o: Outer, pas: Pass) -> bool:
    """Whether the joins of a pass are shared out: not where the finish of partials has little to join anyway."""
    values = [*pas.reduce, *(pair.peak for pair in pas.online)]
    whole = all(o.e.lanes(i) == o.e.vec for i in values)
    fits = o.parts > 1 and o.parts & (o.parts - 1) == 0 and o.e.vec > 1 and not o.e.tile
    return whole and fits and (o.C > 1 or bool(pas.online)) and width(o) <= WARP and width(o) * o.C <= o.s.block


def begin(o: Outer) -> list[str]:
    """Lines that number the thread's column: its thread along the kept axis ``cx`` and its lane ``ce`` there; and the
    group of threads ``cg`` of the warp."""
    vec, wide = o.e.vec, width(o)
    return [
        f"cc = int32(tid & {wide - 1})",
        f"ce = int32(cc & {vec - 1})",
        f"cx = udiv(cc, {vec})",
        f"cg = udiv(int32(tid & {WARP - 1}), {wide})",
    ]


def heads(o: Outer, pas: Pass) -> list[Field]:
    """The accumulators of the first lane."""
    return o.e.fields(pas, one=True)


def turns(o: Outer, parts: int) -> tuple[list[str], list[int]]:
    """The parts that a thread reads, as text, and the offsets of shuffles that join what the groups have read."""
    groups = min(WARP // width(o), parts)
    per = parts // groups
    group = "cg" if groups == WARP // width(o) else f"(cg & {groups - 1})"
    numbers = [f"({group} * {per} + {k})" if groups > 1 else str(k) for k in range(per)]
    return numbers, [width(o) << n for n in reversed(range(groups.bit_length() - 1))]


def spread(o: Outer, pas: Pass) -> list[str]:
    """Lines that give each thread the results of its own columns."""
    out, names = [], []
    fields, vec = o.e.fields(pas), o.e.vec
    for head in heads(o, pas):
        at = next(n for n, f in enumerate(fields) if f.name == head.name)
        for e, f in enumerate(fields[at : at + vec]):
            out.append(f"d{f.name} = cuda.shfl_sync(0xffffffff, {head.name}, int32(tx * {vec} + {e}))")
            names.append(f.name)
    return out + [f"{name} = d{name}" for name in names]
