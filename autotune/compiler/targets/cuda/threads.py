"""Thread layouts of all schemes, and reductions across threads.

The threads of a block form lines of adjacent threads (:class:`ThreadGrid`). Threads with partial results of the same
reductions are a :class:`ThreadGroup`: with ``rows`` those of a line, with ``outer`` those at one index of every line.
:class:`RowThreads` and :class:`StripThreads` define the variables for a thread's indices.

:class:`Reductions` combine the partial results of a group. Each warp writes its part to the block's shared memory;
after one barrier, threads combine all parts. In a cluster, all threads of a block hold its part, and some of them write
it to each block (distributed shared memory). After a cluster barrier every thread combines all parts in the order of
the blocks, so that all get the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Intrinsic, Operand, Select, Stmt, Var, expr, loop
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.targets.cuda.device import (
    BARRIER,
    BLOCK,
    BLOCKS,
    CLUSTER_ARRIVE,
    CLUSTER_BARRIER,
    CLUSTER_RANK,
    CLUSTER_WAIT,
    THREAD,
    Counts,
    Shared,
)
from autotune.compiler.targets.cuda.source import CudaSchedule

WARP = 32
Carried = TypeVar("Carried")
"""Partial results of one pass in a thread."""
quotient = Counts().quotient
"""Of numbers of threads and blocks, which take 32 bits."""


def int_var(name: str) -> Var:
    return Var(name, "int32")


@dataclass(frozen=True)
class ThreadGrid:
    """The threads of a block in lines of ``across`` adjacent threads; ``line`` and ``lane`` are the variables for a
    thread's line and its index in the line."""

    across: int
    line: Var
    lane: Var

    @property
    def offset(self) -> Expr:
        return THREAD - self.line * self.across

    def indices(self) -> list[Stmt]:
        return [Assign(self.line, quotient(THREAD, self.across)), Assign(self.lane, Cast("int32", self.offset))]


