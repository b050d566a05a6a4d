"""The row-wise skeleton: threads share a row, passes walk it, and reductions run across the threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.compiler.kernel.lower import reducers_of
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Function,
    Load,
    Operand,
    Pointer,
    Select,
    Stmt,
    Tuple,
    Var,
    changed,
    loop,
    when,
)
from autotune.compiler.program.program import Pass, Program, overwritable_rows
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, THREAD, ThreadIndex, Units, check_static
from autotune.compiler.targets.cuda.rows.columns import Accumulators
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.packs import RowOptions, counts_of, vector_of
from autotune.compiler.targets.cuda.rows.reduction import RowReductions
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, overwrite_launch
from autotune.compiler.targets.cuda.threads import RowThreads, each_unit
from autotune.errors import Superseded, Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES

_MAX_PACK_LANES = 4096
"""Most packs * elements * values of a thread's straight-line code; beyond it compilation is very slow."""

LONG_ROW = 64 << 10
"""Bytes from which a row may be overwritten. This requires ``ld.global``, which has no load hints and bypasses the L1,
where a shorter row that is read twice may still be cached. The rows that save memory are long: a loss's gradient over
its logits."""

Functions = tuple[Function, Function]
"""The function of a pass for one pack, and that for a pack outside the row."""


def is_too_long(program: Program, elements: int) -> bool:
    """True if straight-line code of a pass over so many elements of a thread takes too long to compile."""
    return elements * max([1, *(len(p.compute) for p in program.passes)]) > _MAX_PACK_LANES


class NextRow:
    """The loads of a kernel with a persistent grid that are issued a row ahead.

    A block that walks row after row loads, reduces, waits for its other threads and stores in sequence, and memory is
    idle meanwhile. With ``prefetch`` the first pass's loads of the next row are issued right after those of the current
    row have been used, before its reductions. The words are kept in registers. Variables of the next row have the
    suffix ``n``.

    Attributes:
        loads: loads of the first pass that walks.
        number: the number of that pass.
        row_loads: loads of one number per row, whose latency is that of a row's packs.
    """

    def __init__(self, emitter: CudaEmitter, threads: RowThreads) -> None:
        self.emitter, self.threads, program = emitter, threads, emitter.program
        self.loads = emitter.issuable()
        if not self.loads:
            raise Unsupported("no loads to issue ahead")
        if not emitter.held(self.loads, threads.packs):
            words = emitter.words_of(self.loads) * threads.packs
            raise Unsupported(f"{words} registers a thread for what is loaded ahead")
        self.number = next(q for q, p in enumerate(program.passes) if p.walks)
        loads = sorted({i for q in program.passes for i in q.row_values if emitter.graph.values[i].op == "load"})
        self.function = emitter.load_function(self.loads)
        self.row_loads = [i for i in loads if emitter.access[i].fixed and not emitter.graph.values[i].guards]

    def take(self) -> list[Stmt]:
        """At the beginning of a row: copy its numbers, before those of the next row replace them."""
        return [Assign(self._number(i), self._number(i, "n")) for i in self.row_loads]

    def begin(self, first: Expr) -> list[Stmt]:
        """Before the row loop, which begins with row set ``first``: nothing loaded yet, then the first row."""
        nothing, threads = self.emitter.no_words(self.loads), self.threads
        out: list[Stmt] = [Assign(Var(f"x_{pack}"), nothing) for pack in range(threads.packs)]
        out += [Assign(x, Const(0, x.dtype)) for x in (self._number(i, "n") for i in self.row_loads)]
        return [*out, when(first < threads.row_sets, self._loads(threads.row_of(first)))]

    def issue(self, step: Expr) -> list[Stmt]:
        """In the row loop, after the last use of the current row's loads."""
        following = self.threads.row_set + step
        return [when(following < self.threads.row_sets, self._loads(self.threads.row_of(following)))]

    def _number(self, i: int, row: str = "") -> Var:
        return Var(f"v{i}{row}", self.emitter.graph.values[i].dtype)

    def _loads(self, row: Expr) -> list[Stmt]:
        emitter, threads = self.emitter, self.threads
        indices = [*emitter.row_indices(), *emitter.bases(self.loads, ())]
        own = {emitter.row, emitter.column, *(s.defines for s in indices)}

        def following(x: Expr) -> Expr:
            return Var(f"{x.name}n", x.dtype) if isinstance(x, Var) and x in own else x

        call = self.function({p.name: following(p) for p in self.function.params})
        column = following(emitter.column)
        out: list[Stmt] = [Assign(Var("rown"), row), *(changed(s, following) for s in indices)]
        for pack in range(threads.packs):
            out.append(Assign(Var("cn"), threads.column(pack)))
            load = Assign(Var(f"x_{pack}"), call)
            out.append(when(column < threads.columns, [load]) if pack >= threads.full else load)
        for i in self.row_loads:
            at = changed(emitter.access[i].base(), following)
            slot = Pointer(emitter.graph.values[i].slot)
            out.append(Assign(self._number(i, "n"), Load(emitter.storage(i), 1, "default", slot, at)))
        return out


