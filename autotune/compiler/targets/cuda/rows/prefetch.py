"""Loading a row ahead in a persistent row-wise kernel.

A block that walks row after row loads, reduces, waits for its other threads and stores in turn, and the memory rests
meanwhile. With ``prefetch`` the first pass's loads of the next row are issued right after those of the present row have
been used, before its reductions are joined, so that they are in flight all the while; they wait as loaded, in
registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.compiler.kernel.nodes import Assign, Const, Expr, Function, Load, Pointer, Return, Stmt, Tuple, Var, when
from autotune.compiler.kernel.rewrite import Rewriter, closed
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.memory.access import COLUMN, ROW
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.shape import GROUP, SETS, Shape
from autotune.errors import Unsupported

MOST_WORDS = 64
"""32-bit registers a thread may hold for what it loads ahead."""


def loads_ahead(e: CudaEmitter) -> tuple[int, ...]:
    """The loads that can be issued a row ahead: those of the first pass."""
    first = next((p for p in e.program.passes if p.walks), None)
    return loads_apart(e, first) if first else ()


def loads_apart(e: CudaEmitter, pas: Pass) -> tuple[int, ...]:
    """The loads of a pass that can be issued before its other work: whole vectors that every row has its own of, under
    guards that hold for all of a vector or for nothing of it."""
    out = []
    for i in pas.compute:
        v = e.graph.values[i]
        if v.op != "load" or i in e.joins.skipped or e.program.domain(i) != "full":
            continue
        if not e.access[i].vector or not e.by_pack(v):
            continue
        if not v.guards or e.access[i].fixed:  # or the same in all rows but for its guard
            out.append(i)
    return tuple(out)


def load_function(e: CudaEmitter, loads: Sequence[int]) -> Function:
    """The raw words of one pack of ``loads``."""
    body = e.column_indices()
    words: list[Expr] = []
    for i in loads:
        v, pointer, chosen = e.source(i)
        at = e.access[i].at(e.base(i))
        load = Load(e.storage(i), e.vec, e.load_hint(i), pointer, at, "words", e.guard(v))
        body += [*chosen, Assign(e.raw(i), load)]
        words += [e.raw(i)[w] for w in range(e.raw_words(i))]
    return closed([*body, Return(tuple(words))])


class Ahead:
    """The loads of one kernel that are issued a row ahead.

    Names of the next row are the present row's with an ``n`` behind.

    Attributes:
        loads: of the first pass that walks; ``number`` is that pass's.
        row_loads: loads of one number a row: a row whose packs are there would wait for them as long as for the packs.
    """

    def __init__(self, emitter: CudaEmitter, shape: Shape) -> None:
        self.emitter, self.shape, program = emitter, shape, emitter.program
        self.loads = loads_ahead(emitter)
        if not self.loads:
            raise Unsupported("no loads to issue ahead")
        self.words = sum(emitter.raw_words(i) for i in self.loads)
        if self.words * shape.packs > MOST_WORDS:
            raise Unsupported(f"{self.words * shape.packs} registers a thread for what is loaded ahead")
        self.number = next(q for q, p in enumerate(program.passes) if p.walks)
        loads = sorted({i for q in program.passes for i in q.row_values if emitter.graph.values[i].op == "load"})
        self.function = load_function(emitter, self.loads)
        self.row_loads = [i for i in loads if emitter.access[i].fixed and not emitter.graph.values[i].guards]

    def take(self) -> list[Stmt]:
        """At the beginning of a row: its numbers, before those of the next one come in their place."""
        return [Assign(self._number(i), self._number(i, "n")) for i in self.row_loads]

    def begin(self, first: Expr) -> list[Stmt]:
        """Before the row loop, which begins with row set ``first``: nothing loaded yet, then the first row."""
        nothing = Tuple((Const(0, "uint32"),) * self.words)
        out: list[Stmt] = [Assign(Var(f"x_{pack}"), nothing) for pack in range(self.shape.packs)]
        out += [Assign(x, Const(0, x.dtype)) for x in (self._number(i, "n") for i in self.row_loads)]
        return [*out, when(first < SETS, self._loads(self.shape.row_of(first)))]

    def next_row(self, step: Expr) -> list[Stmt]:
        """In the row loop, once the present row's loads have been used."""
        return [when(GROUP + step < SETS, self._loads(self.shape.row_of(GROUP + step)))]

    def _number(self, i: int, row: str = "") -> Var:
        return Var(f"v{i}{row}", self.emitter.graph.values[i].dtype)

    def _loads(self, row: Expr) -> list[Stmt]:
        """Loads every pack of a row."""
        emitter, shape = self.emitter, self.shape
        indices = [*emitter.row_indices(), *emitter.bases(self.loads, ())]
        own = {ROW, COLUMN, *(s.defines for s in indices)}
        names = Rewriter(lambda x: Var(f"{x.name}n", x.dtype) if isinstance(x, Var) and x in own else x)
        call = self.function({p.name: names.expression(p) for p in self.function.params})
        column = names.expression(COLUMN)
        out: list[Stmt] = [Assign(Var("rown"), row), *names.body(indices)]
        for pack in range(shape.packs):
            out.append(Assign(Var("cn"), shape.column(pack)))
            load = Assign(Var(f"x_{pack}"), call)
            out.append(when(column < shape.columns, [load]) if pack >= shape.full else load)
        for i in self.row_loads:
            at = names.expression(emitter.access[i].base())
            slot = Pointer(emitter.graph.values[i].slot)
            out.append(Assign(self._number(i, "n"), Load(emitter.storage(i), 1, "default", slot, at)))
        return out
