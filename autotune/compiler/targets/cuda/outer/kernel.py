"""The outer skeleton: reductions over outer axes, with adjacent threads along the kept unit-stride axis.

A block has ``threads_per_row`` threads along the kept axes (each with a vector of adjacent elements) and
``rows_per_block`` along the reduced ones. A pass keeps values for later ones in registers, or later passes read them
again. So a softmax over dim 0 reads its input once if the block (or the cluster) can hold a strip of columns.

The same kernel finishes the partials of the columns scheme, whose time is all latency. Narrow strips give enough
blocks. The loads of a thread are independent (the last, incomplete step repeats the last index instead of branching).
After the last reduction, only the warps that store results continue.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Operand,
    Select,
    Stmt,
    Var,
    conjunction,
    expr,
    loop,
    when,
)
from autotune.compiler.program.program import Pass, Program
from autotune.compiler.targets.cuda.device import THREAD, Shared, ThreadIndex, Units, check_static
from autotune.compiler.targets.cuda.outer.lanes import Lanes
from autotune.compiler.targets.cuda.outer.reduction import StripReductions
from autotune.compiler.targets.cuda.rows.kernel import is_too_long
from autotune.compiler.targets.cuda.source import CudaSource, OuterSchedule
from autotune.compiler.targets.cuda.tensors import fixed_index, unravel_index
from autotune.compiler.targets.cuda.threads import StripThreads, each_unit
from autotune.errors import Superseded, Unsupported
from autotune.ir.graph import REDUCTIONS


class Outer:
    copies = False
    """True if strips are copied to shared memory before their walks."""
    kept_words, words = Var("shared_words"), 0
    """The kept values in shared memory, and the words of each thread for one place of the reduced axes."""
    strip, step, number = Var("group"), Var("step"), Var("number", "int32")
    pack, pack_count, line = Var("row"), Var("rows"), Var("line")
    """Number of the thread's pack along the kept axes, the number of packs, and the number of its line of packs."""

    def __init__(self, program: Program, schedule: OuterSchedule) -> None:
        self.lanes = lanes = Lanes(program, schedule, self.copies)
        self.count = lanes.count.number  # of packs along the kept axes and of places of the reduced ones
        self.program, self.schedule, self.graph = program, schedule, program.graph
        self.outer = [a for a in program.rows if a != lanes.axis]
        self.line_packs = self.graph.extents[lanes.axis] // lanes.vec  # packs along the axis of the lanes
        dynamic = program.dynamic == 0 and lanes.axis != 0
        inner = self.line_packs * self.graph.size(a for a in self.outer if not (dynamic and a == 0))
        across, down = schedule.threads_per_row, schedule.rows_per_block
        self.units = Units(inner, across, dynamic)
        partial = dynamic or inner % across != 0
        self.threads = StripThreads(across, down, schedule.cluster, lanes.vec, program.n_cols, partial)
        self.packs, self.full = self.threads.packs, self.threads.full
        several = len(lanes.reducing) > 1 or schedule.blocks_per_sm > 0
        passes = [lanes.carried[pas] for pas in lanes.reducing]
        self.reductions = StripReductions(self.threads, passes, several, share=not lanes.tile)
        self.prepare()
        self.check()

    def prepare(self) -> None:
        """Set up the way of keeping, before :meth:`check`."""
        if self.schedule.keep == "shared":
            raise Superseded("strips kept in shared memory that are not copied ahead, which this autotune lacks")

    def check(self) -> None:
        schedule, across, down, cluster = self.schedule, self.threads.across, self.threads.down, self.threads.cluster
        if across & (across - 1):
            raise Unsupported("threads_per_row must be a power of two")
        if across % self.lanes.across:
            raise Unsupported(f"fewer than {self.lanes.across} threads_per_row on a tile")
        schedule.check_block()
        if cluster > 1 and (schedule.blocks_per_sm or down < cluster):
            raise Unsupported("a cluster works on one strip, and has at least as many rows_per_block as blocks")
        if cluster > 1 and self.packs == 1:
            raise Unsupported("reduced axes that one block holds need no cluster")
        kept = {i for pas in self.program.passes for i in pas.kept_out} - set(self.lanes.prefetched)
        if schedule.keep == "shared" and any(self.graph.values[i].dtype != "float32" for i in kept):
            raise Unsupported("keeping integers in shared memory")
        if schedule.held and not schedule.prefetch:
            raise Unsupported("indices in registers together with copies that are not asynchronous")
        if schedule.keep == "registers" and is_too_long(self.program, self.packs * self.lanes.vec):
            raise Unsupported(f"too much for {down} threads to keep in registers")

    # ---- a walk -----------------------------------------------------------------------------------------------------

    def walk(self, number: int, pas: Pass) -> list[Stmt]:
        """The walk of pass ``number``, its reductions still those of each thread."""
        function = self.lanes.pass_function(pas, self.threads.partial or self.packs > self.full)
        out: list[Stmt] = [Assign(var, nothing) for var, nothing in self.lanes.carried[pas].fields.items()]

        def pack(k: Operand, masked: bool) -> list[Stmt]:
            """One place of the reduced axes, of which there may be no more if ``masked``."""
            given: dict[str, Expr] = {self.lanes.live.name: self.live(masked)}
            for source in dict.fromkeys(self.program.kept_from[i] for i in pas.kept_in):
                given[self.lanes.results(source).name] = self.result(source, k)
            call = function(given)
            if not self.lanes.carried[pas].fields and not pas.kept_out:
                return [*self.place(k, masked), Do(call)]
            result = self.result(number, k)
            return [*self.place(k, masked), Assign(result, call), *self.carried(pas, result, masked)]

        unroll, begin = self.schedule.unroll, 0
        if self.schedule.keep != "registers" and (steps := self.full // unroll) > 1:
            body: list[Stmt] = [Assign(self.number, Cast("int32", self.step) * unroll)]
            out.append(loop(self.step, steps, body + [s for n in range(unroll) for s in pack(self.number + n, False)]))
            begin = steps * unroll
        out += [s for k in range(begin, self.packs) for s in pack(k, k >= self.full)]
        return out + [x.settle() for x in self.lanes.carried[pas].online]

    def result(self, number: int, k: Operand) -> Var:
        """The result of pass ``number`` at place ``k``: in registers each has its own name for later passes."""
        name = self.lanes.results(number).name
        own = self.schedule.keep == "registers" and self.program.passes[number].kept_out
        return Var(f"{name}_{k if own else 'now'}")

    def place(self, k: Operand, masked: bool) -> list[Stmt]:
        """The number of place ``k`` of the reduced axes.

        Threads of a masked one beyond the last repeat the last one, so that loads need not wait for a branch, and
        :meth:`carried` drops its terms.
        """
        threads, place = self.threads, self.lanes.place
        where = expr(k) * threads.cluster + threads.rank if threads.cluster > 1 else expr(k)
        out: list[Stmt] = [Assign(place, self.count(where * threads.down + threads.line))]
        if masked:
            out.append(Assign(threads.inside, self.program.n_cols > place))
            out.append(Assign(place, Select(threads.inside, place, self.count(Const(self.program.n_cols - 1)))))
        return out

    def live(self, masked: bool) -> Expr:
        """True where the thread may store at a place."""
        if not self.threads.partial:
            return self.threads.inside if masked else Const(True, "bool")
        return (
            Select(self.threads.inside, self.threads.in_rows, Const(False, "bool")) if masked else self.threads.in_rows
        )

    def carried(self, pas: Pass, result: Expr, masked: bool) -> list[Stmt]:
        """Assigns a thread's partial results from the result of a pass function."""
        items = [(var, result[n]) for n, var in enumerate(self.lanes.returned(pas))]
        return [Assign(var, Select(self.threads.inside, item, var) if masked else item) for var, item in items]

    def before_walks(self) -> list[Stmt]:
        """Statements between the indices of a strip and its first walk."""
        return []

    # ---- the kernel -------------------------------------------------------------------------------------------------

    def body(self) -> list[Stmt]:
        """One set of packs, indices known."""
        done: set[int] = set()
        out: list[Stmt] = []
        alone: list[Stmt] | None = None  # statements of the storing warps alone

        def kept_axis_values(ids: Iterable[int]) -> list[Stmt]:
            new = [i for i in dict.fromkeys(ids) if i not in done and self.graph.values[i].op not in REDUCTIONS]
            done.update(new)
            return [s for i in new for s in self.lanes.compute(i)]

        passes, group = self.program.passes, self.threads.group
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
            before, after = self.reductions.reduce(self.lanes.carried[pas])
            now += before
            if group.parts > 1 and group.cluster == 1 and not any(later.walks for later in passes[q + 1 :]):
                now = alone = []
            now += after
            now += self.lanes.reduced(pas)
            for pair in pas.online:
                now += [*kept_axis_values(self.program.row_chain(pair.shift)), *self.lanes.totals(pair)]
        return out if alone is None else [*out, when(max(32, self.threads.across) > THREAD, alone)]

    def storing(self) -> Expr:
        """True where the thread stores results of the kept axes."""
        threads = self.threads
        tests = (
            threads.line.equals(0) if threads.down > 1 else None,
            threads.in_rows if threads.partial else None,
            threads.rank.equals(0) if threads.cluster > 1 else None,
        )
        return conjunction(*tests) or Const(True, "bool")

    def indices(self) -> list[Stmt]:
        """The index of a pack along each kept axis, and the bases of all tensors there."""
        lanes, count, live = self.lanes, self.lanes.count, set(self.graph.live)
        own, out = fixed_index(lanes.axis), list[Stmt]()
        in_line: Expr = self.pack
        if self.outer:
            out.append(Assign(self.line, count.quotient(self.pack, self.line_packs)))
            in_line = self.pack - self.line * self.line_packs
        out.append(Assign(own, Cast("int64", in_line * lanes.vec)))
        out += unravel_index(self.line, self.outer, self.graph.extents, count, fixed_index)
        begins = [(lanes.base(i), access) for i, access in lanes.access.items() if i in live]
        begins += [(lanes.out_base(k), access) for k, access in enumerate(lanes.out_access)]
        return [*out, *(Assign(base, Cast("int64", access.base())) for base, access in begins)]

    def source(self) -> CudaSource:
        schedule, threads, lanes, packs = self.schedule, self.threads, self.lanes, self.pack_count
        body = self.body()
        before: list[Stmt] = [Assign(THREAD, ThreadIndex()), *threads.indices()]
        if lanes.tile:
            before.append(Assign(lanes.tile_lane, Cast("int32", threads.along & (lanes.across - 1))))
        before += self.reductions.declared()
        check_static(before)
        shared = 4 * self.words * (self.packs - schedule.held) * schedule.block
        before += [Shared(self.kept_words, 0, "uint32")] if shared else []
        before.append(Assign(packs, self.units.total(lanes.count)))
        strip: list[Stmt] = [Assign(self.pack, self.count(self.strip * threads.across + threads.along))]
        if threads.partial:
            strip.append(Assign(threads.in_rows, self.pack < packs))
            strip.append(Assign(self.pack, Select(threads.in_rows, self.pack, self.count(packs - 1))))
        strip += [*self.indices(), *self.before_walks(), *body]
        strip += self.reductions.next_strip() if schedule.blocks_per_sm else []
        strips = (packs + (threads.across - 1)) // threads.across
        before += each_unit(self.strip, strips, strip, schedule.blocks_per_sm > 0, cluster=threads.cluster)
        return CudaSource.scheduled(
            before,
            lanes.params(),
            schedule,
            lanes.count,
            self.units,
            self.graph.extents[0],
            lanes.alignments(),
            threads.cluster,
            shared=shared,
        )
