"""CPU kernels with reductions over all rows and over each row.

The rows are split into *parts*. A unit of work is one part, or a tile of its columns if no reduction needs a whole row.
It walks its rows as ``rows`` does and adds each to accumulators, one for each column. The accumulators have a separate
stretch of memory for each part, which stays in the cache. A second, small kernel reduces the parts. So the backward of
a layer norm reads its inputs once; separate kernels for rows and for columns read them twice. The number of parts
depends on the schedule and on the number of rows that it was tuned for. Results do not depend on the number of threads,
and other numbers of rows run the same code. ``autotune.compiler.program.columns`` describes the split of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from autotune.compiler.kernel.nodes import Assign, Const, Expr, Intrinsic, Stmt, Var, loop, sum_of, when
from autotune.compiler.program.columns import Split, finish_graph, main_program, split_columns
from autotune.compiler.program.passes import build_program, once_a_row
from autotune.compiler.program.program import Pass, Program
from autotune.compiler.program.rewrites import cut_everything
from autotune.compiler.targets.cpu.builder import STEP, UNIT, UNITS, Term, call, cast, index, start
from autotune.compiler.targets.cpu.printer import Accumulate, Named, plane
from autotune.compiler.targets.cpu.rows import AT, END, ROW, ROWS, TILES, RowBuilder
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph, compute_type

FEWEST_ROWS = 16
"""Rows below which a part would be almost empty."""
_LONGEST = 2048  # most rows that one accumulator sums, which bounds the error of long sums
LONGEST_ELSEWHERE = 16 * _LONGEST
"""The same limit for a number of parts that was chosen for another number of rows."""
_PER_PART = 16  # least rows of a part, so that partial results are small compared to the rows
_TILE = 4096
PART, SHARE = index("part"), Var("share", "float32")
"""The current part, and the inverse of the number of its rows so far."""


@lru_cache(maxsize=512)
def column_split(graph: Graph) -> Split | None:
    """A group split into rows and reductions over all rows; None if it does not have that form."""
    try:
        split = split_columns(cut_everything(graph) or graph)
        program = main_program(split, unit_rows=True)
        build_program(finish_graph(split, 2)[0])
    except Unsupported:
        return None
    if split.kind != "contiguous" or split.main.size(split.rows) < FEWEST_ROWS or program.n_cols < 2:
        return None
    return split


def group_program(graph: Graph, parts: bool) -> Program:
    """The program of a group's only kernel, or with ``parts`` that of the main kernel in parts.

    Its ``dynamic`` is -1 if its kernels are for one number of rows only. Raises Unsupported if the group has no kernel
    of that form.
    """
    split = column_split(graph) if parts else None
    if split is None:
        return build_program(graph)
    program = main_program(split, unit_rows=True)
    return replace(program, dynamic=-1) if split.counts else program


def row_wise(graph: Graph) -> bool:
    """True if the group has a kernel without parts."""
    try:
        once_a_row(build_program(graph))
    except Unsupported:
        return False
    return True


def parts_of(split: Split, schedule: CpuSchedule) -> int:
    """Number of parts of the rows: ``schedule.parts`` per thread, so that a delayed thread takes fewer.

    No part has too many or almost no rows.
    """
    rows = split.main.size(split.rows)
    wanted = max(schedule.threads * max(1, schedule.parts), -(-rows // _LONGEST))
    return max(1, min(wanted, max(schedule.threads, rows // _PER_PART), rows))


def parts_for(graph: Graph, schedule: CpuSchedule) -> int:
    """Number of parts of a group's rows; 0 if its kernel has none."""
    split = column_split(graph) if schedule.parts else None
    return 0 if split is None else parts_of(split, schedule)


