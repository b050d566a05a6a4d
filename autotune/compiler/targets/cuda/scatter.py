"""The scatter skeleton: index-add of rows without atomics; each result is written once.

A block owns ``owned`` adjacent destinations (rows of the result) and a chunk of the columns. It *scans* the indices of
all terms and lists the terms of its destinations. Counts by warp shuffles and the warps' totals give each term's number
in the list, so the order is always the same. The list is *sorted* by destination, with one warp per destination.

The threads then form ``rows_per_block`` *match lanes* of ``threads_per_row`` threads on the columns. A match lane takes
a destination, adds its terms in registers and stores the results computed from the sum. All match lanes share a
destination with many terms, and their sums are reduced in shared memory. If a block's destinations have more terms than
the sorted list holds (padding, a column of two), the block takes ranges of them: those before the destination that has
most terms, it alone, and those behind it. Each range needs a scan.

Terms are read once. Each block reads the indices once, from the L2. Other tensors may be prefetched into the L2 during
the scan (``prefetch``), so that memory is busy then too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

from autotune.compiler.kernel.lower import ZERO
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Intrinsic,
    Item,
    Operand,
    Pointer,
    Return,
    Select,
    Stmt,
    Tuple,
    Unary,
    Unpack,
    Var,
    closed,
    conjunction,
    expr,
    loop,
    when,
)
from autotune.compiler.program.program import Program, stride_of
from autotune.compiler.program.scattered import Scattered, Sum
from autotune.compiler.program.vectors import narrowest
from autotune.compiler.targets.cuda.device import (
    BARRIER,
    BLOCK,
    LIMIT,
    THREAD,
    Counts,
    Shared,
    ThreadIndex,
    Units,
    ballot,
    bits_set,
    shuffle_from,
)
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.packs import FALSE, RowOptions
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, ScatterSchedule
from autotune.compiler.targets.cuda.threads import ThreadGrid, int_var, quotient
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES

MOST_SORTED = 2048
"""Terms that a block lists and sorts at a time."""
LEAST_RANGES = 8
"""Ranges that a block tries, at least, before it takes destination by destination; or a quarter of its destinations. So
a block with many terms at all destinations has hardly more scans than destinations.
"""
MOST_PACKS = 4
"""Packs of destinations that a thread reads at a time."""
MANY = 8
"""Terms of one destination, for each match lane, from which on all match lanes share them."""
FLIGHT = 2
"""Terms that a thread has in flight where it has a destination by itself, of few terms mostly."""
FLIGHT_TOGETHER = 6
"""The same where match lanes share a destination of many: such a block may be the last one (a quarter of all terms is
padding in a translator's batches, and took 110 us of 164 with 4).
"""


LINE = 128
"""Bytes that are brought into the L2 at a time."""


def fetchable(s: Scattered) -> tuple[int, ...]:
    """The loads, except those of terms, that can be prefetched during the scan: by destinations, adjacent along
    columns.
    """
    found = []
    for i in s.results.passes[1].compute:
        v = s.graph.values[i]
        if v.op == "load" and not v.guards and stride_of(v, s.cols[-1]) == 1 and stride_of(v, s.at):
            found.append(i)
    return tuple(found)


TRUE = Const(True, "bool")


def as_int(x: Operand) -> Cast:
    return Cast("int32", expr(x))


def least(a: Expr, b: Operand) -> Intrinsic:
    return Intrinsic("least", (a, as_int(b)), "int32")


def both(test: Expr, x: Expr) -> Select:
    """Both of two tests, without a branch."""
    return Select(test, x, FALSE)


def emitter_of(program: Program, schedule: CudaSchedule, vec: int, *, tested: bool = False) -> CudaEmitter:
    loads = [i for i, v in enumerate(program.graph.values) if v.op == "load"]
    own = replace(schedule, rows_per_block=1, vector_bytes=vec * narrowest(program))
    return CudaEmitter(program, own, RowOptions(apart=loads, tested=tested))


def before_pass(part: CudaEmitter, q: int) -> list[Stmt]:
    """The row values and offsets that pass ``q`` of ``part`` takes, of row number ``row``."""
    pas = part.program.passes[q]
    values = [line for i in pas.row_values for line in part.row_value(i)]
    return [*part.row_indices(), *values, *part.bases(pas.compute, pas.stores)]


def _packs(one: Sum, schedule: CudaSchedule) -> int:
    """Packs of indices that a thread reads in a step of the scan."""
    return max(1, min(MOST_PACKS, -(-one.n_tokens // (schedule.block * one.place_vector))))


class _Adder:
    """One sum as a kernel sees it: how its indices are read, and its terms; its part of shared memory.

    Attributes:
        destination, term: functions that read a pack of indices, and one of a term.
        add: function that adds a term to the sums where ``on``.
        step: tokens that a block scans at a time; ``packs`` of each thread.
        begin: word where it is written where the terms of each destination begin in the sorted list.
        sorted: word where the sorted list begins.
    """

    accumulated, taken, on = Var("a"), Var("x"), Var("on", "bool")
    """A thread's sums, the pack that is added to them, and the condition for adding it."""

    def __init__(self, one: Sum, schedule: ScatterSchedule, vec: int, begin: int) -> None:
        self.one, self.tokens, self.pick = one, one.n_tokens, one.place_vector
        self.destinations = emitter_of(one.destinations, schedule, self.pick)
        self.terms = emitter_of(one.terms, schedule, vec)
        self.packs = _packs(one, schedule)
        self.step = schedule.block * self.pick * self.packs
        self.begin, self.sorted = begin, begin + schedule.owned + 1
        self.destination, _ = self.destinations.pass_function(0, one.destinations.passes[0])
        self.term, _ = self.terms.pass_function(0, one.terms.passes[0])
        packed = self.terms.packed(one.term)
        unpacked = [Assign(self.taken, Unpack(self.terms.storage(one.term), vec, self.taken))] if packed else []
        sums = tuple(self.accumulated[e] + Select(self.on, self.taken[e], ZERO) for e in range(vec))
        self.add = closed([*unpacked, Return(sums)])


class ScatterKernel:
    """The kernel of a group with sums at destinations. Raises Unsupported where the schedule does not fit.

    Of a schedule ``threads_per_row`` threads are along the columns, ``rows_per_block`` are the match lanes, ``unroll``
    destinations are stored at a time, and a block has ``owned`` of them.
    """

    memory, lane_sums = Var("si"), Var("sf")
    """Shared memory as whole numbers, and as the sums of the match lanes."""
    lane, warp, below = int_var("lane"), int_var("warp"), int_var("below")
    """Number of the thread in its warp, of the warp; a bit for each lane below."""
    first, rows, column = int_var("first"), int_var("rows"), int_var("col")
    """The first destination of the block, its number of destinations, and the thread's first column."""
    base, low, count, room = Var("base"), Var("low", "int64"), int_var("count"), int_var("room")
    """Of a step of the scan: its first token, the first of the destinations that it looks for, how many; the list's
    room.
    """
    total, found, at = int_var("total"), int_var("found"), int_var("at")
    destination, entry = int_var("r"), int_var("k")
    begin, end, tried = int_var("begin"), int_var("end"), int_var("tried")
    """A range of the block's destinations whose terms are listed together, and the number of ranges before it."""
    full, inside = Var("full", "bool"), Var("inside", "bool")
    """The list has no room for all terms of the range; the thread has a column."""

    def __init__(self, s: Scattered, schedule: ScatterSchedule) -> None:
        owned = schedule.owned
        self.s, self.schedule, self.owned = s, schedule, owned
        self.lanes, self.match, self.block = schedule.threads_per_row, schedule.rows_per_block, schedule.block
        self.grid = ThreadGrid(self.lanes, Var("match", "int32"), self.column)
        schedule.check_block()
        if self.match & (self.match - 1) or owned & (owned - 1):
            raise Unsupported("match lanes and owned indices must be powers of two")
        self.vec = s.vector(schedule.vector_bytes)
        if not self.vec:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide the columns")
        self.results = emitter_of(s.results, schedule, self.vec, tested=True)
        self.result, _ = self.results.pass_function(1, s.results.passes[1])
        self.nothing = Assign(_Adder.accumulated, closed([Return((ZERO,) * self.vec)])())
        if max(s.n_destinations, s.n_cols, *(one.n_tokens * owned for one in s.sums)) >= LIMIT:
            raise Unsupported("more indices or terms than 32-bit counters hold")
        self.chunk = self.lanes * self.vec
        self.chunks = -(-s.n_cols // self.chunk)
        self.partial = self.chunks * self.chunk > s.n_cols  # threads without columns
        self.warps = self.block // 32
        self.unroll = max(1, min(schedule.unroll, owned // self.match))
        # Words of shared memory: totals of warps, the list, and for each sum where the destinations begin and the
        # sorted list. Sums of the match lanes replace the list.
        step = max(self.block * one.place_vector * _packs(one, schedule) for one in s.sums)
        self.list = self.warps
        self.words = self.list + max(step, self.block * self.vec if self.match > 1 else 0)
        self.most_sorted = min(step, MOST_SORTED) if owned > 1 else 0
        self.ranges = max(LEAST_RANGES, owned // 4)
        self.sums: list[_Adder] = []
        for one in s.sums:
            self.sums.append(_Adder(one, schedule, self.vec, self.words))
            self.words += owned + 1 + self.most_sorted if owned > 1 else 0
        # A step of the scan is a function, so that it is compiled once: Numba spends most of its time there.
        self.scans = [closed([*self.scan(one), Return((self.found,), alone=True)]) for one in self.sums]

    def word(self, at: Expr) -> Item:
        return self.memory[Cast("uint32", at)]

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def add(self, one: _Adder, first: int, scale: int, flight: int, stride: int, end: Var) -> list[Stmt]:
        """Adds the terms listed at ``k``, ``k + stride`` and so on before ``end`` to the sums.

        Terms behind the end repeat the last one, and are not added.

        Args:
            first: word of the list; an entry is a token's number times ``scale``.
        """
        out: list[Stmt] = []
        terms = [(self.entry + u * stride if u else self.entry, Var(f"x{u}")) for u in range(flight)]
        for at, term in terms:
            out.append(Assign(CudaEmitter.row, self.word(Const(first) + least(as_int(at), end - 1))))
            out += [Assign(CudaEmitter.row, quotient(CudaEmitter.row, scale))] if scale > 1 else []
            out += [*before_pass(one.terms, 0), Assign(term, one.term({CudaEmitter.column.name: self.column}))]
        return out + [
            Assign(_Adder.accumulated, one.add({_Adder.taken.name: term, _Adder.on.name: at < end}))
            for at, term in terms
        ]

    def store(self, destination: Expr, sums: list[Var], ok: Expr) -> list[Stmt]:
        """Stores what is made of the sums of destination number ``destination`` of the block's where ``ok``. That of
        another destination is computed all the same, at the last one there is.
        """
        row = Assign(CudaEmitter.row, least(as_int(self.first + destination), self.s.n_destinations - 1))
        given = {
            CudaEmitter.column.name: self.column,
            self.results.kept(0).name: reduce(add, sums),
            CudaEmitter.ok.name: ok,
        }
        return [row, *before_pass(self.results, 1), Do(self.result(given))]

    def fetch(self) -> list[Stmt]:
        """Bring other tensors into the L2, each match lane those of its destinations."""
        e, chosen, across = self.results, fetchable(self.s), Var("across", "int32")
        if not self.schedule.prefetch or not chosen:
            return []
        out: list[Stmt] = [
            Assign(CudaEmitter.row, as_int(self.first + self.destination)),
            *e.row_indices(),
            *e.bases(chosen, ()),
        ]
        for i in chosen:
            lanes = max(1, LINE // (self.vec * STORAGE_BYTES[e.storage(i)]))
            at = e.access[i].at(e.base(i))
            line = Do(Intrinsic("to_l2", (Pointer(self.s.graph.values[i].slot), at)))
            out += [when((across % lanes).equals(0), [line])] if lanes > 1 else [line]
        before = [
            Assign(across, as_int(THREAD - self.grid.line * self.lanes)),
            Assign(CudaEmitter.column, self.column),
            *e.column_indices(),
        ]
        return [*before, loop(self.destination, self.rows, out, self.grid.line, self.match)]

    def scan(self, one: _Adder) -> list[Stmt]:
        """One step of the scan, over the indices from ``base`` on.

        The indices in ``[low, low + count)`` are appended to the list from entry ``total`` up to entry ``room``;
        ``found`` is their number. An entry is a token's number times ``owned`` plus the number of the destination.
        """
        out: list[Stmt] = []
        packs = [(p, Var(f"t{p}", "int32"), Var(f"g{p}")) for p in range(one.packs)]
        for p, token, pack in packs:
            out.append(Assign(token, as_int(self.base + (p * self.block + THREAD) * one.pick)))
            out.append(Assign(pack, one.destination({CudaEmitter.column.name: least(token, one.tokens - one.pick)})))
        hits = []  # whether it is one, the token, the destination
        for p, token, pack in packs:
            there = Var(f"on{p}", "bool")
            out.append(Assign(there, token < one.tokens))
            for e in range(one.pick):
                destination, hit = Var(f"d{p}_{e}", "int64"), Var(f"h{p}_{e}", "bool")
                out.append(Assign(destination, Cast("int64", pack[e]) - self.low))
                out.append(Assign(hit, both(there, both(destination >= 0, destination < self.count))))
                hits.append((hit, token + e, destination))
        own, upto, other, w = (Var(name, "int32") for name in ("own", "upto", "other", "w"))
        zero = Const(0, "int32")
        ones: list[Expr] = [Select(hit, Const(1, "int32"), zero) for hit, _, _ in hits]
        out += [Assign(own, as_int(reduce(add, ones))), Assign(upto, own)]
        for d in (1, 2, 4, 8, 16):
            out.append(
                Assign(other, shuffle_from(upto, as_int(Select(d <= self.lane, as_int(self.lane - d), self.lane))))
            )
            out.append(Assign(upto, as_int(upto + Select(d <= self.lane, other, zero))))
        out += [when(self.lane.equals(31), [Assign(self.word(self.warp), upto)]), BARRIER]
        before = [
            Assign(other, self.word(w)),
            when(w < self.warp, [Assign(self.at, as_int(self.at + other))]),
            Assign(self.found, as_int(self.found + other)),
        ]
        out += [Assign(self.at, as_int(self.total + upto - own)), Assign(self.found, zero), loop(w, self.warps, before)]
        listed = []
        for hit, number, destination in hits:
            entry = as_int(number * self.owned + (self.low - self.first) + destination)
            fits = when(self.at < self.room, [Assign(self.word(Const(self.list) + self.at), entry)])
            listed.append(when(hit, [fits, Assign(self.at, as_int(self.at + 1))]))
        return [*out, when(own > 0, listed), BARRIER]

    def sort(self, one: _Adder) -> list[Stmt]:
        """Sorts the list of ``total`` entries by destination: a warp a destination, in the order of the list."""
        first, e, token, destination, start, n, votes = (
            Var(name, "int32") for name in ("k0", "e", "token", "r0", "start", "n", "votes")
        )
        here, zero = Var("here", "bool"), Const(0, "int32")
        entry: list[Stmt] = [
            Assign(self.entry, as_int(first + self.lane)),
            Assign(e, self.word(Const(self.list) + least(self.entry, self.total - 1))),
            Assign(token, quotient(e, self.owned)),
            Assign(destination, as_int(e - token * self.owned)),
            Assign(_Adder.on, self.entry < self.total),
            Assign(here, both(_Adder.on, destination.equals(self.destination))),
        ]
        count = [
            Assign(start, as_int(start + bits_set(ballot(both(_Adder.on, destination < self.destination))))),
            Assign(n, as_int(n + bits_set(ballot(here)))),
        ]
        put = [
            Assign(votes, ballot(here)),
            when(here, [Assign(self.word(Const(one.sorted) + start + bits_set(votes & self.below)), token)]),
            Assign(start, as_int(start + bits_set(votes))),
        ]
        of_destination = [
            Assign(start, zero),
            Assign(n, zero),
            loop(first, self.total, [*entry, *count], step=32),
            when(self.lane.equals(0), [Assign(self.word(Const(one.begin) + self.destination), start)]),
            when(n > 0, [loop(first, self.total, [*entry, *put], step=32)]),
        ]
        end = Assign(self.word(Const(one.begin) + self.end), self.total)
        return [
            loop(self.destination, self.end, of_destination, as_int(self.begin + self.warp), self.warps),
            when(THREAD.equals(0), [end]),
            BARRIER,
        ]

    def join(self) -> list[Stmt]:
        """Brings the sums of all match lanes together in those of the first, two by two."""
        out: list[Stmt] = []
        step = self.match // 2
        at = [Const(self.list + e * self.block) + THREAD for e in range(self.vec)]
        while step:
            left = [Assign(self.lane_sums[Cast("uint32", at[e])], _Adder.accumulated[e]) for e in range(self.vec)]
            others = [self.lane_sums[Cast("uint32", at[e] + step * self.lanes)] for e in range(self.vec)]
            sums = Tuple(tuple(_Adder.accumulated[e] + x for e, x in enumerate(others)))
            out += [when(conjunction(step <= self.grid.line, 2 * step > self.grid.line), left), BARRIER]
            out.append(when(step > self.grid.line, [Assign(_Adder.accumulated, sums)]))
            step //= 2
        return [*out, BARRIER] if out else []

    # ---- the ways through a block's destinations ---------------------------------------------------------------------

    def alone(self) -> list[Stmt]:
        """A match lane takes destinations by itself, ``unroll`` at a time so that loads of other tensors are in flight
        together; those of many terms are left out."""
        out: list[Stmt] = []
        destinations = [(Var(f"r{q}", "int32"), Var(f"ok{q}", "bool")) for q in range(self.unroll)]
        ends = [(Var(f"start{n}", "int32"), Var(f"stop{n}", "int32")) for n in range(len(self.sums))]
        for q, (destination, ok) in enumerate(destinations):
            out += [Assign(destination, as_int(self.destination + q * self.match)), Assign(ok, destination < self.end)]
            out += [Assign(destination, least(destination, self.end - 1))] if q else []
            for one, (start, stop) in zip(self.sums, ends, strict=True):
                out.append(Assign(start, self.word(Const(one.begin) + destination)))
                out.append(Assign(stop, self.word(Const(one.begin + 1) + destination)))
                out.append(Assign(ok, Select(stop - start <= self.many, ok, FALSE)))
            for n, (one, (start, stop)) in enumerate(zip(self.sums, ends, strict=True)):
                out += [Assign(stop, Select(ok, stop, start)), self.nothing]
                out.append(loop(self.entry, stop, self.add(one, one.sorted, 1, FLIGHT, 1, stop), start, FLIGHT))
                out.append(Assign(Var(f"a{q}_{n}"), _Adder.accumulated))
        for q, (destination, ok) in enumerate(destinations):
            sums = [Var(f"a{q}_{n}") for n in range(len(self.sums))]
            out += self.store(destination, sums, both(self.inside, ok) if self.partial else ok)
        first = as_int(self.begin + self.grid.line)
        return [loop(self.destination, self.end, out, first, self.match * self.unroll)]

    @property
    def many(self) -> int:
        """Terms of a destination above which all match lanes share them."""
        return MANY * self.match if self.match > 1 else self.most_sorted

    def together(self) -> list[Stmt]:
        """Adds up the terms of destination number ``r`` of the block's, which all match lanes share as they are found,
        and stores the result.
        """
        step, zero = self.match * FLIGHT_TOGETHER, Const(0, "int32")
        out: list[Stmt] = [Assign(self.low, Cast("int64", self.first + self.destination))]
        out += [Assign(self.count, as_int(1)), Assign(self.total, zero)]
        sums = [Var(f"a_{n}") for n in range(len(self.sums))]
        for one, scan, total in zip(self.sums, self.scans, sums, strict=True):
            terms = self.add(one, self.list, self.owned, FLIGHT_TOGETHER, self.match, self.found)
            work = [Assign(self.found, scan()), loop(self.entry, self.found, terms, self.grid.line, step)]
            out += [Assign(self.room, as_int(one.step)), self.nothing, loop(self.base, one.tokens, work, step=one.step)]
            out += [BARRIER, *self.join(), Assign(total, _Adder.accumulated)]
        store = self.store(self.destination, sums, self.inside if self.partial else TRUE)
        return [*out, *([when(self.grid.line.equals(0), store)] if self.match > 1 else store)]

    def body(self) -> list[Stmt]:
        s, group = self.s, Var("group", "int32")
        out: list[Stmt] = [
            Assign(THREAD, ThreadIndex()),
            Assign(self.lane, as_int(THREAD & 31)),
            Assign(self.warp, quotient(THREAD, 32)),
            Assign(self.below, as_int((as_int(1) << self.lane) - 1)),
            Assign(self.grid.line, quotient(THREAD, self.lanes)),
            Assign(group, quotient(BLOCK, self.chunks)),
            Assign(self.first, as_int(group * self.owned)),
            Assign(self.rows, least(as_int(self.owned), s.n_destinations - self.first)),
            Assign(self.column, as_int((BLOCK - group * self.chunks) * self.chunk + self.grid.offset * self.vec)),
            Shared(self.memory, 0, "int32"),
        ]
        if self.partial:
            out += [
                Assign(self.inside, s.n_cols > self.column),
                Assign(self.column, least(self.column, s.n_cols - self.vec)),
            ]
        if self.match > 1:
            out.append(Shared(self.lane_sums, 0, "float32"))
        for one in self.sums:
            out += before_pass(one.destinations, 0)
        out += self.fetch()
        if self.owned == 1:
            return [*out, Assign(self.destination, as_int(0)), *self.together()]
        zero, retried, tries = Const(0, "int32"), int_var("retried"), int_var("tries")
        tried = [
            loop(self.tried, tries, [when(self.begin < self.rows, self.range_of_destinations(retried))]),
            Assign(tries, Select(self.begin < self.rows, Const(self.ranges + self.owned + 1, "int32"), zero)),
        ]
        out += [Assign(self.begin, zero), Assign(self.end, self.rows), Assign(tries, Const(1, "int32"))]
        return [*out, loop(retried, 2, tried)]  # one range, then as many as it takes

    def range_of_destinations(self, retried: Var) -> list[Stmt]:
        """Add up the terms of the destinations from number ``begin`` to ``end``, or make the range smaller.

        The first range is the whole block. If its terms exceed the list, the entry in the middle of the list is likely
        a term of the destination that has most. The next ranges are those before it, it alone, and those behind it.
        After ``ranges`` tries each range has one destination. A range of one is not listed again.
        """
        zero, middle = Const(0, "int32"), int_var("middle")
        alone, many, listed = Var("alone", "bool"), Var("many", "bool"), Unary("not ", self.full)
        out: list[Stmt] = [
            Assign(alone, (self.end - self.begin).equals(1)),
            Assign(self.full, Select(retried > 0, alone, FALSE)),
            Assign(self.low, Cast("int64", self.first + self.begin)),
            Assign(self.count, as_int(self.end - self.begin)),
            Assign(self.room, as_int(self.most_sorted)),
        ]
        for one, scan in zip(self.sums, self.scans, strict=True):
            step = [Assign(self.found, scan()), Assign(self.total, as_int(self.total + self.found))]
            tokens = Select(self.full, zero, Const(one.tokens, "int32"))
            out += [Assign(self.total, zero), loop(self.base, tokens, step, step=one.step)]
            entry = self.word(Const(self.list + self.most_sorted // 2))
            seen = [Assign(middle, entry), Assign(middle, as_int(middle - quotient(middle, self.owned) * self.owned))]
            sort = [when(listed, self.sort(one))]
            out.append(when(self.most_sorted < self.total, [*seen, Assign(self.full, TRUE)], sort))
        crowded = []
        for one in self.sums:
            terms = self.word(Const(one.begin + 1) + self.destination) - self.word(Const(one.begin) + self.destination)
            crowded.append(Assign(many, Select(terms > self.many, TRUE, many)))
        next_ = as_int(self.begin + 1)
        shorter = Assign(self.end, Select(middle > self.begin, middle, next_))
        is_cut = both(Unary("not ", alone), self.begin < self.rows)  # in front of the destination in the middle
        summed = [
            when(listed, self.alone()),
            loop(
                self.destination,
                self.end,
                [Assign(many, self.full), when(listed, crowded), when(many, self.together())],
                self.begin,
            ),
            Assign(self.begin, self.end),
            Assign(self.end, Select(is_cut, next_, self.rows)),
        ]
        return [
            *out,
            when(both(self.full, Unary("not ", alone)), [shorter], summed),
            when(self.tried >= self.ranges, [Assign(self.end, next_)]),
        ]

    def source(self) -> CudaSource:
        units = Units(-(-self.s.n_destinations // self.owned) * self.chunks)
        parts = [self.results, *(e for one in self.sums for e in (one.destinations, one.terms))]
        align = [max(need) for need in zip(*(part.alignments() for part in parts), strict=True)]
        extent, params, schedule = self.s.graph.extents[0], self.results.params(), self.schedule
        return CudaSource.scheduled(
            self.body(), params, schedule, Counts(), units, extent, align, blocks_per_sm=0, shared=4 * self.words
        )
