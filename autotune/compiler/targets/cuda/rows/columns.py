"""Accumulators over the rows in a row-wise kernel: their updates by each row, their reduction and stores by a block.

Each thread holds one accumulator per lane (two for running moments) for every pack of columns it owns, over all rows of
its block. The pass functions take and return them as a tuple ``g<pass>``. At the end the parts of a block's row groups
are merged in shared memory, two at a time, and each block writes one row of partials to scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.lower import ONE, ZERO, reciprocal
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
    conjunction,
    when,
)
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.device import BARRIER, THREAD, Shared
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter, beginning, parts_of
from autotune.compiler.targets.cuda.threads import RowThreads
from autotune.ir.graph import SHORT


@dataclass(frozen=True)
class Unit:
    """The unit of reducing and storing: one accumulator of one pack of columns, or one of a number a row.

    Attributes:
        column: which of the program's accumulators.
        number: of the pass that adds to it.
        pack: of the thread's packs; None for one number a row.
        parts: where it is brought: a variable a lane for each part of the accumulator.
    """

    column: int
    number: int
    pack: int | None
    parts: dict[str, list[Var]]

    @property
    def variables(self) -> list[Var]:
        return [x for lanes in self.parts.values() for x in lanes]


@dataclass(frozen=True)
class Step:
    """A step of the merge of ``groups`` row groups, whose numbers of rows begin at ``first`` in shared memory."""

    groups: int
    first: int

    @property
    def half(self) -> int:
        """Row groups that are left after the step."""
        return -(-self.groups // 2)

    @property
    def pairs(self) -> int:
        """Row groups that merge another one."""
        return self.groups - self.half

    @property
    def end(self) -> int:
        """One after the numbers of rows that are left after the step."""
        return self.first + self.groups + self.half


class Accumulators:
    """The statements around the row loop of one kernel."""

    group_rows = Var("hc", "float32")
    """Rows of each of the block's row groups at each step of their merge, in shared memory."""

    def __init__(self, emitter: CudaEmitter, threads: RowThreads) -> None:
        self.emitter, self.threads, self.columns = emitter, threads, emitter.program.columns
        self.moments = any(c.kind == "moments" for c in self.columns)
        self.first = len(emitter.graph.inputs) + len(emitter.graph.outputs)  # pointer of the first plane
        self.planes: list[int] = []
        at = self.first + self.moments
        for c in self.columns:
            self.planes.append(at)
            at += c.planes
        self.types = {x.dtype for unit in self.units() for x in unit.variables}
        self.span = threads.threads_per_row * (threads.rows_per_block - 1)  # threads of all row groups but the first

    def params(self) -> tuple[str, ...]:
        """Short types of the planes, the counts of rows first where there are moments."""
        counts = [SHORT["float32"]] if self.moments else []
        return (*counts, *(SHORT[c.storage] for c in self.columns for _ in range(c.planes)))

    def begin(self) -> list[Stmt]:
        """Before the row loop."""
        out: list[Stmt] = [Assign(self.emitter.seen, ZERO)] if self.moments else []
        for q, pas in enumerate(self.emitter.program.passes):
            values = self.emitter.beginnings(q)
            if values:
                out += [Assign(self._held(q, pack), Tuple(tuple(values))) for pack in range(self.threads.packs)]
            for n in pas.row_columns:
                out += [Assign(x, beginning(self.columns[n])) for x in self._numbers(n)]
        return out

    def each_row(self) -> list[Stmt]:
        """At the beginning of a row."""
        e = self.emitter
        one = Select(e.ok, ONE, ZERO) if e.ok_needed else ONE
        return [Assign(e.seen, e.seen + one), Assign(e.share, reciprocal(e.seen))] if self.moments else []

    def add_row(self, pas: Pass) -> list[Stmt]:
        """Adds to the accumulators of one number a row, which all threads of the row carry alike."""
        e, out = self.emitter, list[Stmt]()
        for n in pas.row_columns:
            c, carried = self.columns[n], self._numbers(n)
            new = [Var(f"y{old.name[1:]}", old.dtype) for old in carried]
            out += e.take_row(n, lower.term(e.name(c.value, 0), c.dtype), carried, new)
            for old, y in zip(carried, new, strict=True):
                out.append(Assign(old, Select(e.ok, y, old) if e.ok_needed else y))
        return out

    def _held(self, q: int, pack: int) -> Var:
        return Var(f"g{q}_{pack}")

    def _numbers(self, n: int) -> list[Var]:
        return [Var(f"k{n}{part}", lower.accumulator(self.columns[n].dtype)) for part in parts_of(self.columns[n])]

    # ---- after the row loop -----------------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """In the order of the passes."""
        out = []
        for q, pas in enumerate(self.emitter.program.passes):
            for pack in range(self.threads.packs):
                for n in pas.columns:
                    c, lanes = self.columns[n], range(self.emitter.vec)
                    dtype = lower.accumulator(c.dtype)
                    parts = {part: [Var(f"x{n}{part}_{lane}", dtype) for lane in lanes] for part in parts_of(c)}
                    out.append(Unit(n, q, pack, parts))
            for n in pas.row_columns:
                numbers = zip(parts_of(self.columns[n]), self._numbers(n), strict=True)
                out.append(Unit(n, q, None, {part: [x] for part, x in numbers}))
        return out

    def arrays(self) -> list[Stmt]:
        """Shared memory for the parts of row groups."""
        if self.threads.rows_per_block == 1:
            return []
        out: list[Stmt] = []
        for t in sorted(self.types):
            both_parts = 2 if t == "float32" and self.moments else 1
            out.append(Shared(self._array(t), both_parts * self.span * self.emitter.vec, t))
        return out + ([Shared(self.group_rows, self._steps()[-1].end, "float32")] if self.moments else [])

    def _array(self, dtype: str) -> Var:
        return Var(f"h{dtype}", dtype)

    def end(self) -> list[Stmt]:
        """After the row loop."""
        threads, seen, total = self.threads, self.emitter.seen, Var("total", "float32")
        groups = threads.rows_per_block
        out: list[Stmt] = []
        if self.moments and groups > 1:
            out += self._count_rows()
        for unit in self.units():
            out += self._gather(unit) + self._store(unit)
        if self.moments:
            rows = self.group_rows[self._steps()[-1].end - 1] if groups > 1 else seen
            first = conjunction(THREAD.equals(0), threads.first_tile)
            store = Store("float32", "default", Pointer(self.first), Cast("int64", threads.chunk), (total,))
            out += [Assign(total, rows), when(first, [store])]
        return out

    def _gather(self, unit: Unit) -> list[Stmt]:
        out: list[Stmt] = []
        if unit.pack is not None:
            order, held = self.emitter.column_lanes(unit.number), self._held(unit.number, unit.pack)
            for part, lanes in unit.parts.items():
                out += [Assign(x, held[order.index((unit.column, part, n))]) for n, x in enumerate(lanes)]
        return out + (self._reduce(unit) if self.threads.rows_per_block > 1 else [])

    def _steps(self) -> list[Step]:
        """The steps of the merge: the upper half of the row groups leaves its parts for the lower half."""
        steps, groups, first = list[Step](), self.threads.rows_per_block, 0
        while groups > 1:
            steps.append(Step(groups, first))
            first, groups = first + groups, steps[-1].half
        return steps

    def _count_rows(self) -> list[Stmt]:
        """Leave the number of rows of each row group at each step in shared memory."""
        threads, group, rows = self.threads, self.threads.row_group, self.group_rows
        out: list[Stmt] = [when(threads.thread.equals(0), [Assign(rows[group], self.emitter.seen)])]
        for step in self._steps():
            mine, after = rows[group + step.first], rows[group + (step.first + step.groups)]
            added = when(group < step.pairs, [Assign(after, mine + rows[group + (step.first + step.half)])])
            alone = [when(group.equals(step.pairs), [Assign(after, mine)])] if step.pairs < step.half else []
            out += [BARRIER, when(threads.thread.equals(0), [added, *alone])]
        return out

    def _reduce(self, unit: Unit) -> list[Stmt]:
        threads, group = self.threads.threads_per_row, self.threads.row_group
        firsts = {x: n * self.span for n, x in enumerate(unit.variables)}

        def word(x: Var, thread: Expr) -> Item:
            return self._array(x.dtype)[Cast("uint32", thread)]

        out: list[Stmt] = [BARRIER]
        leave = [Assign(word(x, Const(at) + THREAD - threads), x) for x, at in firsts.items()]
        for step in self._steps():
            others = {x: word(x, THREAD + (at + (step.half - 1) * threads)) for x, at in firsts.items()}
            upper = conjunction(group >= step.half, group < step.groups)
            out += [when(upper, leave), BARRIER, when(group < step.pairs, self._merge(unit, others, step))]
        return out

    def _merge(self, unit: Unit, others: Mapping[Var, Expr], step: Step) -> list[Stmt]:
        """Merge the accumulators of another row group, ``others[x]`` for each variable.

        Means and squared deviations go by Chan, Golub and LeVeque.
        """
        c, parts, group, rows = self.columns[unit.column], unit.parts, self.threads.row_group, self.group_rows
        if c.kind != "moments":
            return [Assign(x, lower.combine(c.kind, c.dtype, x, others[x])) for x in parts[""]]
        own, theirs, together, weight, apart = (Var(name, "float32") for name in ("na", "nb", "nt", "wb", "dm"))
        out: list[Stmt] = [
            Assign(own, rows[group + step.first]),
            Assign(theirs, rows[group + (step.first + step.half)]),
        ]
        out += [Assign(together, own + theirs), Assign(weight, Select(together > ZERO, theirs / together, ZERO))]
        for mean, square in zip(parts["m"], parts["s"], strict=True):
            out += [
                Assign(apart, others[mean] - mean),
                Assign(square, square + others[square] + apart * apart * own * weight),
                Assign(mean, mean + apart * weight),
            ]
        return out

    def _store(self, unit: Unit) -> list[Stmt]:
        threads, column = self.threads, Var("cp")
        if unit.pack is None:
            return [
                when(
                    conjunction(THREAD.equals(0), threads.first_tile), self._stores(unit, Cast("int64", threads.chunk))
                )
            ]
        here: Expr = column < threads.columns
        if threads.rows_per_block > 1:
            here = conjunction(threads.row_group.equals(0), here)
        at = Cast("int64", threads.chunk) * threads.columns + column
        first = threads.number(threads.own_column(unit.pack) + threads.first_column)
        return [Assign(column, first), when(here, self._stores(unit, at))]

    def _stores(self, unit: Unit, at: Expr) -> list[Stmt]:
        storage, first = self.columns[unit.column].storage, self.planes[unit.column]
        return [
            Store(storage, "default", Pointer(first + plane), at, tuple(lanes))
            for plane, lanes in enumerate(unit.parts.values())
        ]
