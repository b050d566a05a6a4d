"""Accumulators over the rows in a row-wise kernel: what a row adds to them, how a block joins and stores them.

Each thread holds, for every pack of columns it owns, one accumulator a lane (two for running moments) over all the rows
its block walks; they travel through the pass functions as a tuple ``g<pass>``. The parts of a block's row groups meet
in shared memory at the end, and one row of partials a block goes to scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Item,
    Pointer,
    Select,
    Stmt,
    Store,
    Tuple,
    Var,
    both,
    loop,
    when,
)
from autotune.compiler.kernel.reducers import ONE, ZERO, reciprocal
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.device import BARRIER, THREAD, Shared
from autotune.compiler.targets.cuda.memory.access import OK
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.running import JOINED, SEEN, SHARE, Parts, beginning, merged, parts_of, taken
from autotune.compiler.targets.cuda.rows.shape import BLOCK_THREAD, CHUNK, FIRST_COLUMN, ROW_GROUP, Shape
from autotune.ir.graph import SHORT

TOTAL = Var("total", "float32")
"""Rows that the threads of the block have added."""
COUNTS = Var("hc", "float32")
"""Rows of each of the block's row groups, in shared memory."""
PACK_COLUMN = Var("cp")


@dataclass(frozen=True)
class Unit:
    """What is joined and stored at a time: one accumulator of one pack of columns, or one of a number a row.

    Attributes:
        column: which of the program's accumulators.
        number: of the pass that adds to it.
        pack: of the thread's packs; None for one number a row.
        parts: where it is brought.
    """

    column: int
    number: int
    pack: int | None
    parts: Parts

    @property
    def variables(self) -> list[Var]:
        return [x for lanes in self.parts.values() for x in lanes]