class RowKernel:
    """The row-wise kernel of a program. Raises Unsupported if the schedule does not fit it."""

    def __init__(self, program: Program, schedule: CudaSchedule) -> None:
        self.program, self.schedule = program, schedule
        vec = vector_of(program, schedule)
        self.threads = RowThreads(program, schedule, vec, counts_of(program, vec))
        size = {k: STORAGE_BYTES[o.dtype] * program.n_cols for k, o in enumerate(program.graph.outputs)}
        self.overwrites = tuple(pair for pair in overwritable_rows(program) if size[pair[1]] >= LONG_ROW)
        options = RowOptions(overwritten=[slot for slot, _ in self.overwrites], wide_columns=self.threads.apart)
        self.emitter = emitter = CudaEmitter(program, schedule, options)
        self.check()
        self.accumulators = Accumulators(emitter, self.threads) if self.program.columns else None
        self.persistent = self.schedule.blocks_per_sm > 0 or self.accumulators is not None
        self.step: Expr = Var("step") if self.accumulators else BLOCKS  # from one row set of a block to the next
        self.next_row: NextRow | None = None
        if self.schedule.prefetch:
            if not self.accumulators and self.schedule.keep != "registers":
                raise Unsupported("loading ahead is for kernels that keep rows in registers")
            if not self.persistent:
                raise Superseded("loads of later passes before the first reduction, which this autotune lacks")
            self.next_row = NextRow(emitter, self.threads)
        self.reductions = RowReductions(self.threads)
        self.done = set(self.next_row.row_loads) if self.next_row else set[int]()  # row values that are computed

    def check(self) -> None:
        """Raise Unsupported unless the schedule fits the program."""
        schedule, shape, accumulates = self.schedule, self.threads, bool(self.program.columns)
        threads = shape.threads_per_row
        if threads % 32 if threads > 32 else threads & (threads - 1):
            raise Unsupported("threads_per_row must be a power of two up to 32 or a multiple of 32")
        if schedule.block > 1024:
            raise Unsupported("more than 1024 threads a block")
        if self.program.batches > 1 and self.program.n_rows // self.program.batches % shape.rows_per_block:
            raise Unsupported("sets of rows of two batches")
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
        if shape.unrolled and is_too_long(self.program, shape.packs * shape.vec):
            raise Unsupported(f"a row is too long for {threads} threads to keep in registers")

    # ---- one set of rows --------------------------------------------------------------------------------------------

    def row(self) -> list[Stmt]:
        """One set of rows of a block."""
        threads, e = self.threads, self.emitter
        out: list[Stmt] = [Assign(e.row, threads.number(threads.row_set))]
        if threads.rows_per_block > 1:
            last = threads.number(threads.rows - 1)
            out = [Assign(e.row, threads.number(threads.row_set * threads.rows_per_block + threads.row_group))]
            out += [Assign(e.ok, e.row < threads.rows), Assign(e.row, Select(e.ok, e.row, last))]
        out += self.accumulators.each_row() if self.accumulators else []
        out += [*e.row_indices(), *e.bases()]
        out += self.next_row.take() if self.next_row else []
        for q in range(len(self.program.passes)):
            out += self.stage(q)
        if self.halves == 2:
            parity = self.reductions.parity
            out.append(Assign(parity, Cast("int32", Const(self.reductions.span) - parity)))
        return out

    def stage(self, q: int) -> list[Stmt]:
        """Pass ``q``: its row values, its walk, its reductions."""
        pas, emitter = self.program.passes[q], self.emitter
        out = self._row_values(pas.row_values)
        for k in pas.row_stores:
            out += emitter.row_store(k)
        out += self.accumulators.add_row(pas) if self.accumulators else []
        if not pas.walks:
            return out
        out += self.walk(q, pas)
        if self.next_row and q == self.next_row.number:
            out += self.next_row.issue(self.step)
        reducers = reducers_of(emitter.graph, pas)
        if reducers.all:
            out += self.reductions.statements(reducers)
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

    # ---- a pass over the columns of a row: its packs one after the other --------------------------------------------

    def walk(self, q: int, pas: Pass) -> list[Stmt]:
        """The walk of pass ``q``, its reductions still those of each thread."""
        threads, e = self.threads, self.emitter
        unroll = self.schedule.unroll
        steps = 0 if threads.unrolled else threads.full // unroll
        first = steps * unroll if steps > 1 else 0
        row_ahead = self.next_row.loads if self.next_row and q == self.next_row.number else ()
        loads = () if row_ahead else self._held(pas, max(unroll if first else 0, threads.packs - first))
        function, fields = e.pass_function(q, pas, row_ahead or loads)
        functions = function, e.empty_function(q, fields)
        out = [s for reducer in reducers_of(e.graph, pas).all for s in reducer.begin()]
        if first:
            step, begin = Var("step"), Var("j")
            body: list[Stmt] = [Assign(begin, e.count.number(step) * unroll)]
            body += self._packs(q, pas, functions, loads, [begin + u for u in range(unroll)])
            out.append(loop(step, steps, body))
        return out + self._packs(q, pas, functions, loads, range(first, threads.packs))

    def _held(self, pas: Pass, packs: int) -> tuple[int, ...]:
        """The loads of slots that the pass may overwrite, if registers can hold ``packs`` packs of them.

        The compiler does not move these loads above stores, so they are printed before all stores.
        """
        e = self.emitter
        slots = e.overwritten if pas.stores and packs > 1 else ()
        return e.held(tuple(i for i in e.issuable(pas) if e.graph.values[i].slot in slots), packs)

    def _packs(
        self, q: int, pas: Pass, functions: Functions, loads: Sequence[int], packs: Sequence[Operand]
    ) -> list[Stmt]:
        """Packs in sequence, after the ``loads`` of all of them; packs from ``full`` on may be outside the row."""
        e, threads, out = self.emitter, self.threads, list[Stmt]()
        guarded = [isinstance(pack, int) and pack >= threads.full for pack in packs]
        words = [Var(f"held_{n}") if loads else None for n in range(len(packs))]
        function = e.load_function(loads)
        for n, x in enumerate(words):
            if x:
                load = Assign(x, function())
                out.append(Assign(e.column, threads.column(packs[n])))
                inside = [Assign(x, e.no_words(loads)), when(e.column < threads.columns, [load])]
                out += inside if guarded[n] else [load]
        for n, pack in enumerate(packs):
            out += self._pack(q, pas, functions, pack, guarded[n], words[n])
        return out

    def _pack(
        self, q: int, pas: Pass, functions: Functions, pack: Operand, guarded: bool, words: Var | None
    ) -> list[Stmt]:
        """One pack; ``words`` were loaded before.

        A ``guarded`` pack may be outside the row. Its loads that do not depend on the row are moved out of the row loop
        and its branch by the compiler. Their column is therefore clamped to the row.
        """
        e, threads = self.emitter, self.threads
        name = str(pack) if threads.unrolled else "x"
        out: list[Stmt] = [Assign(e.column, threads.column(pack))]
        given: dict[str, Expr] = {e.prefetched.name: words or Var(f"x_{name}")}
        if guarded:
            clamped = Var("cl")
            out.append(Assign(clamped, threads.clamped(e.column)))
            given[e.column.name] = clamped
        if pas.moments:
            out += e.pack_weights(pack)
        for n in range(len(self.program.passes)):
            given |= {f"z{n}": e.kept(n, name), f"g{n}": Var(f"g{n}_{name}")}
        fields, carried, result = reducers_of(e.graph, pas).fields, len(e.beginnings(q)), e.kept(q, name)
        first = len(fields) + sum(map(e.kept_words, pas.kept_out))
        returns = first + carried > 0
        take: list[Stmt] = [Assign(f, result[n]) for n, f in enumerate(fields)]
        hold: list[Stmt] = []
        if carried:
            hold = [Assign(Var(f"g{q}_{name}"), Tuple(tuple(result[first + n] for n in range(carried))))]
        call = functions[0](given)
        made: Stmt = Assign(result, call) if returns else Do(call)
        if not guarded:
            return [*out, made, *take, *hold]
        if returns:
            out.append(Assign(result, functions[1]()))
        return [*out, when(e.column < threads.columns, [made, *hold]), *take]

    # ---- the kernel -------------------------------------------------------------------------------------------------

    @property
    def halves(self) -> int:
        """Copies of the arrays of warps' parts: two if there is only one barrier per row, so that reads may overlap."""
        return 2 if self.threads.warps > 1 and self.persistent and self.reductions.barriers == 1 else 1

    def source(self) -> CudaSource:
        threads, schedule, accumulators, reductions = self.threads, self.schedule, self.accumulators, self.reductions
        units = Units(self.emitter.inner_rows(), threads.rows_per_block, self.program.dynamic == 0)
        row, per_block = self.row(), threads.rows_per_block
        body: list[Stmt] = [Assign(THREAD, ThreadIndex()), *threads.indices()]
        body += [Assign(threads.rows, units.total(threads.count))]
        body += reductions.of_warps.declared((self.halves - 1) * reductions.span)
        body += [Assign(reductions.parity, Const(0, "int32"))] if reductions.of_warps.sizes else []
        body += reductions.of_blocks.declared()
        body.append(Assign(threads.row_sets, threads.number((threads.rows + (per_block - 1)) // per_block)))
        if accumulators:
            body += [*accumulators.arrays(), *threads.tile_indices(Var("step")), *accumulators.begin()]
            body += self.next_row.begin(threads.first_set) if self.next_row else []
            body.append(loop(threads.row_set, threads.row_sets, row, start=threads.first_set, step=self.step))
            body += accumulators.end()
        else:
            body += self.next_row.begin(BLOCK) if self.next_row else []
            body += each_unit(threads.row_set, threads.row_sets, row, self.persistent, cluster=threads.cluster)
        check_static(body)
        planes = accumulators.params() if accumulators else ()
        return CudaSource.scheduled(
            body,
            self.emitter.params() + planes,
            schedule,
            threads.count,
            units,
            self.emitter.graph.extents[0],
            self.emitter.alignments() + [16] * len(planes),
            threads.cluster,
            **({"tiles": threads.tiles} if accumulators else {}),
            **overwrite_launch(self.overwrites, self.emitter.graph),
        )
