"""The row-wise skeleton: threads share a row, passes walk it, reductions join the threads."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Intrinsic, Select, Stmt, Var, expr, loop
from autotune.compiler.kernel.reducers import reducers_of
from autotune.compiler.program.in_place import overwritable_rows
from autotune.compiler.program.program import Program
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.device import (
    BLOCK,
    BLOCKS,
    CLUSTER_ARRIVE,
    CLUSTER_RANK,
    EXTENT,
    THREAD,
    ThreadIndex,
    check_static,
)
from autotune.compiler.targets.cuda.memory.access import OK, ROW, counts_of, vector_of
from autotune.compiler.targets.cuda.rows.columns import Accumulators
from autotune.compiler.targets.cuda.rows.early import Early
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.joins import Joins
from autotune.compiler.targets.cuda.rows.prefetch import Ahead
from autotune.compiler.targets.cuda.rows.shape import (
    BLOCK_THREAD,
    CHUNK,
    FIRST_COLUMN,
    FIRST_OWN,
    GROUP,
    LANE,
    MINE,
    PART,
    RANK,
    ROW_GROUP,
    ROW_THREAD,
    ROWS,
    SETS,
    TILE,
    WARP,
    Shape,
)
from autotune.compiler.targets.cuda.rows.slots import PARITY
from autotune.compiler.targets.cuda.rows.walk import Walks
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, told
from autotune.errors import Superseded, Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES

MAX_PACK_LANES = 4096
"""packs * elements * values that a thread's straight-line code may hold: beyond it compiling crawls."""

LONG_ROW = 64 << 10
"""Bytes from which a row may be written over: ``ld.global``, which that takes, has no load hints, and passes by the L1,
where a shorter row read twice may still lie. What saves memory is long: a loss's gradient over its logits."""


