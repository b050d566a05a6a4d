"""The scatter skeleton: sums of rows at places that other data tell, each result written once and nothing atomically.

A block owns ``owned`` neighbouring places (rows of the result) and a chunk of the columns. It *scans* where all terms
go, and lists those that go to its own: counts by a warp's shuffles and the warps' totals make each one's number in the
list, so their order is the same every time. The list is *sorted* by place, a warp a place. Then threads lie as
``rows_per_block`` *match lanes* by ``threads_per_row`` threads on the columns. A match lane takes a place, adds its
terms in registers and stores what is made of the sum; a place of many terms is left to all match lanes together, whose
sums join in shared memory. Where more terms go to a block's places than the sorted list holds (padding, a column of
two), the block takes place by place and scans again for each.

What is read: the terms once, and the places once by each block, from the L2. What is read beside the sums may be
brought into the L2 while the places are scanned (``prefetch``), so that memory is busy then too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Function,
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
    both,
    expr,
    loop,
    when,
)
from autotune.compiler.kernel.reducers import ZERO
from autotune.compiler.kernel.rewrite import closed
from autotune.compiler.program.program import Program, stride_of
from autotune.compiler.program.scattered import Scattered, Sum, scattered
from autotune.compiler.program.vectors import narrowest
from autotune.compiler.targets.cuda.counts import LIMIT, Counts
from autotune.compiler.targets.cuda.device import (
    BARRIER,
    BLOCK,
    THREAD,
    Shared,
    ThreadIndex,
    ballot,
    bits_set,
    shuffle_from,
)
from autotune.compiler.targets.cuda.memory.access import COLUMN, FALSE, OK, ROW
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, ScatterSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph

MOST_SORTED = 2048
"""Terms of a block's places that it sorts; of more, it takes place by place."""
MOST_PACKS = 4
"""Packs of places that a thread reads at a time."""
MANY = 8
"""Terms of one place, for each match lane, from which on all match lanes share them."""
FLIGHT = 2
"""Terms that a thread has in flight where it has a place by itself, of few terms mostly."""
FLIGHT_TOGETHER = 6
"""The same where match lanes share a place of many: such a block may be the last one (a quarter of all terms is padding
in a translator's batches, and took 110 us of 164 with 4)."""


LINE = 128
"""Bytes that are brought into the L2 at a time."""


def fetchable(s: Scattered) -> tuple[int, ...]:
    """The loads beside the sums that may be fetched during the scan: by places, neighbours along the columns."""
    found = []
    for i in s.results.passes[1].compute:
        v = s.graph.values[i]
        if v.op == "load" and not v.guards and stride_of(v, s.cols[-1]) == 1 and stride_of(v, s.at):
            found.append(i)
    return tuple(found)


WORDS, SUMS = Var("si"), Var("sf")
"""Shared memory as whole numbers, and as the sums of the match lanes."""
LANE, WARP, MATCH, BELOW = (Var(name, "int32") for name in ("lane", "warp", "match", "below"))
"""Number of the thread in its warp, of the warp, of the match lane; a bit for each lane below."""
FIRST, ROWS, COL = (Var(name, "int32") for name in ("first", "rows", "col"))
"""The first place of the block, how many it has, and the thread's first column."""
BASE, LOW, COUNT, ROOM = Var("base"), Var("low", "int64"), Var("count", "int32"), Var("room", "int32")
"""Of a step of the scan: its first token, the first of the places that it looks for, how many, and the list's room."""
TOTAL, FOUND, AT, R, K = (Var(name, "int32") for name in ("total", "found", "at", "r", "k"))
OVER, INSIDE, ON = (Var(name, "bool") for name in ("over", "inside", "on"))
ACCUMULATED, TERM = Var("a"), Var("x")
"""A thread's sums, and the pack that is added to them."""
TRUE = Const(True, "bool")


def _int(x: Operand) -> Cast:
    return Cast("int32", expr(x))


def _word(at: Expr) -> Item:
    return WORDS[Cast("uint32", at)]


def _least(a: Expr, b: Operand) -> Intrinsic:
    return Intrinsic("least", (a, _int(b)), "int32")


def _quotient(x: Expr, n: int) -> Intrinsic:
    return Counts().quotient(x, n)


def _select(test: Expr, x: Expr) -> Select:
    """Both of two tests, without a branch."""
    return Select(test, x, FALSE)


