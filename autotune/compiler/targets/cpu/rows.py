"""A CPU kernel that processes its rows one at a time, and the columns of a row in vectorised loops.

A unit of work is a row, or for a pointwise group a tile of one row. Each pass is a loop over the columns. With
``column_tile`` the loop is split into tiles, which bounds the error of long sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from autotune.compiler.kernel.nodes import Assign, Const, Expr, Stmt, Var, loop, sum_of, when
from autotune.compiler.program.program import Pass, Program, stride_of
from autotune.compiler.targets.cpu.builder import (
    FIRST,
    STEP,
    THREADS,
    UNIT,
    UNITS,
    Builder,
    Term,
    axis,
    call,
    index,
    start,
)
from autotune.compiler.targets.cpu.printer import COLUMNS, Choice, Fetch, Increase, Stream, buffer, source
from autotune.compiler.targets.cpu.schedule import STRETCH, CpuSchedule
from autotune.ir.graph import STORAGE_BYTES

_LONG_ROW = 65536  # sums over more columns than this are made of partial sums even where the schedule has no tiles
_PARTIAL = 16384
_POINTWISE_TILE = 4096
_MOST_CUTS = 4  # places where the columns are cut into pieces
_VECTOR, _UNROLLED, _LONG_WALK = 16, 64, 192
"""Columns from which a walk is a loop: those of one vector. Numbers that are no multiple of four vectors stay constant
up to a larger number, since the tail costs more than the loop saves."""
ORIGIN = Const(0)
"""The first column."""
ROW, ROWS, WHOLE = index("r"), index("rows"), index("cols")
"""The current row, the number of rows, and the columns of a row."""
TILE, TILES, AT, END = index("tile"), index("tiles"), index("t"), index("e")
"""Columns of a tile, tiles of a row, and the columns of the current tile."""
MORE = Var("more", "bool")


def distance(first: Expr, last: Expr) -> Expr:
    return last if first == ORIGIN else last - first


class RowBuilder(Builder):
    """Builder of a kernel that processes one row after the other.

    ``factor``: columns of a pointwise group without rows for each step of a dynamic extent.
    """

    def __init__(self, program: Program, schedule: CpuSchedule, factor: int = 1) -> None:
        super().__init__(program, schedule)
        self.factor = factor
        self.flat = program.pointwise and len(program.cols) == 1
        self.tile = schedule.column_tile
        if not self.flat:
            long = any(self.values[i].op == "sum" for i in program.reductions) and self.inner > _LONG_ROW
            if not self.tile and long:
                self.tile = _PARTIAL
            if self.tile >= self.inner:
                self.tile = 0
        self.later = [pas for pas in program.passes if pas.walks][1:]
        self.base: Expr = ORIGIN  # the column that is the first of the buffers of streamed outputs
        for i in program.kept:
            self.scratch.take(f"kept{i}", program.n_cols, self.values[i].dtype)

    @property
    def column(self) -> Var:
        """The index along the innermost column axis."""
        return axis(self.program.cols[-1])

    # ---- units ------------------------------------------------------------------------------------------------------

    def units(self) -> list[Stmt]:
        # At most as many rows at a time as leave work for every thread.
        fair = call("max", 1, (UNITS + THREADS - 1) // THREADS)
        return [
            Assign(ROWS, self.extent_of(self.program.rows)),
            *(self._tiles() if self.flat else [Assign(UNITS, ROWS), self.hide_columns()]),
            Assign(STEP, call("min", self.schedule.row_block, fair)),
        ]

    def hide_columns(self) -> Stmt:
        """Assign ``columns``, the number of columns, so that LLVM can infer a divisor of it but not its value.

        LLVM unrolls a loop over a constant number of columns completely before it considers vectors. A maximum over 32
        becomes a chain of 32 comparisons (2 to 10 times slower). For rows of 512, the loads are reordered so that the
        processor's prefetchers fail (10 to 20%).
        """
        known = min(256, self.inner & -self.inner) or 1
        return Assign(COLUMNS, call("hidden", self.inner // known) * known)

    def _tiles(self) -> list[Stmt]:
        shared = call("max", _POINTWISE_TILE, (WHOLE + THREADS - 1) // THREADS)
        tile: Expr = shared
        if self.tile:
            tile = Const(self.tile)
        elif self.program.rows:
            tile = Choice(ROWS >= THREADS, call("max", 1, WHOLE), shared)
        return [
            Assign(WHOLE, sum_of([(self.extent(self.program.cols[0]), self.factor)])),
            Assign(TILE, tile),
            Assign(TILES, (WHOLE + TILE - 1) // TILE),
            Assign(UNITS, ROWS * TILES),
        ]

    def unit(self) -> list[Stmt]:
        out = [
            Assign(ROW, UNIT // TILES if self.flat and self.program.rows else UNIT),
            *self.next_row(UNIT + 1, call("min", FIRST + STEP, UNITS)),
            *self.split_index(ROW, self.program.rows),
            *self.offsets(),
        ]
        for pas in self.program.passes:
            out += self.row_part(pas)
            if pas.walks and self.flat:
                out.append(Assign(AT, (UNIT % TILES) * TILE))
                out += self.flat_walk(pas, call("min", AT + TILE, WHOLE), None)
            elif pas.walks:
                out += self.walk(pas)
        return out

    def next_row(self, following: Expr, end: Expr) -> list[Stmt]:
        """True if this thread also has the next row; another thread would read it from memory again."""
        return [Assign(MORE, following < end)] if self.ahead else []

    def row_part(self, pas: Pass) -> list[Stmt]:
        """The work of a pass once per row, before its walk."""
        return [
            *(s for i in pas.row_values if self.values[i].op != "const" for s in self.compute(i)),
            *(self.inverse(y) for y in self.divisors(pas.compute) if y not in self.inverses),
            *(self.write(k, index(f"w{k}")) for k in pas.row_stores),
        ]

    def offsets(self) -> list[Stmt]:
        """Assign the start of the row in each input and output."""
        live = {i for pas in self.program.passes for i in (*pas.row_values, *pas.compute)}
        loads = [(i, v) for i, v in ((i, self.values[i]) for i in sorted(live)) if v.op in ("load", "gather")]
        return [
            *(Assign(index(f"o{i}"), self.row_offset(v)) for i, v in loads),
            *(Assign(index(f"w{k}"), self.output_row_offset(k)) for k in range(self.n_outputs)),
        ]

    # ---- walks ------------------------------------------------------------------------------------------------------

    def flat_walk(self, pas: Pass, end: Expr, most: int | None) -> list[Stmt]:
        """The columns of a tile of a pointwise kernel."""
        return self._stretches(pas, AT, end, most, lambda: self.columns(pas, [(self.column, 1)], ()))

    def walk(self, pas: Pass) -> list[Stmt]:
        """The loops of one pass over a row."""
        outer, extents, n = self.program.cols[:-1], self.graph.extents, self.inner
        begin: list[Stmt] = [
            Assign(self.variable(i), start(self.values[i].op, self.values[i].dtype)) for i in pas.reduce
        ]
        looped = n >= _LONG_WALK or (n >= _VECTOR and (n % _UNROLLED == 0 or n < _UNROLLED))
        first, last = (AT, END) if self.tile else (ORIGIN, COLUMNS if looped else Const(n))
        partial = self.float_sums(pas) if self.tile or outer else []
        position: list[Term] = [*([(index("f"), 1)] if outer else []), (self.column, 1)]
        body: list[Stmt] = [
            *(Assign(self.variable(i, "t"), start("sum")) for i in partial),
            *self._stretches(pas, first, last, self.tile or n, lambda: self.columns(pas, position, partial)),
            *(Increase(self.variable(i), self.variable(i, "t")) for i in partial),
        ]
        if self.tile:
            body = [loop(AT, n, [Assign(END, call("min", AT + self.tile, n)), *body], 0, self.tile)]
        if outer:
            body.insert(0, Assign(index("f"), sum_of(self.spans(outer, n))))
        for a in reversed(outer):
            body = [loop(axis(a), extents[a], body)]
        return [*begin, *body]

    def _stretches(
        self, pas: Pass, first: Expr, last: Expr, most: int | None, body: Callable[[], list[Stmt]]
    ) -> list[Stmt]:
        """Loops of ``body`` over the columns from ``first`` to ``last``, at most ``most``.

        Streamed results are copied out after each stretch. The passes after the first prefetch the next row, a share
        before each stretch: a pass that computes much leaves the memory idle, one that stores does not.
        """
        outputs = [k for k in pas.stores if k in self.streams]
        ahead = self.ahead if pas in self.later else ()
        if not outputs and not ahead:
            return self._pieces(pas, first, last, body)
        sizes = {k: STORAGE_BYTES[self.graph.outputs[k].dtype] for k in outputs}
        read = {i: STORAGE_BYTES[self.graph.inputs[self.values[i].slot]] for i in ahead}
        length = STRETCH // max(*sizes.values(), *read.values(), 1)
        # A piece costs a sum the additions across a vector: not cut for the stores' sake while the buffer stays in the
        # second-level cache.
        whole = bool(pas.reduce) and not ahead and most is not None and most <= 16 * length
        cut = most is None or not (most <= length or whole)
        if most is not None and not cut:
            length = most
        stretch, after = index("c"), index("d")
        begin, end = (stretch, after) if cut else (first, last)
        self.base = begin
        for k, size in sizes.items():
            self.scratch.take_bytes(f"stream{k}", length * size)
        count = distance(begin, end)
        out = [*self._ask(pas, ahead, begin, end, count), *self._pieces(pas, begin, end, body)]
        for k in outputs:
            tensor = self.graph.outputs[k]
            at = self._from(begin, (index(f"w{k}"), 1), *self.column_terms(tensor.axes, tensor.strides))
            out.append(Stream(tensor.dtype, k, at, buffer(f"stream{k}"), count))
        self.base = ORIGIN
        if not cut:
            return out
        return [loop(stretch, last, [Assign(after, call("min", stretch + length, last)), *out], first, length)]

    def _ask(self, pas: Pass, loads: Sequence[int], first: Expr, last: Expr, count: Expr) -> list[Stmt]:
        if not loads:
            return []
        out: list[Stmt] = []
        n, before = len(self.later), self.later.index(pas) * self.inner
        if n > 1:
            share = index("s")
            out.append(Assign(share, (Const(before) + first) // n))
            first, count = share, (Const(before) + last) // n - share
        for i in loads:
            v = self.values[i]
            at = self._from(first, (index(f"o{i}"), 1), *self.column_terms(v.axes, v.strides))
            next_row = at + stride_of(v, self.program.rows[-1])
            out.append(Fetch(self.graph.inputs[v.slot], source(v.slot), next_row, count))
        return [when(MORE, out)]

    def _from(self, first: Expr, *terms: Term) -> Expr:
        placed = [(first if t == self.column else t, s) for t, s in terms]
        return sum_of([(t, s) for t, s in placed if t != ORIGIN])

    def _pieces(self, pas: Pass, first: Expr, last: Expr, body: Callable[[], list[Stmt]]) -> list[Stmt]:
        """Loops over the columns from ``first`` to ``last``, in each of which a guarded load is made or is not.

        Concatenations and slices then cost no masks. A few pieces at most; else all columns at once, with masks.
        """
        column = self.program.cols[-1]
        guards = [g for i in pas.compute for g in self.values[i].guards if g[0] == column]
        cuts = sorted({at for _, low, high in guards for at in (low, high) if 0 < at < self.inner})
        if not cuts or len(cuts) > _MOST_CUTS or column == self.program.dynamic:
            return [loop(self.column, last, body(), first)]
        out: list[Stmt] = []
        from_start = first == ORIGIN
        for low, high in pairwise((0, *cuts, self.inner)):
            self.piece = (column, low, high)
            begin = first if low == 0 else Const(low) if from_start else call("max", first, low)
            end = last if high == self.inner else Const(high) if from_start else call("min", last, high)
            out.append(loop(self.column, end, body(), begin))
        self.piece = None
        return out

    def columns(self, pas: Pass, position: Sequence[Term], partial: Collection[int]) -> list[Stmt]:
        """The body of the innermost loop, for the column at a ``position`` of the row."""
        carried = {i: self.variable(i, "t" if i in partial else "v") for i in pas.reduce}
        out = self.element(pas, sum_of(position), carried)
        for k in pas.stores:
            tensor = self.graph.outputs[k]
            if k in self.streams:
                in_stretch = distance(self.base, self.column)
                out.append(buffer(f"stream{k}").store(tensor.dtype, in_stretch, self.stored(k)))
            else:
                terms = self.column_terms(tensor.axes, tensor.strides)
                out.append(self.write(k, sum_of([(index(f"w{k}"), 1), *terms])))
        return out