def plane_bytes(planes: list[tuple[str, int]]) -> list[int]:
    """The offset of each array in one buffer, in whole cache lines; the last number is the size of all."""
    sizes = ((numel * STORAGE_BYTES[storage] + 63) // 64 * 64 for storage, numel in planes)
    return [*accumulate(sizes, initial=0)]


class ColumnBuilder(RowBuilder):
    """Builder of the kernel that walks the rows, part by part. Parts without rows leave neutral elements."""

    def __init__(self, split: Split, program: Program, schedule: CpuSchedule, parts: int) -> None:
        super().__init__(program, schedule)
        self.split, self.parts = split, parts
        self.planes = [storage for storage, _ in split.planes(parts)]
        self.n_planes = len(self.planes)
        # The first plane of each accumulator.
        self.first = list(accumulate((c.planes for c in program.columns), initial=int(split.counts)))
        if self.flat and not self.tile:
            self.tile = _TILE

    @property
    def tiles(self) -> int:
        return -(-self.inner // self.tile) if self.flat else 1

    @property
    def pieces(self) -> int:
        """Units of work."""
        return self.parts * self.tiles

    def units(self) -> list[Stmt]:
        return [
            Assign(ROWS, self.extent_of(self.program.rows)),
            Assign(TILES, Const(self.tiles)) if self.flat else self.hide_columns(),
            Assign(UNITS, Const(self.pieces)),
            Assign(STEP, Const(1)),
        ]

    def unit(self) -> list[Stmt]:
        low, high = index("low"), index("high")
        out: list[Stmt] = [Assign(PART, UNIT // TILES if self.flat else UNIT)]
        if self.flat:
            out.append(Assign(AT, (UNIT % TILES) * self.tile))
            out.append(Assign(END, call("min", AT + self.tile, self.inner)))
        out += [Assign(low, PART * ROWS // self.parts), Assign(high, (PART + 1) * ROWS // self.parts)]
        if self.split.counts:
            out.append(plane(0).store(self.planes[0], PART, _float(high - low)))
        for n in range(len(self.program.columns)):
            out += self._begin(n)
        row = [*self.next_row(ROW + 1, high), *self.split_index(ROW, self.program.rows), *self.offsets()]
        if self.split.counts:
            row.append(Assign(SHARE, Named("ONE", Const(1, "float32")) / _float(ROW - low + 1)))
        for pas in self.program.passes:
            row += self.row_part(pas)
            one_a_row = [s for n in pas.row_columns for s in self._accumulate(n, _place(n))]
            row += [when(AT.equals(0), one_a_row)] if one_a_row and self.flat else one_a_row
            if pas.walks:
                row += self.flat_walk(pas, END, self.tile) if self.flat else self.walk(pas)
        return [*out, loop(ROW, high, row, low)]

    def _begin(self, n: int) -> list[Stmt]:
        c, j = self.program.columns[n], index("j")
        spans = bool(self.split.spans(c))
        at = _place(n) + j if spans else _place(n)
        kind, own = "sum" if c.kind == "moments" else c.kind, range(self.first[n], self.first[n] + c.planes)
        neutral = [plane(k).store(self.planes[k], at, start(kind, compute_type(self.planes[k]))) for k in own]
        if not spans:
            return [Assign(_place(n), PART), when(AT.equals(0) if self.flat else Const(True), neutral)]
        width = self.split.width
        filled = loop(j, END, neutral, AT) if self.flat else loop(j, width, neutral)
        return [Assign(_place(n), PART * width), filled]

    def columns(self, pas: Pass, position: Sequence[Term], partial: Collection[int]) -> list[Stmt]:
        accumulated = (s for n in pas.columns for s in self._accumulate(n, sum_of([(_place(n), 1), *position])))
        return [*super().columns(pas, position, partial), *accumulated]

    def _accumulate(self, n: int, at: Expr) -> list[Stmt]:
        c, first = self.program.columns[n], self.first[n]
        storage = self.planes[first]
        x = cast(self.value(c.value), compute_type(storage))
        carried = Var(f"a{n}", compute_type(storage))
        fetched = Assign(carried, plane(first).load(storage, at))
        if c.kind != "moments":
            return [fetched, plane(first).store(storage, at, Accumulate(c.kind, carried, x))]
        # Welford: the deviation from the mean so far, and from the mean with this row.
        deviation, squares = Var(f"deviation{n}", "float32"), Var(f"squares{n}", "float32")
        return [
            fetched,
            Assign(deviation, x - carried),
            Assign(carried, carried + deviation * SHARE),
            plane(first).store(storage, at, carried),
            Assign(squares, plane(first + 1).load(self.planes[first + 1], at)),
            plane(first + 1).store(self.planes[first + 1], at, squares + deviation * (x - carried)),
        ]


def _place(n: int) -> Var:
    return index(f"b{n}")


def _float(x: Expr) -> Expr:
    return Intrinsic("np.float32", (x,), "float32")
