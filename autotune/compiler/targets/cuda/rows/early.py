"""What a row-wise kernel with one set of rows a block does before its first reduction, for later passes.

All blocks of a small tensor are under way at the same time, so that nothing hides what one of them waits for. With
``prefetch``

* what later passes load (weights, mostly) is touched: a word of each vector is read, so that its sectors are in the L1
  when the vector is. With a cold cache it would else be waited for once more. ``prefetch`` instructions and loads that
  are merely written earlier do not help: ptxas moves them down again;
* random masks that later passes need are computed while the first loads are under way, and wait as one word a pack: a
  dropout's hash is 12 instructions an element.

The compiler would move both down as well, so the first sum that threads exchange takes up their words (``tied``).
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from autotune.compiler.kernel.nodes import Assign, Cast, Expr, Intrinsic, Load, Pointer, Stmt, Var
from autotune.compiler.kernel.reducers import reducers_of
from autotune.compiler.targets.cuda.memory.access import COLUMN
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.shape import Shape
from autotune.compiler.targets.cuda.rows.walk import Walks, kept


def has_early_work(e: CudaEmitter) -> bool:
    """Whether a kernel has anything to do early."""
    return bool(e.masks or touched(e))


def touched(e: CudaEmitter) -> tuple[list[int], list[int]] | None:
    """Loads of later passes that the first one has not: numbers of a row, and whole vectors; None if there are none."""
    walks = [q for q in e.program.passes if q.walks]
    if len(walks) < 2:
        return None
    first, *later = walks

    def plain(i: int) -> bool:
        return e.graph.values[i].op == "load" and not e.graph.values[i].guards

    def place(i: int) -> tuple[int, int]:
        return e.graph.values[i].slot, e.graph.values[i].offset

    known = {place(i) for i in (*first.compute, *first.row_values) if plain(i)}
    numbers = sorted({i for q in later for i in q.row_values if plain(i) and place(i) not in known})
    packs = {i for q in later for i in q.compute if plain(i) and e.access[i].vector and place(i) not in known}
    return (numbers, sorted(packs)) if numbers or packs else None


class Early:
    """What one kernel does early.

    Attributes:
        number: of the first pass that walks.
    """

    def __init__(self, emitter: CudaEmitter, shape: Shape) -> None:
        self.emitter, self.shape = emitter, shape
        self.number = next(q for q, p in enumerate(emitter.program.passes) if p.walks)
        self.words: list[Expr] = []  # that the first exchanged sum takes up

    def begin(self) -> list[Stmt]:
        """Before the first pass. Packs outside the row read the last one's place, without a branch round them."""
        emitter, shape = self.emitter, self.shape
        numbers, packs = touched(emitter) or ([], [])
        out: list[Stmt] = []
        for pack in range(shape.packs if packs else 0):
            at = shape.column(pack)
            out.append(Assign(COLUMN, at if pack < shape.full else shape.clamped(at)))
            out += emitter.column_indices()
            for i in packs:
                out.append(self._touch(i, emitter.access[i].at(emitter.base(i)), shape.vec, pack))
        return out + [self._touch(i, emitter.access[i].base(), 1, 0) for i in numbers]

    def _touch(self, i: int, at: Expr, lanes: int, pack: int) -> Stmt:
        slot, word = self.emitter.graph.values[i].slot, Var(f"t{i}_{pack}")
        self.words.append(word)
        hint = "coherent" if slot in self.emitter.overwritten else "default"
        return Assign(word, Load(self.emitter.storage(i), lanes, hint, Pointer(slot), at, "touch"))

    def end(self, walks: Walks) -> list[Stmt]:
        """After the first walk: the masks, and the sum that waits for them and for what was touched."""
        emitter, program = self.emitter, self.emitter.program
        reducers = reducers_of(emitter.graph, program.passes[self.number])
        sums = [r.total for r in reducers.online] + [r.total for r in reducers.moments]
        sums += [r.carried for r in reducers.plain.values() if r.dtype == "float32"]
        out: list[Stmt] = []
        if program.early:
            q = len(program.passes)
            out += walks.statements(q, program.early)
            places = [emitter.kept_offset(q, i) for i in program.early.kept_out]
            self.words += [kept(q, str(pack))[at] for pack in range(self.shape.packs) for at in places]
        if self.words and sums:
            words = Cast("int32", reduce(or_, self.words))
            out.append(Assign(sums[-1], Intrinsic("tied", (sums[-1], words), "float32")))
        return out
