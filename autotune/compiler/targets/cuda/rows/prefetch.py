"""Loading a row ahead in a persistent row-wise kernel.

A block that walks row after row loads, reduces, waits for its other threads and stores in turn, and the memory rests
meanwhile. With ``prefetch`` the first pass's loads of the next row are issued right after those of the present row have
been used, before its reductions are joined, so that they are in flight all the while; they wait as loaded, in
registers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autotune.compiler.kernel.nodes import Assign, Expr, Function, Load, Pointer, Return
from autotune.compiler.kernel.rewrite import closed
from autotune.compiler.targets.cuda.names import NAMES as SHORT
from autotune.compiler.targets.cuda.names import tuple_of
from autotune.compiler.targets.cuda.operators import literal
from autotune.compiler.targets.cuda.rows import legacy
from autotune.errors import Unsupported

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
    from autotune.compiler.targets.cuda.rows.kernel import Rows

MOST_WORDS = 64
"""32-bit registers a thread may hold for what it loads ahead."""
_NAMES = re.compile(r"\b(row|i\d+|q\d+|b\d+)\b")


def loads_ahead(e: CudaEmitter) -> tuple[int, ...]:
    """The loads that can be issued a row ahead: whole vectors that every row has its own of, under guards that hold for
    all of a vector or for nothing of it."""
    first = next((p for p in e.program.passes if p.walks), None)
    if first is None:
        return ()
    out = []
    for i in first.compute:
        v = e.graph.values[i]
        if v.op != "load" or i in e.joins.skipped or e.program.domain(i) != "full":
            continue
        if not e.access[i].vector or not e.by_pack(v):
            continue
        if not v.guards or e.access[i].rows:  # or the same in all rows but for its guard
            out.append(i)
    return tuple(out)


def load_function(e: CudaEmitter) -> Function:
    """The raw words of one pack of the loads ``e.ahead``."""
    body = e.column_indices()
    words: list[Expr] = []
    for i in e.ahead:
        v, pointer, chosen = e.source(i)
        at = e.address(e.access[i], e.base(i), 0)
        load = Load(e.storage(i), e.vec, e.load_hint(i), pointer, at, "words", e.guard(v))
        body += [*chosen, Assign(e.raw(i), load)]
        words += [e.raw(i)[w] for w in range(e.raw_words(i))]
    return closed([*body, Return(tuple(words))])


class Ahead:
    """The lines of one kernel that load a row ahead. Sets ``rows.e.ahead``, which pass functions look at."""

    def __init__(self, rows: Rows) -> None:
        self.r, self.e = rows, rows.e
        self.e.ahead = loads_ahead(self.e)
        if not self.e.ahead:
            raise Unsupported("no loads to issue ahead")
        self.words = sum(self.e.raw_words(i) for i in self.e.ahead)
        if self.words * rows.packs > MOST_WORDS:
            raise Unsupported(f"{self.words * rows.packs} registers a thread for what is loaded ahead")
        self.pass_number = self.e.ahead_pass = next(q for q, p in enumerate(self.e.program.passes) if p.walks)
        self.row_loads = self._row_loads()

    def _row_loads(self) -> tuple[int, ...]:
        """Loads of one number a row: a row whose packs are there would wait for them as long as for the packs."""
        p = self.e.program
        found = {i for q in p.passes for i in q.row_values if p.graph.values[i].op == "load"}
        return tuple(i for i in sorted(found) if self.e.access[i].rows and not p.graph.values[i].guards)

    def take(self) -> list[str]:
        """At the beginning of a row: its numbers, before those of the next one come in their place."""
        return [f"v{i} = v{i}n" for i in self.row_loads]

    def function(self) -> str:
        return legacy.function(load_function(self.e), "l0")[0]

    def loads(self, row: str) -> list[str]:
        """Lines that load every pack of row number ``row``."""
        e, r = self.e, self.r
        own = e.bases(e.ahead, ())
        lines = [_NAMES.sub(r"\1n", line) for line in legacy.lines([*e.row_indices(), *own])]
        out = [f"rown = {row}", *lines]
        params = load_function(e).params
        args = ", ".join(p.name if isinstance(p, Pointer) else f"{p.name}n" for p in params)
        for k in range(r.packs):
            out.append(f"cn = {r.column(str(k))}")
            if k >= r.full:
                out += [f"if cn < {r.p.n_cols}:", f"    x_{k} = l0({args})"]
            else:
                out.append(f"x_{k} = l0({args})")
        for i in self.row_loads:
            v = e.graph.values[i]
            at = _NAMES.sub(r"\1n", legacy.text(e.base_terms(e.access[i])))
            out.append(f"v{i}n = ld_{SHORT[e.graph.inputs[v.slot]]}_1_d(p{v.slot}, {at})")
        return out

    def begin(self, first: str, sets: str) -> list[str]:
        """Before the row loop: nothing loaded yet, then the first row."""
        out = [f"x_{k} = {tuple_of(['uint32(0)'] * self.words)}" for k in range(self.r.packs)]
        out += [f"v{i}n = {literal(0, self.e.graph.values[i].dtype)}" for i in self.row_loads]
        return [*out, f"if {first} < {sets}:", *("    " + x for x in self.loads(self.r.row_of(first)))]

    def next_row(self, step: str, sets: str) -> list[str]:
        """In the row loop, once the present row's loads have been used."""
        return [f"if group + {step} < {sets}:", *("    " + x for x in self.loads(self.r.row_of(f"(group + {step})")))]
