"""Prefetched loads and early random masks of a row-wise kernel.

A block that walks row after row loads, reduces, waits for its other threads and stores in sequence, and memory is idle
meanwhile. With ``prefetch`` the first pass's loads of the next row are issued right after those of the current row have
been used, before its reductions (:class:`NextRow`). The loaded words are kept in registers.

All blocks of a small tensor run at the same time, so that no other block hides the latencies of one. A kernel with one
set of rows per block does the following before its first reduction (:class:`LaterPasses`):

* It touches the loads of later passes (mostly weights): it reads a word of each vector, so that the vector's sectors
  are in the L1 at its load. With a cold cache there would else be another wait for memory. ``prefetch`` instructions
  and loads that are merely earlier in the source do not help, because ptxas moves them down again.
* It computes random masks of later passes while the first loads are in flight, and keeps one word per pack: a dropout's
  hash is 12 instructions per element.

The compiler would move both down as well, so the first sum that threads exchange depends on their words (``tied``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

from autotune.compiler.kernel.lower import reducers_of
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Function,
    Intrinsic,
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
        """Loads every pack of a row."""
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


def touched(e: CudaEmitter) -> tuple[list[int], list[int]] | None:
    """Loads of later passes that are not in the first one: numbers of a row, and whole vectors; None without any."""
    walks = [q for q in e.program.passes if q.walks]
    if len(walks) < 2:
        return None
    first, *later = walks

    def plain(i: int) -> bool:
        return e.graph.values[i].op == "load" and not e.graph.values[i].guards

    def source(i: int) -> tuple[int, int]:
        return e.graph.values[i].slot, e.graph.values[i].offset

    known = {source(i) for i in (*first.compute, *first.row_values) if plain(i)}
    numbers = sorted({i for q in later for i in q.row_values if plain(i) and source(i) not in known})
    packs = {i for q in later for i in q.compute if plain(i) and e.access[i].vector and source(i) not in known}
    return (numbers, sorted(packs)) if numbers or packs else None


class LaterPasses:
    """The part of later passes that one kernel does before its first reduction.

    Attributes:
        number: the number of the first pass that walks.
    """

    def __init__(self, emitter: CudaEmitter, threads: RowThreads) -> None:
        self.emitter, self.threads = emitter, threads
        self.number = next(q for q, p in enumerate(emitter.program.passes) if p.walks)
        self.words: list[Expr] = []  # that the first exchanged sum takes up

    def begin(self) -> list[Stmt]:
        """Before the first pass. Packs outside the row read the last one, without a branch."""
        emitter, threads = self.emitter, self.threads
        numbers, packs = touched(emitter) or ([], [])
        out: list[Stmt] = []
        for pack in range(threads.packs if packs else 0):
            at = threads.column(pack)
            out.append(Assign(emitter.column, at if pack < threads.full else threads.clamped(at)))
            out += emitter.column_indices()
            for i in packs:
                out.append(self._touch(i, emitter.access[i].at(emitter.base(i)), threads.vec, pack))
        return out + [self._touch(i, emitter.access[i].base(), 1, 0) for i in numbers]

    def _touch(self, i: int, at: Expr, lanes: int, pack: int) -> Stmt:
        slot, word = self.emitter.graph.values[i].slot, Var(f"t{i}_{pack}")
        self.words.append(word)
        hint = "coherent" if slot in self.emitter.overwritten else "default"
        return Assign(word, Load(self.emitter.storage(i), lanes, hint, Pointer(slot), at, "touch"))

    def end(self, walk: Callable[[int, Pass], list[Stmt]]) -> list[Stmt]:
        """After the first walk: the masks, and the sum that depends on them and on touched words."""
        emitter, program = self.emitter, self.emitter.program
        reducers = reducers_of(emitter.graph, program.passes[self.number])
        sums = [r.total for r in reducers.online] + [r.total for r in reducers.moments]
        sums += [r.carried for r in reducers.plain.values() if r.dtype == "float32"]
        out: list[Stmt] = []
        if program.early:
            q = len(program.passes)
            out += walk(q, program.early)
            items = [emitter.kept_offset(q, i) for i in program.early.kept_out]
            self.words += [emitter.kept(q, str(p))[n] for p in range(self.threads.packs) for n in items]
        if self.words and sums:
            words = Cast("int32", reduce(or_, self.words))
            out.append(Assign(sums[-1], Intrinsic("tied", (sums[-1], words), "float32")))
        return out
