"""The outer skeleton: reductions over outer axes, threads side by side on the unit-stride axis that is kept.

A block has ``threads_per_row`` threads along the kept axes (each takes a vector of neighbours) and ``rows_per_block``
along the reduced ones; :mod:`autotune.compiler.targets.cuda.outer.joins` joins what they carry. What a pass leaves for
later ones stays in registers, in shared memory, or is read again; so softmax over dim 0 reads its input once where the
block (or the cluster) can hold a strip of columns.

The same kernel finishes the partials of the columns scheme, where latency is all: narrow strips give enough blocks, the
loads of a thread are independent of each other (the last, incomplete step repeats the last place instead of branching),
and once only results are left to be stored, only the warps that store them go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    For,
    Item,
    Operand,
    Select,
    Stmt,
    Tuple,
    Var,
    both,
    expr,
    loop,
    when,
)
from autotune.compiler.program.program import Pass, Program
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, EXTENT, THREAD, Shared, ThreadIndex, check_static
from autotune.compiler.targets.cuda.memory.address import fixed_index, taken_apart
from autotune.compiler.targets.cuda.outer.joins import DEEP, INSIDE, RANK, Joins
from autotune.compiler.targets.cuda.outer.lanes import LIVE, PLACE, TILE_LANE, Lanes
from autotune.compiler.targets.cuda.outer.share import ALONG, quotient
from autotune.compiler.targets.cuda.rows.kernel import MAX_PACK_LANES
from autotune.compiler.targets.cuda.source import CudaSource, OuterSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS

NUMBERS, WORDS = Var("shared_numbers"), Var("shared_words")
"""What passes keep in shared memory, as float32 and as uint32."""
GROUP, STEP = Var("group"), Var("step")
ROW, ROWS = Var("row"), Var("rows")
"""Number of the thread's pack along the kept axes, and how many packs there are."""
IN_ROWS = Var("in_rows", "bool")
"""Whether the thread's pack is there."""
NUMBER = Var("number", "int32")
_LINE = Var("line")
_FALSE = Const(False, "bool")


