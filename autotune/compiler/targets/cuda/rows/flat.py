"""The flat skeleton: a pointwise program, one pack a thread at a time, ``unroll`` packs in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.compiler.kernel.nodes import (
    Assign,
    Do,
    Expr,
    Function,
    If,
    Intrinsic,
    Stmt,
    Var,
    conjunction,
    loop,
    when,
)
from autotune.compiler.program.program import Program, overwritable
from autotune.compiler.program.vectors import narrowest, open_row
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, EXTENT, THREAD, Counts, ThreadIndex, Units
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.packs import RowOptions
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, overwrite_launch
from autotune.compiler.targets.cuda.threads import each_unit
from autotune.errors import Unsupported


class FlatKernel:
    """The flat kernel of a program.

    Every full block runs without bounds checks, so that all its loads can be in flight at once; the last block checks
    each pack. If the number of elements is open, its first threads process single elements after the last whole pack.

    Each element is read and written by one thread, so that an output may share an input's memory.

    Attributes:
        open_cols: True if the number of columns is open.
        dynamic: True if the number of rows is open.
        row_packs: packs of a row.
        step: packs that a block takes at a time.
        inner: packs for each index of the outermost axis.
    """

    number, total = Var("pack"), Var("total")
    """Number of the current pack, and the total number of packs."""

    def __init__(self, program: Program, schedule: CudaSchedule) -> None:
        schedule.check_block()
        if program.passes[0].row_stores:
            raise Unsupported("an output without a column axis in a flat kernel")
        self.overwrites = overwritable(program.graph)
        options = RowOptions(overwritten=[slot for slot, _ in self.overwrites])
        self.e = e = CudaEmitter(program, schedule, options)
        (self.pas,) = program.passes
        self.function, _ = e.pass_function(0, self.pas)
        self.dynamic, self.open_cols = program.dynamic == 0, open_row(program)
        self.row_packs = program.n_cols // e.vec
        self.step = e.schedule.block * e.schedule.unroll
        self.inner = e.inner_rows() * (1 if self.open_cols else self.row_packs)
        self.count = Counts(self.open_cols or e.count.wide)

    def place(self, number: Expr) -> list[Stmt]:
        """The column and row of a pack by its number."""
        e, count = self.e, self.count
        out: list[Stmt] = [Assign(self.number, number)]
        if self.open_cols:
            out.append(Assign(e.column, self.number * e.vec))
        else:
            in_row: Expr = self.number
            if e.program.rows:
                out.append(Assign(e.row, count.quotient(self.number, self.row_packs)))
                in_row = self.number - e.row * self.row_packs
            out += [Assign(e.column, count.number(in_row * e.vec)), *e.row_indices()]
        return out

    def of_row(self) -> list[Stmt]:
        """Values and offsets of a row."""
        return [*(line for i in self.pas.row_values for line in self.e.row_value(i)), *self.e.bases()]

    def pack(self, number: Expr, done: Function | None = None) -> list[Stmt]:
        """All of a pack; ``done`` is the pass, where it is another than all of it."""
        return [*self.place(number), *self.of_row(), Do((done or self.function)())]

    def packs(self, numbers: Sequence[Expr]) -> list[Stmt]:
        """Packs of which none is beyond the last."""
        e = self.e
        apart = len(numbers) > 1 and (self.overwrites or any(isinstance(s, If) for s in self.function.body))
        loads = e.held(e.issuable(), len(numbers)) if apart else ()
        if not loads:
            return [line for number in numbers for line in self.pack(number)]
        # The compiler keeps loads behind branches, and those of overwritten tensors behind stores: here all come first.
        load, (stored, _) = e.load_function(loads), e.pass_function(0, self.pas, loads)
        words = [Var(f"x_{u}") for u in range(len(numbers))]
        out: list[Stmt] = []
        for number, x in zip(numbers, words, strict=True):
            out += [*self.place(number), *e.bases(loads, ()), Assign(x, load())]
        for number, x in zip(numbers, words, strict=True):
            out += [Assign(e.prefetched, x), *self.pack(number, stored)]
        return out

    def work(self, group: Expr) -> list[Stmt]:
        """One group of packs."""
        e, count, step = self.e, self.count, self.step
        unroll, block = e.schedule.unroll, e.schedule.block
        first, u = Var("first"), Var("u")
        numbers = [count.number(first + k * block) for k in range(unroll)]
        checked = [
            Assign(self.number, count.number(first + u * block)),
            when(self.number < self.total, self.pack(self.number)),
        ]
        full = self.packs(numbers)
        return [
            Assign(first, count.number(group * step + THREAD)),
            when((group + 1) * step <= self.total, full, [loop(u, unroll, checked)]),
        ]

    def source(self) -> CudaSource:
        e, count, step, graph = self.e, self.count, self.step, self.e.program.graph
        per_block = step * (e.vec if self.open_cols else 1)
        units = Units(1 if self.open_cols else self.inner, per_block, self.dynamic)
        packs = EXTENT // e.vec if self.open_cols else units.total(count)
        group, groups = Var("group"), (packs + (step - 1)) // step
        body: list[Stmt] = [Assign(THREAD, ThreadIndex()), Assign(self.total, packs)]
        body += each_unit(group, groups, self.work(group), bool(e.schedule.blocks_per_sm), count.number(BLOCK))
        if self.open_cols and e.vec > 1:
            body += self.rest()
        overwrites = overwrite_launch(self.overwrites, graph)
        return CudaSource.scheduled(
            body, e.params(), e.schedule, count, units, graph.extents[0], e.alignments(), **overwrites
        )

    def rest(self) -> list[Stmt]:
        """The elements after the last whole pack, one by one."""
        e, schedule = self.e, replace(self.e.schedule, vector_bytes=narrowest(self.e.program))
        single = CudaEmitter(e.program, schedule, e.options)
        (pas,) = single.program.passes
        function, _ = single.pass_function(0, pas)
        # Other threads' loads are inside too, should the compiler move them out of a loop over blocks and the branch
        # in it.
        inside = Var("inside", "int64")
        values = [line for i in pas.row_values for line in single.row_value(i)]
        work = [*values, *single.bases(), Do(function({e.column.name: inside}))]
        return [
            Assign(e.column, self.total * e.vec + THREAD),
            Assign(inside, Intrinsic("least64", (e.column, EXTENT - 1), "int64")),
            when(conjunction(BLOCK.equals(BLOCKS - 1), e.column < EXTENT), work),
        ]
