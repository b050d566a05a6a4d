"""How the threads and blocks of a row-wise kernel share its rows, and what their indices are called."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.compiler.kernel.nodes import Cast, Const, Expr, Intrinsic, Operand, Select, Var, expr
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.source import CudaSchedule


def _int(name: str) -> Var:
    return Var(name, "int32")


ROW_GROUP = _int("rb")
"""Which of the block's rows the thread works on."""
BLOCK_THREAD, ROW_THREAD = _int("t"), _int("tg")
"""Number of the thread among those of its row in the block, and in all blocks that share the row."""
LANE, WARP, RANK = _int("lane"), _int("warp"), _int("rank")
"""Number of the thread in its warp, of the warp in its row group, of the block in its cluster."""
PART, MINE = _int("part"), Var("mine", "bool")
"""The warp whose part a lane reads, and whether there is one for it."""
FIRST_COLUMN, FIRST_OWN = Var("c0"), Var("tv", "int64")
"""The first column of the block's tile, and of the thread."""
GROUP, ROWS, SETS = Var("group"), Var("rows"), Var("sets")
"""The set of rows at hand, how many rows there are, and how many sets."""
TILE, CHUNK = _int("tile"), _int("chunk")
"""The tile of columns, and the block's number among those of its tile."""
CLAMPED = Var("cl")
"""A column that every row has, in place of the first one of a pack outside the row."""


@dataclass(frozen=True)
class Shape:
    """The shape of one kernel.

    Attributes:
        columns: of a row.
        vec: elements of a pack.
        threads_per_row: of one block.
        rows_per_block: rows that a block works on at a time.
        cluster: blocks that share a row.
        packs: that a thread has, the last of which may lie outside the row.
        full: packs that every thread has.
        tiles: blocks side by side along a row.
        count: how rows and columns are counted.
        unrolled: whether the packs of a thread are straight-line code, each with variables of its own, in which what
            passes keep of it stays in registers; else a pass may walk them in a loop.
        apart: whether a thread's packs lie a constant number of bytes apart, which the compiler shall see: it does
            through 64-bit columns, and if the first one is a number it knows nothing of. Then a tensor's packs have one
            address.
    """

    columns: int
    vec: int
    threads_per_row: int
    rows_per_block: int
    cluster: int
    packs: int
    full: int
    tiles: int
    count: Counts
    unrolled: bool
    apart: bool

    @classmethod
    def of(cls, program: Program, schedule: CudaSchedule, vec: int, count: Counts) -> Shape:
        accumulates, in_registers = bool(program.columns), schedule.keep == "registers"
        columns, per_step = program.n_cols, schedule.threads_per_row * schedule.cluster * vec
        packs, full, tiles = -(-columns // per_step), columns // per_step, 1
        if accumulates and program.pointwise:
            # Nothing is reduced along the row, so that a block need not have all of it: unroll packs a thread.
            packs = min(packs, schedule.unroll)
            tiles = -(-columns // (per_step * packs))
            full = packs if columns % (per_step * packs) == 0 else 0
        return cls(
            columns,
            vec,
            schedule.threads_per_row,
            schedule.rows_per_block,
            schedule.cluster,
            packs,
            full,
            tiles,
            count,
            unrolled=in_registers or accumulates,
            apart=len(program.cols) == 1 and packs > 1 and in_registers and not accumulates,
        )

    @property
    def row_threads(self) -> int:
        """Threads of a row in all blocks that share it."""
        return self.threads_per_row * self.cluster

    @property
    def warps(self) -> int:
        """Of one block, for each of its rows."""
        return max(1, self.threads_per_row // 32)

    @property
    def whole_warps(self) -> int:
        """``warps``, or the next power of two."""
        return power_of_two(self.warps)

    @property
    def column_type(self) -> str:
        return "int64" if self.apart else self.count.type

    def number(self, x: Operand) -> Expr:
        """``x`` as a number of rows or columns."""
        return Cast(self.count.type, expr(x))

    def column(self, pack: Operand) -> Expr:
        """The first column of the thread's pack number ``pack``."""
        if self.apart:
            return FIRST_OWN + pack * self.row_threads * self.vec
        own = self.own_column(pack)
        return self.number(own + FIRST_COLUMN if self.tiles > 1 else own)

    def own_column(self, pack: Operand) -> Expr:
        """The same, in the block's tile."""
        return (expr(pack) * self.row_threads + ROW_THREAD) * self.vec

    def clamped(self, column: Expr) -> Expr:
        """``column``, or that of the row's last pack."""
        last = Cast(self.column_type, expr(self.columns - self.vec))
        return Intrinsic("least64" if self.column_type == "int64" else "least", (column, last), self.column_type)

    def row_of(self, group: Expr) -> Expr:
        """The row of this thread in row set ``group``; the last one where there are no more."""
        if self.rows_per_block == 1:
            return self.number(group)
        row = self.number(group * self.rows_per_block + ROW_GROUP)
        return Select(row < ROWS, row, self.number(ROWS - 1))

    @property
    def first_tile(self) -> Expr:
        """Whether this block has the first columns of its rows."""
        return TILE.equals(0) if self.tiles > 1 else Const(True, "bool")