class Outer:
    copies = False
    """Whether strips are copied to shared memory ahead of their walks."""

    def __init__(self, program: Program, schedule: OuterSchedule) -> None:
        self.lanes = Lanes(program, schedule, self.copies)
        self.joins = Joins(self.lanes)
        self.count = self.lanes.count.number  # of packs along the kept axes and of places of the reduced ones
        self.program, self.schedule, self.graph = program, schedule, program.graph
        self.threads, self.deep, self.cluster = self.joins.threads, self.joins.deep, self.joins.cluster
        step = self.deep * self.cluster  # places of the reduced axes that all threads take at a time
        self.packs = -(-program.n_cols // step)
        self.full = program.n_cols // step
        self.outer = [a for a in program.rows if a != self.lanes.axis]
        self.line = self.graph.extents[self.lanes.axis] // self.lanes.vec  # packs along the axis of the lanes
        self.dynamic = program.dynamic == 0 and self.lanes.axis != 0
        self.inner = self.line * self.graph.size(a for a in self.outer if not (self.dynamic and a == 0))
        # Whether a block may have threads beyond the last pack.
        self.partial = self.dynamic or self.inner % self.threads != 0
        self.kept_from = {i: q for q, pas in enumerate(program.passes) for i in pas.kept_out}
        self.prepare()
        self.check()

    def prepare(self) -> None:
        """For other ways of keeping: what :meth:`check` has to know."""

    def check(self) -> None:
        schedule = self.schedule
        if self.threads & (self.threads - 1):
            raise Unsupported("threads_per_row must be a power of two")
        if self.threads % self.lanes.across:
            raise Unsupported(f"fewer than {self.lanes.across} threads_per_row on a tile")
        schedule.check_block()
        if self.cluster > 1 and (schedule.blocks_per_sm or self.deep < self.cluster):
            raise Unsupported("a cluster works on one strip, and has at least as many rows_per_block as blocks")
        if self.cluster > 1 and self.packs == 1:
            raise Unsupported("reduced axes that one block holds need no cluster")
        kept = {i for pas in self.program.passes for i in pas.kept_out} - set(self.lanes.ahead)
        if schedule.keep == "shared" and any(self.graph.values[i].dtype != "float32" for i in kept):
            raise Unsupported("keeping integers in shared memory")
        if schedule.held and not schedule.prefetch:
            raise Unsupported("places held in registers beside copies that are not asynchronous")
        if schedule.keep == "registers":
            values = max(1, *(len(pas.compute) for pas in self.program.passes), 1)
            if self.packs * self.lanes.vec * values > MAX_PACK_LANES:
                raise Unsupported(f"too much for {self.deep} threads to keep in registers")

    # ---- a walk -----------------------------------------------------------------------------------------------------

    def walk(self, number: int, pas: Pass) -> list[Stmt]:
        """The walk of pass ``number``, its reductions not yet joined."""
        function = self.lanes.pass_function(pas, self.kept_from, self.partial or self.packs > self.full)
        out: list[Stmt] = [Assign(var, nothing) for var, nothing in self.lanes.fields(pas).items()]

        def pack(k: Operand, masked: bool) -> list[Stmt]:
            """One place of the reduced axes, of which there may be no more if ``masked``."""
            shared = self.schedule.keep == "shared"
            made = self.place(k, masked)
            given: dict[str, Expr] = {LIVE.name: self.live(masked)}
            for source in dict.fromkeys(self.kept_from[i] for i in pas.kept_in):
                made += [self.fetch(source, expr(k))] if shared else []
                given[self.lanes.results(source).name] = self.result(source, k)
            call = function(given)
            if not self.lanes.fields(pas) and not pas.kept_out:
                return [*made, Do(call)]
            result = self.result(number, k)
            made += [Assign(result, call), *self.carried(pas, result, masked)]
            return made + (self.put(number, expr(k), result) if shared else [])

        unroll, begin = self.schedule.unroll, 0
        if self.schedule.keep != "registers" and (steps := self.full // unroll) > 1:
            body: list[Stmt] = [Assign(NUMBER, Cast("int32", STEP) * unroll)]
            out.append(loop(STEP, steps, body + [s for n in range(unroll) for s in pack(NUMBER + n, False)]))
            begin = steps * unroll
        out += [s for k in range(begin, self.packs) for s in pack(k, k >= self.full)]
        return out + [x.settle() for x in self.lanes.online(pas)]

    def result(self, number: int, k: Operand) -> Var:
        """The result of pass ``number`` at place ``k``: in registers each has a name of its own for later passes."""
        name = self.lanes.results(number).name
        own = self.schedule.keep == "registers" and self.program.passes[number].kept_out
        return Var(f"{name}_{k if own else 'now'}")

    def place(self, k: Operand, masked: bool) -> list[Stmt]:
        """The number of place ``k`` of the reduced axes.

        Where a masked one lies beyond the last, its threads repeat the last one, so that loads need not wait for a
        branch, and :meth:`carried` drops what it adds.
        """
        where = expr(k) * self.cluster + RANK if self.cluster > 1 else expr(k)
        out: list[Stmt] = [Assign(PLACE, self.count(where * self.deep + DEEP))]
        if masked:
            out.append(Assign(INSIDE, self.program.n_cols > PLACE))
            out.append(Assign(PLACE, Select(INSIDE, PLACE, self.count(Const(self.program.n_cols - 1)))))
        return out

    def live(self, masked: bool) -> Expr:
        """Whether the thread may store at a place."""
        if not self.partial:
            return INSIDE if masked else Const(True, "bool")
        return Select(INSIDE, IN_ROWS, _FALSE) if masked else IN_ROWS

    def carried(self, pas: Pass, result: Expr, masked: bool) -> list[Stmt]:
        """Sets what a thread carries from the result of a pass function."""
        items = [(var, result[n]) for n, var in enumerate(self.lanes.returned(pas))]
        return [Assign(var, Select(INSIDE, item, var) if masked else item) for var, item in items]

    # ---- keeping in shared memory: each thread its own words, so no barrier and no bank conflict --------------------

    def _kept_words(self, number: int, k: Expr) -> list[Item]:
        """Where each word that pass ``number`` keeps lies for place ``k``, in the view of its type."""
        pas = self.program.passes[number]
        first = Const(sum(self.lanes.pass_words(before) for before in self.program.passes[:number]) * self.packs)
        views = [
            WORDS if self.lanes.packed(i) else NUMBERS for i in pas.kept_out for _ in range(self.lanes.kept_words(i))
        ]
        return [
            view[(first + k * self.lanes.pass_words(pas) + word) * self.schedule.block + THREAD]
            for word, view in enumerate(views)
        ]

    def put(self, number: int, k: Expr, result: Expr) -> list[Stmt]:
        first = len(self.lanes.fields(self.program.passes[number]))
        return [Assign(word, result[first + n]) for n, word in enumerate(self._kept_words(number, k))]

    def fetch(self, number: int, k: Expr) -> Stmt:
        skipped = self.lanes.fields(self.program.passes[number]).values()
        return Assign(self.result(number, 0), Tuple((*skipped, *self._kept_words(number, k))))

    def words(self) -> int:
        """Words of shared memory that each thread has for one place of the reduced axes."""
        return sum(self.lanes.pass_words(pas) for pas in self.program.passes)

    def ahead_of_walks(self) -> list[Stmt]:
        """What stands between the indices of a strip and its first walk."""
        return []

    # ---- the kernel -------------------------------------------------------------------------------------------------

    def body(self) -> list[Stmt]:
        """One set of packs, indices known."""
        done: set[int] = set()
        out: list[Stmt] = []
        alone: list[Stmt] | None = None  # what the warps that store go on with alone

        def kept_axis_values(ids: Iterable[int]) -> list[Stmt]:
            new = [i for i in dict.fromkeys(ids) if i not in done and self.graph.values[i].op not in REDUCTIONS]
            done.update(new)
            return [s for i in new for s in self.lanes.compute(i)]

        passes = self.program.passes
        for q, pas in enumerate(passes):
            now = out if alone is None else alone
            now += kept_axis_values(pas.row_values)
            if pas.row_stores:
                now.append(when(self.storing(), [s for k in pas.row_stores for s in self.lanes.store(k, "default")]))
            if not pas.walks:
                continue
            now += self.walk(q, pas)
            if not (pas.reduce or pas.online):
                continue
            now += self.joins.in_warp(pas)
            if self.joins.parts > 1:
                now += self.joins.leave(pas)
                if self.cluster == 1 and not any(later.walks for later in passes[q + 1 :]):
                    now = alone = []
                now += self.joins.collect(pas)
            if self.cluster > 1:
                now += self.joins.across(pas)
            now += self.lanes.reduced(pas)
            for pair in pas.online:
                now += [*kept_axis_values(self.program.row_chain(pair.shift)), *self.lanes.totals(pair)]
        return out if alone is None else [*out, when(max(32, self.threads) > THREAD, alone)]

    def storing(self) -> Expr:
        """Whether the thread stores results of the kept axes."""
        tests = (
            DEEP.equals(0) if self.deep > 1 else None,
            IN_ROWS if self.partial else None,
            RANK.equals(0) if self.cluster > 1 else None,
        )
        return both(*tests) or Const(True, "bool")

    def pack_indices(self) -> list[Stmt]:
        """Takes the number of a pack apart into the index along each kept axis."""
        lanes, count = self.lanes, self.lanes.count
        own = fixed_index(lanes.axis)
        if not self.outer:
            return [Assign(own, Cast("int64", ROW * lanes.vec))]
        return [
            Assign(_LINE, count.quotient(ROW, self.line)),
            Assign(own, Cast("int64", (ROW - _LINE * self.line) * lanes.vec)),
            *taken_apart(_LINE, self.outer, self.graph.extents, count, fixed_index),
        ]

    def indices(self) -> list[Stmt]:
        """The indices of a pack, and the bases of all tensors there."""
        lanes, live = self.lanes, set(self.graph.live)
        begins = [(lanes.base(i), access) for i, access in lanes.access.items() if i in live]
        begins += [(lanes.out_base(k), access) for k, access in enumerate(lanes.out_access)]
        return [*self.pack_indices(), *(Assign(base, Cast("int64", access.base())) for base, access in begins)]

    def kernel(self) -> CudaSource:
        schedule, threads = self.schedule, self.threads
        body = self.body()
        before: list[Stmt] = [
            Assign(THREAD, ThreadIndex()),
            Assign(DEEP, quotient(THREAD, threads)),
            Assign(ALONG, Cast("int32", THREAD - DEEP * threads)),
            *self.joins.numbers(),
        ]
        if self.lanes.tile:
            before.append(Assign(TILE_LANE, Cast("int32", ALONG & (self.lanes.across - 1))))
        before += self.joins.arrays()
        check_static(before)
        shared = 0
        if schedule.keep == "shared":
            shared = 4 * self.words() * (self.packs - schedule.held) * schedule.block
        if shared:
            before += [Shared(NUMBERS, 0, "float32"), Shared(WORDS, 0, "uint32")]
        before.append(Assign(ROWS, self.count(EXTENT * self.inner if self.dynamic else Const(self.inner))))
        strip: list[Stmt] = [Assign(ROW, self.count(GROUP * threads + ALONG))]
        if self.partial:
            strip += [Assign(IN_ROWS, ROW < ROWS), Assign(ROW, Select(IN_ROWS, ROW, self.count(ROWS - 1)))]
        strip += [*self.indices(), *self.ahead_of_walks(), *body]
        if schedule.blocks_per_sm:
            strip += self.joins.next_strip()
            strips = (ROWS + (threads - 1)) // threads
            text: list[Stmt] = [For(GROUP, BLOCK, strips, BLOCKS, tuple(strip))]
        else:
            text = [Assign(GROUP, quotient(BLOCK, self.cluster) if self.cluster > 1 else BLOCK), *strip]
        return CudaSource.scheduled(
            [*before, *text],
            self.lanes.params(),
            schedule,
            self.lanes.count,
            self.graph.extents[0],
            self.cluster,
            dynamic=self.dynamic,
            inner=self.inner,
            per_block=threads,
            shared=shared,
            align=self.lanes.alignments(),
        )
