"""Joins of the outer scheme that the threads of a warp share out: each joins one column of its strip.

A thread has ``vec`` columns, and all threads with the same ones would join the same partial results. Where a strip has
no more columns than a warp has threads, each of them takes one column, and the groups that are left over take turns
with the parts. Between, a column's results have the names of the thread's first lane; :meth:`Share.spread` gives each
thread its own columns' again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Stmt, Var
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.device import THREAD, shuffle_from

WARP = 32
ALONG = Var("along", "int32")
"""Place of the thread along the kept axes, in packs."""
LANE, SHARED_ALONG = Var("shared_lane", "int32"), Var("shared_along", "int32")
"""The column that a thread joins: its lane, and the place of its thread along the kept axes."""
_COLUMN, _GROUP = Var("shared_column", "int32"), Var("shared_group", "int32")


quotient = Counts().quotient
"""Of numbers of threads and blocks, which take 32 bits."""


@dataclass(frozen=True)
class Share:
    """How the threads of a warp share out a strip of ``threads`` times ``vec`` columns."""

    threads: int
    vec: int

    @property
    def width(self) -> int:
        """Columns of the strip."""
        return self.threads * self.vec

    def begin(self) -> list[Stmt]:
        """Numbers the thread's column, and its group of threads in the warp."""
        return [
            Assign(_COLUMN, Cast("int32", THREAD & (self.width - 1))),
            Assign(LANE, Cast("int32", _COLUMN & (self.vec - 1))),
            Assign(SHARED_ALONG, quotient(_COLUMN, self.vec)),
            Assign(_GROUP, quotient(Cast("int32", THREAD & (WARP - 1)), self.width)),
        ]

    def turns(self, parts: int) -> tuple[list[Expr], list[int]]:
        """The numbers of the parts that a thread reads, and the shuffles' distances that join what groups read."""
        groups = min(WARP // self.width, parts)
        per_group = parts // groups
        group: Expr = _GROUP if groups == WARP // self.width else _GROUP & (groups - 1)
        numbers: list[Expr] = [group * per_group + k if groups > 1 else Const(k) for k in range(per_group)]
        return numbers, [self.width << n for n in reversed(range(groups.bit_length() - 1))]

    def spread(self, fields: Sequence[Var], heads: Sequence[Var]) -> list[Stmt]:
        """Gives each thread the results of its own columns, for all ``fields`` from those of the first lane."""
        out: list[Stmt] = []
        of_lane = [(head, fields[fields.index(head) + e], e) for head in heads for e in range(self.vec)]
        for head, var, lane in of_lane:
            own = Cast("int32", ALONG * self.vec + lane)
            out.append(Assign(_other(var), shuffle_from(head, own)))
        return out + [Assign(var, _other(var)) for _, var, _ in of_lane]


def _other(var: Var) -> Var:
    return Var(f"own_{var.name}", var.dtype)