class Accumulators:
    """The statements around the row loop of one kernel."""

    def __init__(self, emitter: CudaEmitter, shape: Shape) -> None:
        self.emitter, self.shape, self.columns = emitter, shape, emitter.program.columns
        self.moments = any(c.kind == "moments" for c in self.columns)
        self.first = len(emitter.graph.inputs) + len(emitter.graph.outputs)  # pointer of the first plane
        self.planes: list[int] = []
        at = self.first + self.moments
        for c in self.columns:
            self.planes.append(at)
            at += c.planes
        self.types = {x.dtype for unit in self.units() for x in unit.variables}
        self.span = shape.threads_per_row * (shape.rows_per_block - 1)  # threads of all row groups but the first

    def params(self) -> tuple[str, ...]:
        """Short types of the planes, the counts of rows first where there are moments."""
        counts = [SHORT["float32"]] if self.moments else []
        return (*counts, *(SHORT[c.storage] for c in self.columns for _ in range(c.planes)))

    def begin(self) -> list[Stmt]:
        """Before the row loop."""
        out: list[Stmt] = [Assign(SEEN, ZERO)] if self.moments else []
        for q, pas in enumerate(self.emitter.program.passes):
            values = self.emitter.beginnings(q)
            if values:
                out += [Assign(self._held(q, pack), Tuple(tuple(values))) for pack in range(self.shape.packs)]
            for n in pas.row_columns:
                out += [Assign(x, beginning(self.columns[n])) for x in self._numbers(n)]
        return out

    def each_row(self) -> list[Stmt]:
        """At the beginning of a row."""
        if not self.moments:
            return []
        one = Select(OK, ONE, ZERO) if self.emitter.ok_needed else ONE
        return [Assign(SEEN, SEEN + one), Assign(SHARE, reciprocal(SEEN))]

    def add_row(self, pas: Pass) -> list[Stmt]:
        """Adds to the accumulators of one number a row, which all threads of the row carry alike."""
        out: list[Stmt] = []
        for n in pas.row_columns:
            c, carried = self.columns[n], self._numbers(n)
            x = lower.term(self.emitter.name(c.value, 0), c.dtype)
            new = [Var(f"y{old.name[1:]}", old.dtype) for old in carried]
            out += taken(n, c, x, carried, new)
            for old, y in zip(carried, new, strict=True):
                out.append(Assign(old, Select(OK, y, old) if self.emitter.ok_needed else y))
        return out

    def _held(self, q: int, pack: int) -> Var:
        return Var(f"g{q}_{pack}")

    def _numbers(self, n: int) -> list[Var]:
        """The variables of an accumulator of one number a row."""
        return [Var(f"k{n}{part}", lower.accumulator(self.columns[n].dtype)) for part in parts_of(self.columns[n])]

    # ---- after the row loop -----------------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """What is joined and stored at a time, in the order of the passes."""
        out = []
        for q, pas in enumerate(self.emitter.program.passes):
            for pack in range(self.shape.packs):
                for n in pas.columns:
                    c, lanes = self.columns[n], range(self.emitter.vec)
                    dtype = lower.accumulator(c.dtype)
                    parts = {part: [Var(f"x{n}{part}_{lane}", dtype) for lane in lanes] for part in parts_of(c)}
                    out.append(Unit(n, q, pack, parts))
            for n in pas.row_columns:
                numbers = zip(parts_of(self.columns[n]), self._numbers(n), strict=True)
                out.append(Unit(n, q, None, {part: [x] for part, x in numbers}))
        return out

    def arrays(self) -> list[Shared]:
        """Shared memory where row groups meet."""
        if self.shape.rows_per_block == 1:
            return []
        out = []
        for t in sorted(self.types):
            both_parts = 2 if t == "float32" and self.moments else 1
            out.append(Shared(self._array(t), both_parts * self.span * self.emitter.vec, t))
        return out + ([Shared(COUNTS, self.shape.rows_per_block, "float32")] if self.moments else [])

    def _array(self, dtype: str) -> Var:
        return Var(f"h{dtype}", dtype)

    def end(self) -> list[Stmt]:
        """After the row loop."""
        groups = self.shape.rows_per_block
        out: list[Stmt] = []
        if self.moments and groups > 1:  # each row group leaves the number of its rows in shared memory
            out.append(when(BLOCK_THREAD.equals(0), [Assign(COUNTS[ROW_GROUP], SEEN)]))
        for unit in self.units():
            out += self._gather(unit) + self._store(unit)
        if self.moments:
            out += [BARRIER] if groups > 1 else []
            out.append(Assign(TOTAL, reduce(add, [COUNTS[group] for group in range(groups)]) if groups > 1 else SEEN))
            first = both(THREAD.equals(0), self.shape.first_tile)
            out.append(when(first, [Store("float32", "default", Pointer(self.first), Cast("int64", CHUNK), (TOTAL,))]))
        return out

    def _gather(self, unit: Unit) -> list[Stmt]:
        """Brings a unit of the block to the threads of row group 0."""
        out: list[Stmt] = []
        if unit.pack is not None:
            order = self.emitter.column_lanes(unit.number)
            for part, lanes in unit.parts.items():
                for lane, x in enumerate(lanes):
                    held = self._held(unit.number, unit.pack)
                    out.append(Assign(x, held[order.index((unit.column, part, lane))]))
        return out + (self._join(unit) if self.shape.rows_per_block > 1 else [])

    def _join(self, unit: Unit) -> list[Stmt]:
        """Brings the parts of a block's row groups together in the threads of group 0."""
        c, threads, group = self.columns[unit.column], self.shape.threads_per_row, Var("j")
        slots = {x: n * self.span for n, x in enumerate(unit.variables)}

        def place(x: Var, thread: Expr) -> Item:
            return self._array(x.dtype)[Cast("uint32", thread)]

        leave = [Assign(place(x, Const(at) + THREAD - threads), x) for x, at in slots.items()]

        def other(x: Var) -> Expr:
            return place(x, Const(slots[x]) + (group - 1) * threads + BLOCK_THREAD)

        first: list[Stmt] = [Assign(JOINED, COUNTS[0])] if c.kind == "moments" else []
        others = loop(group, self.shape.rows_per_block, merged(c, unit.parts, other, COUNTS[group]), start=1)
        return [BARRIER, when(ROW_GROUP > 0, leave), BARRIER, when(ROW_GROUP.equals(0), [*first, others])]

    def _store(self, unit: Unit) -> list[Stmt]:
        """Stores a unit in this block's row of partials."""
        if unit.pack is None:
            return [when(both(THREAD.equals(0), self.shape.first_tile), self._stores(unit, Cast("int64", CHUNK)))]
        shape = self.shape
        here: Expr = PACK_COLUMN < shape.columns
        if shape.rows_per_block > 1:
            here = both(ROW_GROUP.equals(0), here)
        at = Cast("int64", CHUNK) * shape.columns + PACK_COLUMN
        column = shape.number(shape.own_column(unit.pack) + FIRST_COLUMN)
        return [Assign(PACK_COLUMN, column), when(here, self._stores(unit, at))]

    def _stores(self, unit: Unit, at: Expr) -> list[Stmt]:
        storage, first = self.columns[unit.column].storage, self.planes[unit.column]
        return [
            Store(storage, "default", Pointer(first + plane), at, tuple(lanes))
            for plane, lanes in enumerate(unit.parts.values())
        ]
