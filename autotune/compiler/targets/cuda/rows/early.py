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

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Intrinsic, Select, Stmt, Var
from autotune.compiler.targets.cuda.names import NAMES
from autotune.compiler.targets.cuda.rows import legacy

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
    from autotune.compiler.targets.cuda.rows.kernel import Rows


def bits_made(word: Var, lanes: Sequence[Expr]) -> Assign:
    """Packs booleans into a word."""
    bits: list[Expr] = [Select(x, Const(1 << e, "int32"), Const(0, "int32")) for e, x in enumerate(lanes)]
    return Assign(word, Intrinsic("pin", (Cast("int32", reduce(or_, bits)),), "int32"))


def bits_taken(lanes: Sequence[Var], word: Expr) -> list[Stmt]:
    """Takes booleans out of a word."""
    bits = [Cast("int32", word & Const(1 << e, "int32")) for e in range(len(lanes))]
    return [Assign(x, bit.differs(Const(0, "int32"))) for x, bit in zip(lanes, bits, strict=True)]


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
    """The lines of one kernel.

    Attributes:
        first: number of the first pass that walks.
    """

    def __init__(self, rows: Rows) -> None:
        self.r, self.e = rows, rows.e
        self.first = next(q for q, p in enumerate(self.e.program.passes) if p.walks)
        self.words: list[str] = []  # that the first exchanged sum takes up

    def begin(self) -> list[str]:
        """Before the first pass. Packs outside the row read the last one's place, without a branch round them."""
        e, r, p = self.e, self.r, self.r.p
        numbers, packs = touched(e) or ([], [])
        out = []
        least = "least64" if r.column_type == "int64" else "least"
        for k in range(r.packs if packs else 0):
            at = r.column(str(k))
            out.append(f"c = {at}" if k < r.full else f"c = {least}({at}, {r.column_type}({p.n_cols - r.vec}))")
            out += legacy.lines(e.column_indices())
            out += [self._touch(i, legacy.text(e.address(e.access[i], e.base(i), 0)), r.vec, str(k)) for i in packs]
        out += [self._touch(i, legacy.text(e.base_terms(e.access[i])), 1, "0") for i in numbers]
        return out

    def _touch(self, i: int, at: str, n: int, k: str) -> str:
        v, name = self.e.graph.values[i], f"t{i}_{k}"
        self.words.append(name)
        return f"{name} = touch_{NAMES[self.e.graph.inputs[v.slot]]}_{n}_d(p{v.slot}, {at})"

    def end(self) -> list[str]:
        """After the first walk: the masks, and the sum that waits for them and for what was touched."""
        p, first = self.r.p, self.r.p.passes[self.first]
        sums = [f"a{o.total}" for o in first.online] + [f"a{m.total}" for m in first.moments]
        sums += [f"a{i}" for i in first.reduce if self.e.graph.values[i].dtype == "float32"]
        out: list[str] = []
        if p.early:
            q = len(p.passes)
            out += self.r.emit_pass(q, p.early)
            places = [self.e.kept_offset(q, i) for i in p.early.kept_out]
            self.words += [f"z{q}_{k}[{at}]" for k in range(self.r.packs) for at in places]
        if self.words and sums:
            out.append(f"{sums[-1]} = tied({sums[-1]}, int32({' | '.join(self.words)}))")
        return out
