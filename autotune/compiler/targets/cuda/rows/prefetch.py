"""Prefetched loads of a row-wise kernel with a persistent grid.

A block that walks row after row loads, reduces, waits for its other threads and stores in sequence, and memory is idle
meanwhile. With ``prefetch`` the first pass's loads of the next row are issued right after those of the current row have
been used, before its reductions (:class:`NextRow`). The loaded words are kept in registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.compiler.kernel.nodes import (
    Assign,
    Const,
    Expr,
    Function,
    Load,
    Pointer,
    Return,
    Stmt,
    Tuple,
    Var,
    when,
)
from autotune.compiler.kernel.rewrite import Rewriter, closed
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.threads import RowThreads
from autotune.errors import Unsupported

MOST_WORDS = 64
"""Most 32-bit registers of a thread for prefetched loads."""


def issuable(e: CudaEmitter, pas: Pass | None = None) -> tuple[int, ...]:
    """The loads of a pass (by default the first that walks) that can be issued before its other work.

    They are whole vectors, different for each row, with guards that hold for all of a vector or for none of it.
    """
    pas = pas or next((p for p in e.program.passes if p.walks), None)
    out = []
    for i in pas.compute if pas else ():
        v = e.graph.values[i]
        if v.op != "load" or i in e.selected.skipped or e.program.domain(i) != "full":
            continue
        if not e.access[i].vector or not e.by_pack(v):
            continue
        if not v.guards or e.access[i].fixed:  # or the same in all rows but for its guard
            out.append(i)
    return tuple(out)


def words_of(e: CudaEmitter, loads: Iterable[int]) -> int:
    """32-bit registers that one raw pack of ``loads`` takes."""
    return sum(map(e.raw_words, loads))


def held(e: CudaEmitter, loads: tuple[int, ...], packs: int) -> tuple[int, ...]:
    """``loads`` if registers can hold ``packs`` packs of them, else none."""
    return loads if words_of(e, loads) * packs <= MOST_WORDS else ()


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


def no_words(e: CudaEmitter, loads: Iterable[int]) -> Tuple:
    """The words of one pack of ``loads`` outside the row."""
    return Tuple((Const(0, "uint32"),) * words_of(e, loads))


class NextRow:
    """The loads of one kernel that are issued a row ahead; variables of the next row have the suffix ``n``.

    Attributes:
        loads: loads of the first pass that walks.
        number: the number of that pass.
        row_loads: loads of one number per row, whose latency is that of a row's packs.
    """

    def __init__(self, emitter: CudaEmitter, threads: RowThreads) -> None:
        self.emitter, self.threads, program = emitter, threads, emitter.program
        self.loads = issuable(emitter)
        if not self.loads:
            raise Unsupported("no loads to issue ahead")
        if not held(emitter, self.loads, threads.packs):
            words = words_of(emitter, self.loads) * threads.packs
            raise Unsupported(f"{words} registers a thread for what is loaded ahead")
        self.number = next(q for q, p in enumerate(program.passes) if p.walks)
        loads = sorted({i for q in program.passes for i in q.row_values if emitter.graph.values[i].op == "load"})
        self.function = load_function(emitter, self.loads)
        self.row_loads = [i for i in loads if emitter.access[i].fixed and not emitter.graph.values[i].guards]

    def take(self) -> list[Stmt]:
        """At the beginning of a row: copy its numbers, before those of the next row replace them."""
        return [Assign(self._number(i), self._number(i, "n")) for i in self.row_loads]

    def begin(self, first: Expr) -> list[Stmt]:
        """Before the row loop, which begins with row set ``first``: nothing loaded yet, then the first row."""
        nothing, threads = no_words(self.emitter, self.loads), self.threads
        out: list[Stmt] = [Assign(Var(f"x_{pack}"), nothing) for pack in range(threads.packs)]
        out += [Assign(x, Const(0, x.dtype)) for x in (self._number(i, "n") for i in self.row_loads)]
        return [*out, when(first < threads.row_sets, self._loads(threads.row_of(first)))]

    def issue(self, step: Expr) -> list[Stmt]:
        """In the row loop, after the last use of the current row's loads."""
        following = self.threads.row_set + step
        return [when(following < self.threads.row_sets, self._loads(self.threads.row_of(following)))]

    def _number(self, i: int, row: str = "") -> Var:
        return Var(f"v{i}{row}", self.emitter.graph.values[i].dtype)

    def _loads(self, row: Expr) -> list[Stmt]:
        emitter, threads = self.emitter, self.threads
        indices = [*emitter.row_indices(), *emitter.bases(self.loads, ())]
        own = {emitter.row, emitter.column, *(s.defines for s in indices)}
        names = Rewriter(lambda x: Var(f"{x.name}n", x.dtype) if isinstance(x, Var) and x in own else x)
        call = self.function({p.name: names.expression(p) for p in self.function.params})
        column = names.expression(emitter.column)
        out: list[Stmt] = [Assign(Var("rown"), row), *names.body(indices)]
        for pack in range(threads.packs):
            out.append(Assign(Var("cn"), threads.column(pack)))
            load = Assign(Var(f"x_{pack}"), call)
            out.append(when(column < threads.columns, [load]) if pack >= threads.full else load)
        for i in self.row_loads:
            at = names.expression(emitter.access[i].base())
            slot = Pointer(emitter.graph.values[i].slot)
            out.append(Assign(self._number(i, "n"), Load(emitter.storage(i), 1, "default", slot, at)))
        return out