def _emitter(program: Program, schedule: CudaSchedule, vec: int, *, tested: bool = False) -> CudaEmitter:
    loads = [i for i, v in enumerate(program.graph.values) if v.op == "load"]
    own = replace(schedule, rows_per_block=1, vector_bytes=vec * narrowest(program))
    return CudaEmitter(program, own, apart=loads, tested=tested)


def _before(part: CudaEmitter, q: int) -> list[Stmt]:
    """The row values and offsets that pass ``q`` of ``part`` takes, of row number ``row``."""
    pas = part.program.passes[q]
    values = [line for i in pas.row_values for line in part.row_value(i)]
    return [*part.row_indices(), *values, *part.bases(pas.compute, pas.stores)]


class _Adder:
    """One sum as a kernel sees it: how its places are read, and its terms; its part of shared memory.

    Attributes:
        place, term: functions that read a pack of places, and one of a term.
        add: function that adds a term to the sums where ``on``.
        step: tokens that a block scans at a time; ``packs`` of each thread.
        begin: word where it is written where the terms of each place begin in the sorted list.
        sorted: word where the sorted list begins.
        scan: function that is a step of the scan: the compiler's front takes most of its time for that, so it is there
            once.
    """

    scan: Function

    def __init__(self, one: Sum, schedule: CudaSchedule, vec: int) -> None:
        self.one, self.tokens, self.pick = one, one.n_tokens, one.place_vector
        self.places = _emitter(one.places, schedule, self.pick)
        self.terms = _emitter(one.terms, schedule, vec)
        self.packs = max(1, min(MOST_PACKS, -(-self.tokens // (schedule.block * self.pick))))
        self.step = schedule.block * self.pick * self.packs
        self.begin = self.sorted = 0
        self.place, _ = self.places.pass_function(0, one.places.passes[0])
        self.term, _ = self.terms.pass_function(0, one.terms.passes[0])
        packed = self.terms.packed(one.term)
        unpacked = [Assign(TERM, Unpack(self.terms.storage(one.term), vec, TERM))] if packed else []
        sums = tuple(ACCUMULATED[e] + Select(ON, TERM[e], ZERO) for e in range(vec))
        self.add = closed([*unpacked, Return(sums)])


class _Kernel:
    """The statements of one kernel."""

    def __init__(self, s: Scattered, schedule: ScatterSchedule) -> None:
        owned = schedule.owned
        self.s, self.schedule, self.owned = s, schedule, owned
        self.lanes, self.match, self.block = schedule.threads_per_row, schedule.rows_per_block, schedule.block
        schedule.check_block()
        if self.match & (self.match - 1) or owned & (owned - 1):
            raise Unsupported("match lanes and owned places are powers of two")
        self.vec = s.vector(schedule.vector_bytes)
        if not self.vec:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide the columns")
        self.results = _emitter(s.results, schedule, self.vec, tested=True)
        self.result, _ = self.results.pass_function(1, s.results.passes[1])
        self.nothing = Assign(ACCUMULATED, closed([Return((ZERO,) * self.vec)])())
        self.sums = [_Adder(one, schedule, self.vec) for one in s.sums]
        if max(s.n_places, s.n_cols, *(one.tokens * owned for one in self.sums)) >= LIMIT:
            raise Unsupported("more places or terms than 32-bit counters hold")
        self.chunk = self.lanes * self.vec
        self.chunks = -(-s.n_cols // self.chunk)
        self.partial = self.chunks * self.chunk > s.n_cols  # threads without columns
        self.warps = self.block // 32
        self.unroll = max(1, min(schedule.unroll, owned // self.match))
        # Words of shared memory: totals of warps, the list, and for each sum where the places begin and the sorted
        # list. Sums of the match lanes take the place of the list.
        step = max(one.step for one in self.sums)
        self.list = self.warps
        self.words = self.list + max(step, self.block * self.vec if self.match > 1 else 0)
        self.most_sorted = min(step, MOST_SORTED) if owned > 1 else 0
        for one in self.sums if owned > 1 else ():
            one.begin, one.sorted = self.words, self.words + owned + 1
            self.words = one.sorted + self.most_sorted
        for one in self.sums:
            one.scan = closed([*self.scan(one), Return((FOUND,), alone=True)])

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def add(self, one: _Adder, first: int, scale: int, flight: int, stride: int, end: Var) -> list[Stmt]:
        """Adds the terms listed at ``k``, ``k + stride`` and so on before ``end`` to the sums.

        What lies behind the end is read as the last one is, and not added.

        Args:
            first: word of the list; an entry is a token's number times ``scale``.
        """
        out: list[Stmt] = []
        terms = [(K + u * stride if u else K, Var(f"x{u}")) for u in range(flight)]
        for at, term in terms:
            out.append(Assign(ROW, _word(Const(first) + _least(_int(at), end - 1))))
            out += [Assign(ROW, _quotient(ROW, scale))] if scale > 1 else []
            out += [*_before(one.terms, 0), Assign(term, one.term({COLUMN.name: COL}))]
        return out + [Assign(ACCUMULATED, one.add({TERM.name: term, ON.name: at < end})) for at, term in terms]

    def store(self, place: Expr, sums: list[Var], ok: Expr) -> list[Stmt]:
        """Stores what is made of the sums of place number ``place`` of the block's where ``ok``. That of another place
        is computed all the same, at the last one there is."""
        row = Assign(ROW, _least(_int(FIRST + place), self.s.n_places - 1))
        given = {COLUMN.name: COL, self.results.kept(0).name: reduce(add, sums), OK.name: ok}
        return [row, *_before(self.results, 1), Do(self.result(given))]

    def fetch(self) -> list[Stmt]:
        """Has what is read beside the sums brought into the L2, each match lane its places."""
        e, chosen, across = self.results, fetchable(self.s), Var("across", "int32")
        if not self.schedule.prefetch or not chosen:
            return []
        out: list[Stmt] = [Assign(ROW, _int(FIRST + R)), *e.row_indices(), *e.bases(chosen, ())]
        for i in chosen:
            lanes = max(1, LINE // (self.vec * STORAGE_BYTES[e.storage(i)]))
            at = e.access[i].at(e.base(i))
            line = Do(Intrinsic("to_l2", (Pointer(self.s.graph.values[i].slot), at)))
            out += [when((across % lanes).equals(0), [line])] if lanes > 1 else [line]
        before = [Assign(across, _int(THREAD - MATCH * self.lanes)), Assign(COLUMN, COL), *e.column_indices()]
        return [*before, loop(R, ROWS, out, MATCH, self.match)]

    def scan(self, one: _Adder) -> list[Stmt]:
        """One step of the scan: of the places from ``base`` on, those in ``[low, low + count)`` are put into the list
        from number ``total`` on, as far as the number ``room``, and ``found`` is how many there are.

        An entry is a token's number times ``owned`` plus the number of the place.
        """
        out: list[Stmt] = []
        packs = [(p, Var(f"t{p}", "int32"), Var(f"g{p}")) for p in range(one.packs)]
        for p, token, pack in packs:
            out.append(Assign(token, _int(BASE + (p * self.block + THREAD) * one.pick)))
            out.append(Assign(pack, one.place({COLUMN.name: _least(token, one.tokens - one.pick)})))
        hits = []  # whether it is one, the token, the place
        for p, token, pack in packs:
            there = Var(f"on{p}", "bool")
            out.append(Assign(there, token < one.tokens))
            for e in range(one.pick):
                place, hit = Var(f"d{p}_{e}", "int64"), Var(f"h{p}_{e}", "bool")
                out.append(Assign(place, Cast("int64", pack[e]) - LOW))
                out.append(Assign(hit, _select(there, _select(place >= 0, place < COUNT))))
                hits.append((hit, token + e, place))
        own, upto, other, w = (Var(name, "int32") for name in ("own", "upto", "other", "w"))
        zero = Const(0, "int32")
        ones: list[Expr] = [Select(hit, Const(1, "int32"), zero) for hit, _, _ in hits]
        out += [Assign(own, _int(reduce(add, ones))), Assign(upto, own)]
        for d in (1, 2, 4, 8, 16):
            out.append(Assign(other, shuffle_from(upto, _int(Select(d <= LANE, _int(LANE - d), LANE)))))
            out.append(Assign(upto, _int(upto + Select(d <= LANE, other, zero))))
        out += [when(LANE.equals(31), [Assign(_word(WARP), upto)]), BARRIER]
        before = [
            Assign(other, _word(w)),
            when(w < WARP, [Assign(AT, _int(AT + other))]),
            Assign(FOUND, _int(FOUND + other)),
        ]
        out += [Assign(AT, _int(TOTAL + upto - own)), Assign(FOUND, zero), loop(w, self.warps, before)]
        listed = []
        for hit, number, place in hits:
            entry = _int(number * self.owned + (LOW - FIRST) + place)
            fits = when(AT < ROOM, [Assign(_word(Const(self.list) + AT), entry)])
            listed.append(when(hit, [fits, Assign(AT, _int(AT + 1))]))
        return [*out, when(own > 0, listed), BARRIER]

    def sort(self, one: _Adder) -> list[Stmt]:
        """Sorts the list of ``total`` entries by place: a warp a place, in the order of the list."""
        first, e, token, place, start, n, votes = (
            Var(name, "int32") for name in ("k0", "e", "token", "r0", "start", "n", "votes")
        )
        here, zero = Var("here", "bool"), Const(0, "int32")
        entry: list[Stmt] = [
            Assign(K, _int(first + LANE)),
            Assign(e, _word(Const(self.list) + _least(K, TOTAL - 1))),
            Assign(token, _quotient(e, self.owned)),
            Assign(place, _int(e - token * self.owned)),
            Assign(ON, K < TOTAL),
            Assign(here, _select(ON, place.equals(R))),
        ]
        count = [
            Assign(start, _int(start + bits_set(ballot(_select(ON, place < R))))),
            Assign(n, _int(n + bits_set(ballot(here)))),
        ]
        put = [
            Assign(votes, ballot(here)),
            when(here, [Assign(_word(Const(one.sorted) + start + bits_set(votes & BELOW)), token)]),
            Assign(start, _int(start + bits_set(votes))),
        ]
        of_place = [
            Assign(start, zero),
            Assign(n, zero),
            loop(first, TOTAL, [*entry, *count], step=32),
            when(LANE.equals(0), [Assign(_word(Const(one.begin) + R), start)]),
            when(n > 0, [loop(first, TOTAL, [*entry, *put], step=32)]),
        ]
        end = Assign(_word(Const(one.begin + self.owned)), TOTAL)
        return [loop(R, self.owned, of_place, WARP, self.warps), when(THREAD.equals(0), [end]), BARRIER]

    def join(self) -> list[Stmt]:
        """Brings the sums of all match lanes together in those of the first, two by two."""
        out: list[Stmt] = []
        step = self.match // 2
        at = [Const(self.list + e * self.block) + THREAD for e in range(self.vec)]
        while step:
            left = [Assign(SUMS[Cast("uint32", at[e])], ACCUMULATED[e]) for e in range(self.vec)]
            others = [SUMS[Cast("uint32", at[e] + step * self.lanes)] for e in range(self.vec)]
            sums = Tuple(tuple(ACCUMULATED[e] + x for e, x in enumerate(others)))
            out += [when(both(step <= MATCH, 2 * step > MATCH), left), BARRIER]
            out.append(when(step > MATCH, [Assign(ACCUMULATED, sums)]))
            step //= 2
        return [*out, BARRIER] if out else []

    # ---- the ways through a block's places --------------------------------------------------------------------------

    def alone(self) -> list[Stmt]:
        """A match lane takes places by itself, ``unroll`` at a time so that what is read beside the sums is in flight
        together; those of many terms are left out."""
        out: list[Stmt] = []
        places = [(Var(f"r{q}", "int32"), Var(f"ok{q}", "bool")) for q in range(self.unroll)]
        ends = [(Var(f"start{n}", "int32"), Var(f"stop{n}", "int32")) for n in range(len(self.sums))]
        for q, (place, ok) in enumerate(places):
            out += [Assign(place, _int(R + q * self.match)), Assign(ok, place < ROWS)]
            for one, (start, stop) in zip(self.sums, ends, strict=True):
                out.append(Assign(start, _word(Const(one.begin) + place)))
                out.append(Assign(stop, _word(Const(one.begin + 1) + place)))
                out.append(Assign(ok, Select(stop - start <= self.many, ok, FALSE)))
            for n, (one, (start, stop)) in enumerate(zip(self.sums, ends, strict=True)):
                out += [Assign(stop, Select(ok, stop, start)), self.nothing]
                out.append(loop(K, stop, self.add(one, one.sorted, 1, FLIGHT, 1, stop), start, FLIGHT))
                out.append(Assign(Var(f"a{q}_{n}"), ACCUMULATED))
        for q, (place, ok) in enumerate(places):
            sums = [Var(f"a{q}_{n}") for n in range(len(self.sums))]
            out += self.store(place, sums, _select(INSIDE, ok) if self.partial else ok)
        return [loop(R, self.owned, out, MATCH, self.match * self.unroll)]

    @property
    def many(self) -> int:
        """Terms of a place above which all match lanes share them."""
        return MANY * self.match if self.match > 1 else self.most_sorted

    def together(self) -> list[Stmt]:
        """Adds up the terms of place number ``r`` of the block's, which all match lanes share as they are found, and
        stores the result."""
        step, zero = self.match * FLIGHT_TOGETHER, Const(0, "int32")
        out: list[Stmt] = [Assign(LOW, Cast("int64", FIRST + R)), Assign(COUNT, _int(1)), Assign(TOTAL, zero)]
        sums = [Var(f"a_{n}") for n in range(len(self.sums))]
        for one, total in zip(self.sums, sums, strict=True):
            terms = self.add(one, self.list, self.owned, FLIGHT_TOGETHER, self.match, FOUND)
            work = [Assign(FOUND, one.scan()), loop(K, FOUND, terms, MATCH, step)]
            out += [Assign(ROOM, _int(one.step)), self.nothing, loop(BASE, one.tokens, work, step=one.step)]
            out += [BARRIER, *self.join(), Assign(total, ACCUMULATED)]
        store = self.store(R, sums, INSIDE if self.partial else TRUE)
        return [*out, *([when(MATCH.equals(0), store)] if self.match > 1 else store)]

    def body(self) -> list[Stmt]:
        s, group = self.s, Var("group", "int32")
        out: list[Stmt] = [
            Assign(THREAD, ThreadIndex()),
            Assign(LANE, _int(THREAD & 31)),
            Assign(WARP, _quotient(THREAD, 32)),
            Assign(BELOW, _int((_int(1) << LANE) - 1)),
            Assign(MATCH, _quotient(THREAD, self.lanes)),
            Assign(group, _quotient(BLOCK, self.chunks)),
            Assign(FIRST, _int(group * self.owned)),
            Assign(ROWS, _least(_int(self.owned), s.n_places - FIRST)),
            Assign(
                COL,
                _int((BLOCK - group * self.chunks) * self.chunk + (THREAD - MATCH * self.lanes) * self.vec),
            ),
            Shared(WORDS, 0, "int32"),
        ]
        if self.partial:
            out += [Assign(INSIDE, s.n_cols > COL), Assign(COL, _least(COL, s.n_cols - self.vec))]
        if self.match > 1:
            out.append(Shared(SUMS, 0, "float32"))
        for one in self.sums:
            out += _before(one.places, 0)
        out += self.fetch()
        if self.owned == 1:
            return [*out, Assign(R, _int(0)), *self.together()]
        out += [Assign(LOW, Cast("int64", FIRST)), Assign(COUNT, ROWS)]
        out += [Assign(ROOM, _int(self.most_sorted)), Assign(OVER, FALSE)]
        for one in self.sums:
            listed = [Assign(FOUND, one.scan()), Assign(TOTAL, _int(TOTAL + FOUND))]
            out += [Assign(TOTAL, _int(0)), loop(BASE, one.tokens, listed, step=one.step)]
            out.append(when(self.most_sorted < TOTAL, [Assign(OVER, TRUE)], self.sort(one)))
        many = Var("many", "bool")
        crowded = []
        for one in self.sums:
            terms = _word(Const(one.begin + 1) + R) - _word(Const(one.begin) + R)
            crowded.append(Assign(many, Select(terms > self.many, TRUE, many)))
        alone = Unary("not ", OVER)
        out.append(when(alone, self.alone()))
        each = [Assign(many, OVER), when(alone, crowded), when(many, self.together())]
        return [*out, loop(R, ROWS, each)]

    def source(self) -> CudaSource:
        groups = -(-self.s.n_places // self.owned)
        parts = [self.results, *(e for one in self.sums for e in (one.places, one.terms))]
        return CudaSource.scheduled(
            self.body(),
            self.results.params(),
            self.schedule,
            Counts(),
            self.s.graph.extents[0],
            dynamic=False,
            inner=groups * self.chunks,
            per_block=1,
            blocks_per_sm=0,
            shared=4 * self.words,
            align=[max(need) for need in zip(*(part.alignments() for part in parts), strict=True)],
        )


def emit_scatter(graph: Graph, schedule: ScatterSchedule) -> CudaSource:
    """The kernel of a group with sums at places.

    Args:
        schedule: ``threads_per_row`` threads lie along the columns, ``rows_per_block`` are the match lanes, ``unroll``
            places are stored at a time, and a block has ``owned`` of them.

    Raises:
        Unsupported: it is no such group, or the schedule does not fit it.
    """
    if any(n == 0 for n in graph.extents):
        raise Unsupported("an empty axis")
    return _Kernel(scattered(graph), schedule).source()