class Rows:
    """One kernel."""

    def __init__(self, program: Program, schedule: CudaSchedule) -> None:
        self.program, self.schedule = program, schedule
        vec = vector_of(program, schedule)
        self.shape = Shape.of(program, schedule, vec, counts_of(program, vec))
        size = {k: STORAGE_BYTES[o.dtype] * program.n_cols for k, o in enumerate(program.graph.outputs)}
        self.overwrites = tuple(pair for pair in overwritable_rows(program) if size[pair[1]] >= LONG_ROW)
        overwritten = [slot for slot, _ in self.overwrites]
        emitter = CudaEmitter(program, schedule, overwritten=overwritten, wide_columns=self.shape.apart)
        self.emitter = emitter
        self.check()
        self.accumulators = Accumulators(emitter, self.shape) if self.program.columns else None
        self.persistent = self.schedule.blocks_per_sm > 0 or self.accumulators is not None
        self.step: Expr = Var("step") if self.accumulators else BLOCKS  # from one row set of a block to the next
        self.ahead: Ahead | None = None
        self.early: Early | None = None
        if self.schedule.prefetch:
            if not self.accumulators and self.schedule.keep != "registers":
                raise Unsupported("loading ahead is for kernels that keep rows in registers")
            if self.persistent:
                self.ahead = Ahead(emitter, self.shape)
            else:
                self.early = Early(emitter, self.shape)
        self.walks, self.joins = Walks(emitter, self.shape, self.ahead), Joins(self.shape)
        self.done = set(self.ahead.row_loads) if self.ahead else set[int]()  # row values that are there

    def check(self) -> None:
        """Whether the schedule fits the program.

        Raises:
            Unsupported: it does not.
        """
        schedule, shape, accumulates = self.schedule, self.shape, bool(self.program.columns)
        threads = shape.threads_per_row
        if threads % 32 if threads > 32 else threads & (threads - 1):
            raise Unsupported("threads_per_row must be a power of two up to 32 or a multiple of 32")
        if schedule.block > 1024:
            raise Unsupported("more than 1024 threads a block")
        if shape.cluster > 1 and accumulates:
            raise Unsupported("clusters that join sums over the rows, which this autotune lacks")
        if shape.cluster > 1 and (shape.rows_per_block > 1 or schedule.blocks_per_sm):
            raise Unsupported("a cluster works on one row, and not on row after row")
        if shape.cluster > 1 and shape.packs == 1 and threads * shape.vec >= shape.columns:
            raise Unsupported("a row that one block holds needs no cluster")
        if schedule.block < 32:
            raise Unsupported("less than a warp a block")
        if schedule.keep == "shared":
            raise Superseded("rows kept in shared memory, which this autotune lacks")
        if shape.unrolled:
            values = max(1, *(len(pas.compute) for pas in self.program.passes))
            if shape.packs * shape.vec * values > MAX_PACK_LANES:
                raise Unsupported(f"a row is too long for {threads} threads to keep in registers")

    # ---- one set of rows --------------------------------------------------------------------------------------------

    def row(self) -> list[Stmt]:
        """What a block does with one set of rows."""
        shape, emitter = self.shape, self.emitter
        out: list[Stmt] = [Assign(ROW, shape.number(GROUP))]
        if shape.rows_per_block > 1:
            last = shape.number(ROWS - 1)
            out = [Assign(ROW, shape.number(GROUP * shape.rows_per_block + ROW_GROUP))]
            out += [Assign(OK, ROW < ROWS), Assign(ROW, Select(OK, ROW, last))]
        out += self.accumulators.each_row() if self.accumulators else []
        out += [*emitter.row_indices(), *emitter.bases()]
        out += self.early.begin() if self.early else []
        out += self.ahead.take() if self.ahead else []
        for q in range(len(self.program.passes)):
            out += self.stage(q)
        if self.halves == 2:
            out.append(Assign(PARITY, Cast("int32", Const(self.span) - PARITY)))
        return out

    def stage(self, q: int) -> list[Stmt]:
        """Pass ``q``: what it needs of the row, its walk, and the joining of what it reduces."""
        pas, emitter = self.program.passes[q], self.emitter
        out = self._row_values(pas.row_values)
        for k in pas.row_stores:
            out += emitter.row_store(k)
        out += self.accumulators.add_row(pas) if self.accumulators else []
        if not pas.walks:
            return out
        out += self.walks.statements(q, pas)
        if self.ahead and q == self.ahead.number:
            out += self.ahead.next_row(self.step)
        reducers = reducers_of(emitter.graph, pas)
        if reducers.all:
            out += self.early.end(self.walks) if self.early and q == self.early.number else []
            out += self.joins.statements(reducers)
        for o, online in zip(pas.online, reducers.online, strict=True):
            peak, total = Var(f"v{o.peak}", "float32"), Var(f"v{o.total}", "float32")
            out += [Assign(peak, online.peak), *self._row_values(self.program.row_chain(o.shift))]
            out += online.rescaled(total, peak, emitter.name(o.shift, 0))
        return out

    def _row_values(self, values: Iterable[int]) -> list[Stmt]:
        out: list[Stmt] = []
        for i in values:
            if i not in self.done and self.emitter.graph.values[i].op not in REDUCTIONS:
                self.done.add(i)
                out += self.emitter.row_value(i)
        return out

    # ---- the kernel -------------------------------------------------------------------------------------------------

    @property
    def halves(self) -> int:
        """How often the arrays are there where warps meet: twice where one barrier a row leaves no other time to read
        them."""
        return 2 if self.shape.warps > 1 and self.persistent and self.joins.barriers == 1 else 1

    @property
    def span(self) -> int:
        """Elements of a half, of any type at most."""
        slots = self.joins.slots
        return max(slots.counts.values(), default=0) * slots.elements

    def indices(self) -> list[Stmt]:
        """What a thread is called."""
        shape, several = self.shape, self.shape.rows_per_block > 1
        threads = shape.threads_per_row
        out: list[Stmt] = [
            Assign(THREAD, ThreadIndex()),
            Assign(ROW_GROUP, Counts().quotient(THREAD, threads) if several else Const(0, "int32")),
            Assign(BLOCK_THREAD, Cast("int32", THREAD - ROW_GROUP * threads) if several else THREAD),
        ]
        if shape.cluster > 1:
            out += [CLUSTER_ARRIVE, Assign(RANK, CLUSTER_RANK)]
        own = Cast("int32", RANK * threads + BLOCK_THREAD) if shape.cluster > 1 else BLOCK_THREAD
        out.append(Assign(ROW_THREAD, own))
        out += [Assign(LANE, Cast("int32", THREAD & 31)), Assign(WARP, Cast("int32", BLOCK_THREAD >> 5))]
        if shape.apart:
            first = Intrinsic("pin", (Cast("int32", ROW_THREAD * shape.vec),), "int32")
            out.append(Assign(FIRST_OWN, Cast("int64", first)))
        if shape.warps > 1:  # lanes that hold no warp's part read the first one's and ignore it
            out.append(Assign(PART, Cast("int32", LANE & shape.whole_warps - 1)))
            out.append(Assign(MINE, PART < shape.warps))
            out.append(Assign(PART, Select(MINE, PART, Const(0, "int32"))))
        inner = self.emitter.inner_rows()
        rows = EXTENT * inner if self.program.dynamic == 0 else expr(inner)
        return [*out, Assign(ROWS, shape.number(rows))]

    def arrays(self) -> list[Stmt]:
        """Shared memory, and the number of row sets."""
        slots, per_block = self.joins.slots, self.shape.rows_per_block
        out: list[Stmt] = [*slots.arrays(self.halves)]
        out += [Assign(PARITY, Const(0, "int32"))] if slots.counts else []
        sets = self.shape.number((ROWS + (per_block - 1)) // per_block)
        return [*out, *self.joins.places.arrays(), Assign(SETS, sets)]

    def source(self) -> CudaSource:
        shape, schedule = self.shape, self.schedule
        row = self.row()
        body = [*self.indices(), *self.arrays()]
        if self.accumulators:
            body += [*self.accumulators.arrays(), *self.own_rows(), *self.accumulators.begin()]
            body += self.ahead.begin(CHUNK) if self.ahead else []
            body += [loop(GROUP, SETS, row, start=CHUNK, step=self.step), *self.accumulators.end()]
        elif self.persistent:
            body += self.ahead.begin(BLOCK) if self.ahead else []
            body.append(loop(GROUP, SETS, row, start=BLOCK, step=BLOCKS))
        else:
            body.append(Assign(GROUP, Counts().quotient(BLOCK, shape.cluster) if shape.cluster > 1 else BLOCK))
            body += row
        check_static(body)
        planes = self.accumulators.params() if self.accumulators else ()
        return CudaSource.scheduled(
            body,
            self.emitter.params() + planes,
            schedule,
            shape.count,
            self.emitter.graph.extents[0],
            shape.cluster,
            dynamic=self.program.dynamic == 0,
            inner=self.emitter.inner_rows(),
            per_block=shape.rows_per_block,
            align=self.emitter.alignments() + [16] * len(planes),
            **({"tiles": shape.tiles} if self.accumulators else {}),
            **told(self.overwrites, self.emitter.graph),
        )

    def own_rows(self) -> list[Stmt]:
        """Which tile of columns a block has, and which row sets of it."""
        shape, several = self.shape, self.shape.tiles > 1
        return [
            Assign(CHUNK, Counts().quotient(BLOCK, shape.tiles) if several else BLOCK),
            Assign(TILE, Cast("int32", BLOCK - CHUNK * shape.tiles)),
            Assign(FIRST_COLUMN, shape.number(TILE * (shape.row_threads * shape.vec * shape.packs))),
            Assign(Var("step"), Counts().quotient(BLOCKS, shape.tiles) if several else BLOCKS),
        ]


def emit_rows(program: Program, schedule: CudaSchedule) -> CudaSource:
    """The row-wise kernel of a program.

    Raises:
        Unsupported: the schedule does not fit the program.
    """
    return Rows(program, schedule).source()
