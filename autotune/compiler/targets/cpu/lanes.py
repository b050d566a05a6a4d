"""A CPU kernel whose innermost loops run over rows.

If a reduction runs over an outer axis (a column sum, a batch norm), adjacent elements belong to different rows. A walk
along one row would touch a cache line for every element. Here a unit of work is a block of ``row_block`` adjacent rows,
the *lanes*. Each column is computed for all lanes at once. A value per row (an accumulator, a mean) is an array over
the lanes in scratch. A few columns are computed together, so that an accumulator is loaded once for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from autotune.compiler.kernel.nodes import Assign, Const, Expr, Stmt, Var, loop, sum_of
from autotune.compiler.program.program import Pass, Program, stride_of
from autotune.compiler.targets.cpu.builder import STEP, THREADS, UNIT, UNITS, Builder, axis, call, index, start
from autotune.compiler.targets.cpu.printer import Fetch, Stream, buffer, source
from autotune.compiler.targets.cpu.schedule import AHEAD, CpuSchedule
from autotune.ir.graph import STORAGE_BYTES

_LEAST = 16  # lanes: a cache line of fp32
_TOGETHER = 4  # columns per pass over the lanes
_PARTIAL = 512  # columns after which partial sums are added up
LANE, LANES, BASE, WIDTH, BLOCKS = map(index, ("j", "lanes", "base", "width", "blocks"))
"""The current lane, the lanes of the block, its first row, the lanes of most blocks, and the blocks of the row axis."""
COLUMN, WHOLE, AT, END = map(index, ("c", "whole", "t", "e"))
"""The current column, the first that is processed singly, and the columns of the current tile."""


def lanes_suit(program: Program) -> bool:
    """True if the innermost row axis is the contiguous one of most full tensors."""
    if program.pointwise or not program.rows or not program.cols:
        return False
    row, col = program.rows[-1], program.cols[-1]
    if program.graph.extents[row] < _LEAST:
        return False
    vote = 0
    for i, v in enumerate(program.graph.values):
        if v.op in ("load", "gather") and program.domain(i) == "full":
            vote += (stride_of(v, row) == 1) - (stride_of(v, col) == 1)
    return vote > 0


class LaneBuilder(Builder):
    """Builder of blocks of adjacent rows."""

    def __init__(self, program: Program, schedule: CpuSchedule) -> None:
        super().__init__(program, schedule, lanes=True)
        self.lanes = max(schedule.row_block, _LEAST)
        self.row, self.column = axis(program.rows[-1]), axis(program.cols[-1])
        for i in program.kept:
            self.scratch.take(f"kept{i}", program.n_cols * self.lanes, self.values[i].dtype)

    # ---- arrays over the lanes --------------------------------------------------------------------------------------

    def fetch(self, x: Var) -> Stmt:
        """Assign a variable from its lane array."""
        return Assign(x, buffer(f"lane_{x.name}").load(x.dtype, LANE))

    def keep(self, x: Var, value: Expr | None = None) -> Stmt:
        """Put a variable, or ``value`` for it, into its lane array."""
        self.scratch.take(f"lane_{x.name}", self.lanes, x.dtype)
        return buffer(f"lane_{x.name}").store(x.dtype, LANE, value or x)

    def _fetch_rows(self, wanted: Iterable[int]) -> list[Stmt]:
        rows = [i for i in sorted(set(wanted)) if self.values[i].op != "const" and self.program.domain(i) == "row"]
        return [self.fetch(self.variable(i)) for i in rows]

    def _over_lanes(self, body: Iterable[Stmt]) -> Stmt:
        return loop(LANE, LANES, [Assign(self.row, BASE + LANE), *body])

    # ---- units ------------------------------------------------------------------------------------------------------

    def units(self) -> list[Stmt]:
        extent = self.extent(self.program.rows[-1])
        outer, share, width = index("outer"), index("share"), WIDTH
        # At most as many lanes as leave work for every thread, in whole cache lines.
        lines = (share + (_LEAST - 1)) // _LEAST * _LEAST
        return [
            Assign(outer, self.extent_of(self.program.rows[:-1])),
            Assign(share, (outer * extent + THREADS - 1) // THREADS),
            Assign(width, call("min", self.lanes, call("max", _LEAST, lines))),
            Assign(BLOCKS, (extent + width - 1) // width),
            Assign(UNITS, outer * BLOCKS),
            Assign(STEP, Const(1)),
        ]

    def unit(self) -> list[Stmt]:
        row = index("r")
        out = [
            Assign(row, UNIT // BLOCKS),
            Assign(BASE, (UNIT % BLOCKS) * WIDTH),
            Assign(LANES, call("min", WIDTH, self.extent(self.program.rows[-1]) - BASE)),
            *self.split_index(row, self.program.rows[:-1]),
        ]
        for pas in self.program.passes:
            out += self._row_values(pas)
            if pas.walks:
                out += self._walk(pas)
        return out

    def _row_values(self, pas: Pass) -> list[Stmt]:
        divisors = self.divisors(pas.compute)
        if not pas.row_values and not pas.row_stores and not divisors:
            return []
        values = self.values
        needed = {a for i in pas.row_values for a in values[i].args} | set(divisors)
        needed |= {self.graph.outputs[k].value for k in pas.row_stores}
        body = self._fetch_rows(needed - set(pas.row_values))
        for i in pas.row_values:
            body += [*self.compute(i), self.keep(self.variable(i))]
        for y in divisors:
            body += [self.inverse(y), self.keep(self.variable(y, "d"))]
        body += [self.write(k, self.output_row_offset(k)) for k in pas.row_stores]
        return [self._over_lanes(body)]

    def compute(self, i: int) -> list[Stmt]:
        """Value ``i``, with the start of its row in memory."""
        v = self.values[i]
        offset = [Assign(index(f"o{i}"), self.row_offset(v))] if v.op in ("load", "gather") else []
        return [*offset, *super().compute(i)]

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _walk(self, pas: Pass) -> list[Stmt]:
        inner = self.inner
        partial = self.float_sums(pas)
        begin: list[Stmt] = []
        for i in pas.reduce:
            begin.append(self.keep(self.variable(i), start(self.values[i].op, self.values[i].dtype)))
            if i in partial:
                begin.append(self.keep(self.variable(i, "t"), start("sum")))
        tile = self.schedule.column_tile or _PARTIAL
        tiled = bool(partial) and inner > tile
        first, last = (AT, END) if tiled else (Const(0), Const(inner))
        walk: list[Stmt] = [Assign(WHOLE, first + (last - first) // _TOGETHER * _TOGETHER)]
        for begins, ends, count in ((first, WHOLE, _TOGETHER), (WHOLE, last, 1)):
            walk.append(loop(COLUMN, ends, self._columns(pas, partial, count), begins, count))
        added: list[Stmt] = []
        for i in partial:
            total, part = self.variable(i), self.variable(i, "t")
            added += [self.fetch(total), self.fetch(part), self.keep(total, total + part)]
            added.append(self.keep(part, start("sum")))
        if added:
            walk.append(loop(LANE, LANES, added))
        if tiled:
            walk = [loop(AT, inner, [Assign(END, call("min", AT + tile, inner)), *walk], 0, tile)]
        for a in reversed(self.program.cols[:-1]):
            walk = [loop(axis(a), self.graph.extents[a], walk)]
        return [loop(LANE, LANES, begin), *walk] if begin else walk

    def _columns(self, pas: Pass, partial: Collection[int], count: int) -> list[Stmt]:
        """``count`` columns from the current one on, over all lanes."""
        ahead = self._fetch_ahead(pas, count)
        values = self.values
        used = {a for i in pas.compute for a in values[i].args} | {values[i].args[0] for i in pas.reduce}
        used |= {self.graph.outputs[k].value for k in pas.stores}
        carried = {i: self.variable(i, "t" if i in partial else "v") for i in pas.reduce}
        body = [
            *self._fetch_rows(used - set(pas.compute)),
            *(self.fetch(self.variable(y, "d")) for y in self.divisors(pas.compute)),
            *(self.fetch(x) for x in carried.values()),
        ]
        for n in range(count):
            body += [Assign(self.column, COLUMN + n if n else COLUMN), *self._element(pas, carried, n)]
        body += [self.keep(x) for x in carried.values()]
        return [*ahead, self._over_lanes(body), *self._copy_out(pas, count)]

    def _fetch_ahead(self, pas: Pass, count: int) -> list[Stmt]:
        """Prefetch columns for the first pass that reads them: the processor's prefetchers do not predict the jumps."""
        first = {i: next(q for q in self.program.passes if i in q.compute) for i in self.ahead}
        loads = [self.values[i] for i, q in first.items() if q is pas]
        out: list[Stmt] = []
        for n in range(count if loads else 0):
            out += [Assign(self.row, BASE), Assign(self.column, COLUMN + (AHEAD + n))]
            for v in loads:
                at = sum_of([(self.row_offset(v), 1), *self.column_terms(v.axes, v.strides)])
                out.append(Fetch(self.graph.inputs[v.slot], source(v.slot), at, LANES))
        return out

    def _copy_out(self, pas: Pass, count: int) -> list[Stmt]:
        """The columns that :meth:`_element` left in buffers, by streaming stores."""
        outputs = [k for k in pas.stores if k in self.streams]
        out: list[Stmt] = []
        for n in range(count if outputs else 0):
            out += [Assign(self.row, BASE), Assign(self.column, COLUMN + n)]
            for k in outputs:
                tensor = self.graph.outputs[k]
                at = sum_of([(self.output_row_offset(k), 1), *self.column_terms(tensor.axes, tensor.strides)])
                left = buffer(f"stream{k}") + n * self.lanes * STORAGE_BYTES[tensor.dtype]
                out.append(Stream(tensor.dtype, k, at, left, LANES))
        return out

    def _element(self, pas: Pass, carried: Mapping[int, Var], n: int) -> list[Stmt]:
        """One column of one lane, ``n`` columns after the current one."""
        kept = index("k")
        out: list[Stmt] = []
        if pas.kept_in or pas.kept_out:
            out.append(Assign(kept, sum_of(self.spans(self.program.cols)) * self.lanes + LANE))
        out += self.element(pas, kept, carried)
        for k in pas.stores:
            tensor = self.graph.outputs[k]
            if k in self.streams:
                self.scratch.take_bytes(f"stream{k}", _TOGETHER * self.lanes * STORAGE_BYTES[tensor.dtype])
                out.append(buffer(f"stream{k}").store(tensor.dtype, LANE + n * self.lanes, self.stored(k)))
                continue
            offset = index(f"w{k}")
            out.append(Assign(offset, self.output_row_offset(k)))
            out.append(self.write(k, sum_of([(offset, 1), *self.column_terms(tensor.axes, tensor.strides)])))
        return out