@dataclass(frozen=True)
class ThreadGroup:
    """Threads with partial results of the same reductions: ``size`` threads of a block, every ``stride``-th one, in
    ``cluster`` blocks."""

    size: int
    stride: int = 1
    cluster: int = 1

    @property
    def within(self) -> int:
        """Threads of the group in one warp."""
        return max(1, min(self.size, WARP // self.stride))

    @property
    def parts(self) -> int:
        """Partial results that a block has once its warps have shuffled."""
        return self.size // self.within

    @property
    def distances(self) -> list[int]:
        """Distances between the lanes that shuffles combine, one after the other."""
        return [n for n in (16, 8, 4, 2, 1) if self.stride <= n < self.stride * self.size]


def each_unit(
    unit: Var, stop: Expr, work: Iterable[Stmt], persistent: bool, first: Expr = BLOCK, cluster: int = 1
) -> list[Stmt]:
    """``work`` for the unit of a block, or of a cluster; with a ``persistent`` grid for one after the other."""
    if persistent:
        return [loop(unit, stop, work, first, BLOCKS)]
    return [Assign(unit, quotient(first, cluster) if cluster > 1 else first), *work]


class RowThreads:
    """The division of rows among threads and blocks, and the variables for their indices in kernels.

    Attributes:
        columns: the number of columns.
        vec: elements of a pack.
        threads_per_row: threads of one block per row.
        rows_per_block: rows that a block works on at a time.
        cluster: blocks that share a row.
        packs: the number of a thread's packs, the last of which may be outside the row.
        full: the number of packs that every thread has.
        tiles: adjacent blocks along a row.
        count: the width of counters of rows and columns.
        unrolled: True if the packs of a thread are straight-line code with separate variables, so that kept values stay
            in registers; else a pass may walk them in a loop.
        apart: True if a thread's packs are a constant number of bytes apart, so that a tensor's packs have one address.
            The compiler infers that through 64-bit columns, if the first one is hidden from it.
    """

    row_group = int_var("rb")
    """The index of the thread's row in the block."""
    thread, row_thread = int_var("t"), int_var("tg")
    """Number of the thread among those of its row in the block, and in all blocks that share the row."""
    lane, warp, rank = int_var("lane"), int_var("warp"), int_var("rank")
    """Number of the thread in its warp, of the warp in its row group, of the block in its cluster."""
    part, has_part = int_var("part"), Var("mine", "bool")
    """The warp whose part a lane reads, and True if that warp exists."""
    first_column, first_own = Var("c0"), Var("tv", "int64")
    """The first column of the block's tile, and of the thread."""
    row_set, rows, row_sets = Var("group"), Var("rows"), Var("sets")
    """The current set of rows, the number of rows, and the number of sets."""
    tile, chunk = int_var("tile"), int_var("chunk")
    """The tile of columns, and the block's number among those of its tile."""
    batch, own_first = int_var("batch"), Var("first")
    """The batch of rows of the block, and its first set of rows, if there are several batches."""

    def __init__(self, program: Program, schedule: CudaSchedule, vec: int, count: Counts) -> None:
        accumulates, in_registers = bool(program.columns), schedule.keep == "registers"
        self.columns, self.vec, self.count, self.cluster = program.n_cols, vec, count, schedule.cluster
        self.batches, self.batch_sets = program.batches, program.n_rows // program.batches // schedule.rows_per_block
        self.threads_per_row, self.rows_per_block = schedule.threads_per_row, schedule.rows_per_block
        per_step = self.row_threads * vec
        self.packs, self.full, self.tiles = -(-self.columns // per_step), self.columns // per_step, 1
        if accumulates and program.pointwise:
            # Nothing is reduced along the row, so a block may have a part of it: ``unroll`` packs per thread.
            self.packs = min(self.packs, schedule.unroll)
            self.tiles = -(-self.columns // (per_step * self.packs))
            self.full = self.packs if self.columns % (per_step * self.packs) == 0 else 0
        self.unrolled = in_registers or accumulates
        self.apart = len(program.cols) == 1 and self.packs > 1 and in_registers and not accumulates

    @property
    def group(self) -> ThreadGroup:
        return ThreadGroup(self.threads_per_row, 1, self.cluster)

    @property
    def row_threads(self) -> int:
        """Threads of a row in all blocks that share it."""
        return self.threads_per_row * self.cluster

    @property
    def warps(self) -> int:
        """Of one block, for each of its rows."""
        return self.group.parts

    @property
    def whole_warps(self) -> int:
        """``warps``, or the next power of two."""
        return power_of_two(self.warps)

    def indices(self) -> list[Stmt]:
        """A thread's numbers, but for those of rows and tiles."""
        if self.rows_per_block > 1:
            out = ThreadGrid(self.threads_per_row, self.row_group, self.thread).indices()
        else:
            out = [Assign(self.row_group, Const(0, "int32")), Assign(self.thread, THREAD)]
        own: Expr = self.thread
        if self.cluster > 1:
            out += [CLUSTER_ARRIVE, Assign(self.rank, CLUSTER_RANK)]
            own = Cast("int32", self.rank * self.threads_per_row + self.thread)
        out.append(Assign(self.row_thread, own))
        out += [Assign(self.lane, Cast("int32", THREAD & 31)), Assign(self.warp, Cast("int32", self.thread >> 5))]
        if self.apart:
            first = Intrinsic("pin", (Cast("int32", self.row_thread * self.vec),), "int32")
            out.append(Assign(self.first_own, Cast("int64", first)))
        if self.warps > 1:  # lanes that hold no warp's part read the first one's and ignore it
            out.append(Assign(self.part, Cast("int32", self.lane & self.whole_warps - 1)))
            out.append(Assign(self.has_part, self.part < self.warps))
            out.append(Assign(self.part, Select(self.has_part, self.part, Const(0, "int32"))))
        return out

    def tile_indices(self, step: Var) -> list[Stmt]:
        """The block's tile of columns and its row sets; ``step`` is the distance from one set to the next.

        With several batches, each has as many blocks, and ``row_sets`` becomes the end of the block's batch.
        """
        parts = self.tiles * self.batches
        out: list[Stmt] = [
            Assign(self.chunk, quotient(BLOCK, self.tiles) if self.tiles > 1 else BLOCK),
            Assign(self.tile, Cast("int32", BLOCK - self.chunk * self.tiles)),
            Assign(self.first_column, self.number(self.tile * (self.row_threads * self.vec * self.packs))),
            Assign(step, quotient(BLOCKS, parts) if parts > 1 else BLOCKS),
        ]
        if self.batches == 1:
            return out
        begin = self.batch * self.batch_sets
        return [
            *out,
            Assign(self.batch, Intrinsic("udiv", (self.chunk, step), "int32")),
            Assign(self.own_first, self.number(begin + self.chunk - self.batch * step)),
            Assign(self.row_sets, self.number(begin + self.batch_sets)),
        ]

    @property
    def first_set(self) -> Var:
        """The block's first set of rows."""
        return self.chunk if self.batches == 1 else self.own_first

    @property
    def column_type(self) -> str:
        return "int64" if self.apart else self.count.type

    def number(self, x: Operand) -> Expr:
        """``x`` as a number of rows or columns."""
        return Cast(self.count.type, expr(x))

    def column(self, pack: Operand) -> Expr:
        """The first column of the thread's pack number ``pack``."""
        if self.apart:
            return self.first_own + pack * self.row_threads * self.vec
        own = self.own_column(pack)
        return self.number(own + self.first_column if self.tiles > 1 else own)

    def own_column(self, pack: Operand) -> Expr:
        """The same, in the block's tile."""
        return (expr(pack) * self.row_threads + self.row_thread) * self.vec

    def clamped(self, column: Expr) -> Expr:
        """``column``, or that of the row's last pack."""
        last = Cast(self.column_type, expr(self.columns - self.vec))
        return Intrinsic("least64" if self.column_type == "int64" else "least", (column, last), self.column_type)

    def row_of(self, row_set: Expr) -> Expr:
        """The row of this thread in a row set; the last row if it is beyond the end."""
        if self.rows_per_block == 1:
            return self.number(row_set)
        row = self.number(row_set * self.rows_per_block + self.row_group)
        return Select(row < self.rows, row, self.number(self.rows - 1))

    @property
    def first_tile(self) -> Expr:
        """True if this block has the first columns of its rows."""
        return self.tile.equals(0) if self.tiles > 1 else Const(True, "bool")


@dataclass(frozen=True)
class StripThreads:
    """The division of strips of the kept axes, and of indices of the reduced axes, among threads and blocks.

    A block has ``across`` threads along the kept axes, each with ``vec`` adjacent elements, and ``down`` along the
    reduced ones, which have ``length`` indices (places).

    Attributes:
        partial: True if a block may have threads beyond the last pack of the kept axes.
    """

    across: int
    down: int
    cluster: int
    vec: int
    length: int
    partial: bool

    line, along, rank = int_var("deep"), int_var("along"), int_var("rank")
    """The thread's index along the reduced axes and along the kept ones (in packs), and that of its block in the
    cluster."""
    part, within = int_var("part"), int_var("within")
    """Number of the warp, or row of warps, along the reduced axes, and the thread's index in it."""
    inside, in_rows = Var("inside", "bool"), Var("in_rows", "bool")
    """True if the current place exists, and True if the thread's pack along the kept axes does."""

    @property
    def group(self) -> ThreadGroup:
        return ThreadGroup(self.down, self.across, self.cluster)

    @property
    def step(self) -> int:
        """Places that all threads take at a time."""
        return self.down * self.cluster

    @property
    def packs(self) -> int:
        """Places of a thread, the last of which may be beyond the last place."""
        return -(-self.length // self.step)

    @property
    def full(self) -> int:
        """Places that every thread has."""
        return self.length // self.step

    @property
    def width(self) -> int:
        """Columns of a strip."""
        return self.across * self.vec

    def indices(self) -> list[Stmt]:
        out = ThreadGrid(self.across, self.line, self.along).indices()
        within = self.group.within
        if within == 1:
            return [*out, Assign(self.part, self.line)]
        rest = Cast("int32", self.line - self.part * within)
        return [*out, Assign(self.part, quotient(self.line, within)), Assign(self.within, rest)]


@dataclass
class SharedArrays:
    """Arrays of shared memory, one for each type, in which reductions allocate elements."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)

    def take(self, dtype: str, elements: int) -> int:
        """The first of so many new elements."""
        first = self.sizes.get(dtype, 0)
        self.sizes[dtype] = first + elements
        return first

    def array(self, dtype: str) -> Var:
        return Var(f"{self.name}{dtype}", dtype)

    def declared(self, second: int = 0) -> list[Stmt]:
        """The declarations of the arrays.

        Args:
            second: element at which a second half begins in each array: after the longest half of any type.
        """
        return [Shared(self.array(t), second + n, t) for t, n in self.sizes.items()]


class Reductions(ABC, Generic[Carried]):
    """The reductions of one kernel across the threads of a group, pass by pass.

    Attributes:
        of_warps: shared memory for the parts of a block.
        of_blocks: shared memory for the parts of a cluster, separate for each reduction, so that no block overwrites a
            part that another one still reads.
    """

    def __init__(self, group: ThreadGroup, of_warps: SharedArrays, of_blocks: SharedArrays) -> None:
        self.group, self.of_warps, self.of_blocks = group, of_warps, of_blocks
        self.begun = False  # the cluster's other blocks have begun

    def reduce(self, carried: Carried) -> tuple[list[Stmt], list[Stmt]]:
        """Reduce over the group, with results in every thread: statements up to the block's barrier, and the rest."""
        before, after = self.in_warp(carried), list[Stmt]()
        if self.group.parts > 1:
            before += [*self.store_parts(carried), BARRIER]
            after += self.collect(carried)
        if self.group.cluster > 1:
            sends, combined = self.in_cluster(carried)
            after += [] if self.begun else [CLUSTER_WAIT]
            after += [sends, CLUSTER_BARRIER, *combined]
            self.begun = True
        return before, after

    @abstractmethod
    def in_warp(self, carried: Carried) -> list[Stmt]:
        """Combine the threads of the group that a warp has."""

    @abstractmethod
    def store_parts(self, carried: Carried) -> list[Stmt]:
        """Store the part of each warp in shared memory."""

    @abstractmethod
    def collect(self, carried: Carried) -> list[Stmt]:
        """Combine all parts of the block in every thread."""

    @abstractmethod
    def in_cluster(self, carried: Carried) -> tuple[Stmt, list[Stmt]]:
        """Writes to every block of the cluster, and statements that combine the parts of all of them."""
