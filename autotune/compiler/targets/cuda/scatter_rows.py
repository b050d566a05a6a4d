"""The scatter_rows skeleton: index-add along rows that have separate indices, without atomic additions.

A warp has one key, the rows with equal indices. It reads the key's indices once and finds the *position* of each term
such that those of equal indices are adjacent, by counting. For each row of the key, the terms go to their positions in
shared memory. The warp lists the sums of several terms, and a lane adds those of one to
the first. Then each lane reads its sums, and computes and stores what follows them. So a result is written once, and
results do not vary from run to run.

Equal indices among the 32 of a step are found by a ballot for each bit of an index. On an H200, ``match.any`` takes
about 67 cycles of a multiprocessor.

If adjacent terms belong to adjacent keys (the second of two gradients in disentangled attention), the block reads them
for all its warps.
"""

from __future__ import annotations

from autotune.compiler.kernel.lower import ZERO
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Item,
    Select,
    Stmt,
    Tuple,
    Unpack,
    Var,
    loop,
    when,
)
from autotune.compiler.program.scattered import ScatteredRows
from autotune.compiler.targets.cuda.device import (
    BARRIER,
    BLOCK,
    LIMIT,
    THREAD,
    WARP_BARRIER,
    Counts,
    Shared,
    ThreadIndex,
    Units,
    Words,
    ballot,
    bits_set,
    put,
    rounds,
    shuffle_from,
    take,
)
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.scatter import as_int, before_pass, both, emitter_of, least
from autotune.compiler.targets.cuda.source import CudaSource, ScatterSchedule
from autotune.compiler.targets.cuda.threads import WARP, int_var, quotient
from autotune.errors import Unsupported

MOST_LISTED = 1024
"""Most tokens whose positions a warp finds once for all rows of a key."""
LISTED = 512
"""Tokens that it sorts at a time if there are more. Shared memory then has the sums too."""
_FILLED = 4
"""Adjacent counts that a lane fills at a time."""
_COUNT_BITS = 11
"""Bits of the number of terms of a sum, with the first position above them in an entry of the list of several terms."""
ZERO_INT, ONE_INT = Const(0, "int32"), Const(1, "int32")
_PIECE = Const(4, "int32")


class ScatterRowsKernel:
    """The kernel of a group with one sum at indices along rows. Raises Unsupported where the schedule does not fit.

    Of a schedule ``rows_per_block`` are the warps of a block, each with a key. A block computes ``owned`` rows of each
    key. A thread has ``unroll`` vectors of terms in flight.
    """

    floats, numbers, words32 = Var("sf"), Var("si"), Var("sw")
    """Shared memory as terms and sums, as numbers, and as words of vectors."""
    lane, warp = int_var("lane"), int_var("warp")
    """Number of the thread in its warp, and of the warp."""
    first, key, repeat, base = int_var("first"), int_var("key"), int_var("repeat"), int_var("base")
    """The first key of the block and that of the warp, the row of the key, the first token of a list."""
    inside = Var("inside", "bool")
    """True if the warp's key exists."""
    step, token, column = int_var("step"), int_var("token"), int_var("p")
    own_terms, own_positions, own_starts, own_several = (int_var(x) for x in ("mine", "own", "counts", "several"))
    """Where the warp's parts of shared memory begin: terms, their positions, the first position of each index, and the
    sums of several terms. Positions count from the beginning of shared memory."""
    n_several = int_var("many")
    """Number of the key's sums of several terms."""
    below = int_var("below")
    """A bit for each lane before this one."""
    taken = Var("x")
    """The numbers of a pack of terms."""

    def __init__(self, s: ScatteredRows, schedule: ScatterSchedule) -> None:
        schedule.check_block()
        self.s, self.schedule, self.warps = s, schedule, schedule.rows_per_block
        self.vec = s.vector(schedule.vector_bytes)
        if not self.vec:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide terms and results")
        if schedule.threads_per_row != WARP:
            raise Unsupported("a row has a warp")
        if s.is_across and self.warps % self.vec:
            raise Unsupported("vectors of terms for more rows than a block has")
        if max(s.terms.n_rows, s.terms.n_cols, s.results.n_rows) >= LIMIT:
            raise Unsupported("more rows or terms than 32-bit counters hold")
        self.destinations = emitter_of(s.destinations, schedule, s.pick)
        self.terms = emitter_of(s.terms, schedule, self.vec)
        self.results = emitter_of(s.results, schedule, self.vec, tested=True)
        self.destination, _ = self.destinations.pass_function(0, s.destinations.passes[0])
        self.term, _ = self.terms.pass_function(0, s.terms.passes[0])
        self.result, _ = self.results.pass_function(1, s.results.passes[1])
        self.barrier = BARRIER if s.is_across else WARP_BARRIER
        whole = -(-s.n_tokens // WARP) * WARP
        self.listed = whole if whole <= MOST_LISTED else LISTED
        self.in_lists = self.listed < s.n_tokens
        self.zero = self.own_terms + self.listed
        # Words of shared memory: terms and a zero, positions, starts (the last one is of indices outside), the list of
        # sums of several terms, and all sums if there are several lists. The terms of adjacent keys begin in separate
        # banks.
        self.stride = self.listed + (max(1, 4 * self.vec // self.warps) if s.is_across else 4)
        self.row = -(-(s.n_destinations + 1) // _FILLED) * _FILLED
        self.at_positions = self.warps * self.stride
        self.at_starts = -(-2 * self.at_positions // 4) * 4
        self.at_several = self.at_starts + self.warps * self.row
        self.at_sums = self.at_several + self.warps * (self.listed // 2)
        self.words = self.at_sums + (self.warps * self.row if self.in_lists else 0)
        self.parts = -(-s.n_repeats // schedule.owned)
        self.groups = -(-s.n_keys // self.warps)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def float_at(self, place: Expr) -> Item:
        return self.floats[Cast("uint32", place)]

    def number_at(self, place: Expr) -> Item:
        return self.numbers[Cast("uint32", place)]

    def words_at(self, place: Expr) -> Words:
        """The words of a pack in shared memory."""
        return self.words32, as_int(place), _PIECE

    def sums(self) -> Words:
        """The words of a pack of the warp's sums."""
        return self.words_at(self.warp * self.row + self.at_sums + self.column)

    # ---- positions --------------------------------------------------------------------------------------------------

    def listing(self) -> list[Stmt]:
        """Finds the positions of the terms of the warp's key from token ``base`` on.

        The place of the terms has their indices meanwhile. An index outside becomes the number of destinations.
        """
        s, value, pack, done = self.s, Var("v", "int64"), Var("g"), Var("done", "int32")
        some: list[Stmt] = [
            Assign(
                pack, self.destination({CudaEmitter.column.name: least(self.base + self.token, s.n_tokens - s.pick)})
            )
        ]
        for e in range(s.pick):
            there = self.base + self.token + e < s.n_tokens
            valid = both(there, both(value >= 0, value < s.n_destinations))
            some.append(Assign(value, Cast("int64", pack[e])))
            listed = as_int(Select(valid, as_int(value), Const(s.n_destinations, "int32")))
            some.append(Assign(self.number_at(self.own_terms + self.token + e), listed))
        none = put(self.words_at(self.own_starts + self.column), (as_int(self.zero),) * _FILLED, "int32")
        position = self.number_at(self.own_positions + self.token)
        start = self.number_at(self.own_starts + self.number_at(self.own_terms + self.token))
        return [
            Assign(CudaEmitter.row, self.key),
            *before_pass(self.destinations, 0),
            loop(self.token, self.listed, some, as_int(self.lane * s.pick), WARP * s.pick),
            loop(self.column, self.row, [none], as_int(self.lane * _FILLED), WARP * _FILLED),
            WARP_BARRIER,
            loop(self.step, self.listed, self.counting(), step=WARP),
            Assign(done, self.own_terms),
            Assign(self.n_several, ZERO_INT),
            loop(self.step, self.listed, self.starting(done), step=WARP),
            WARP_BARRIER,
            loop(self.token, self.listed, [Assign(position, as_int(position + start))], self.lane, WARP),
            self.barrier,
        ]

    def counting(self) -> list[Stmt]:
        """Counts the indices of the step from token ``step`` on; a term's position is the number of equal ones before.

        A bit of ``equal`` is set for each lane with the same index. The count of an index begins at the position of a
        zero, where an index without terms remains.
        """
        index, equal, bit, one, lower, before = (
            Var(name, "int32") for name in ("i", "equal", "bit", "one", "lower", "before")
        )
        count = self.number_at(self.own_starts + index)
        agree = ballot(one.differs(0)) ^ (one - 1)
        return [
            Assign(index, self.number_at(self.own_terms + self.step + self.lane)),
            Assign(equal, Const(-1, "int32")),
            loop(
                bit,
                rounds(self.s.n_destinations.bit_length()),
                [Assign(one, as_int((index >> bit) & 1)), Assign(equal, as_int(equal & agree))],
            ),
            Assign(lower, bits_set(as_int(equal & self.below))),
            Assign(before, count),
            Assign(self.number_at(self.own_positions + self.step + self.lane), as_int(before + lower - self.zero)),
            WARP_BARRIER,
            when(lower.equals(0), [Assign(count, as_int(before + bits_set(equal)))]),
            WARP_BARRIER,
        ]

    def starting(self, done: Var) -> list[Stmt]:
        """Replaces the count of each index by its first position, in the order of the first terms.

        ``done`` is the first position that is not used. The sums of several terms are listed.
        """
        index, own, total, further, voted = (Var(name, "int32") for name in ("i", "n", "total", "further", "voted"))
        is_first, several = Var("is_first", "bool"), Var("is_several", "bool")
        start = self.number_at(self.own_starts + index)
        entry = self.number_at(self.own_several + self.n_several + bits_set(as_int(voted & self.below)))
        scan: list[Stmt] = []
        for distance in (1, 2, 4, 8, 16):
            there = self.lane >= distance
            scan.append(Assign(further, shuffle_from(total, as_int(Select(there, self.lane - distance, self.lane)))))
            scan.append(Assign(total, as_int(total + Select(there, further, ZERO_INT))))
        return [
            Assign(index, self.number_at(self.own_terms + self.step + self.lane)),
            Assign(is_first, self.number_at(self.own_positions + self.step + self.lane).equals(0)),
            Assign(own, ZERO_INT),
            when(is_first, [Assign(own, as_int(start - self.zero))]),
            Assign(total, own),
            *scan,
            Assign(further, as_int(done + total - own)),
            when(is_first, [Assign(start, further)]),
            Assign(several, both(own > 1, index < self.s.n_destinations)),
            Assign(voted, ballot(several)),
            when(several, [Assign(entry, as_int((further << _COUNT_BITS) + own))]),
            Assign(self.n_several, as_int(self.n_several + bits_set(voted))),
            Assign(done, as_int(done + shuffle_from(total, Const(WARP - 1, "int32")))),
        ]

    # ---- rows -------------------------------------------------------------------------------------------------------

    def unpacked(self, pack: Expr) -> list[Stmt]:
        """Sets ``x`` to the numbers of a pack of terms."""
        packed = self.terms.packed(self.s.term)
        return [Assign(self.taken, Unpack(self.terms.storage(self.s.term), self.vec, pack) if packed else pack)]

    def staging(self) -> list[Stmt]:
        """Brings the terms of row ``repeat`` of each key, from token ``base`` on, to their positions."""
        return self.across() if self.s.is_across else self.along()

    def along(self) -> list[Stmt]:
        """The same for the warp's key, by the warp."""
        s, vec, flight = self.s, self.vec, self.flight(self.listed // self.vec, WARP)
        spots = [as_int(self.token + u * WARP * vec) for u in range(flight)]
        packs, positions = [Var(f"x{u}") for u in range(flight)], Var("to")
        work: list[Stmt] = []
        for spot, pack in zip(spots, packs, strict=True):
            column = least(self.base + spot, s.n_tokens - vec)
            work.append(Assign(pack, self.term({CudaEmitter.column.name: column})))
        for spot, pack in zip(spots, packs, strict=True):
            work += self.unpacked(pack)
            write: list[Stmt] = [Assign(positions, take("int32", vec, self.words_at(self.own_positions + spot)))]
            write += [Assign(self.float_at(positions[e]), self.taken[e]) for e in range(vec)]
            exact = flight == 1 and self.listed % (WARP * vec) == 0
            work += write if exact else [when(spot < self.listed, write)]
        return [
            Assign(CudaEmitter.row, as_int(self.repeat * s.n_keys + self.key)),
            *before_pass(self.terms, 0),
            loop(self.token, self.listed, work, as_int(self.lane * vec), WARP * vec * flight),
        ]

    def across(self) -> list[Stmt]:
        """The same for all keys of the block, by the block."""
        s, vec, block = self.s, self.vec, self.schedule.block
        inner, many = s.graph.extents[s.keys[-1]], self.warps // vec
        flight = self.flight(self.listed * many, block)
        number, pack, outer, column = (Var(name, "int32") for name in ("q", "pack", "outer", "column"))
        work: list[Stmt] = []
        spots = []
        for u in range(flight):
            spot, terms = Var(f"spot{u}", "int32"), Var(f"x{u}")
            work += [
                Assign(self.token, quotient(as_int(number + u * block), many)),
                Assign(pack, as_int(number + u * block - self.token * many)),
                Assign(spot, as_int(pack * (vec * self.stride) + self.at_positions + self.token)),
                Assign(column, least(self.first + pack * vec, s.n_keys - vec)),
                Assign(outer, quotient(column, inner)),
                Assign(column, as_int(column - outer * inner)),
                Assign(outer, as_int(self.repeat * (s.n_keys // inner) + outer)),
                Assign(CudaEmitter.row, as_int(outer * s.n_tokens + least(self.base + self.token, s.n_tokens - 1))),
                *before_pass(self.terms, 0),
                Assign(terms, self.term({CudaEmitter.column.name: column})),
            ]
            spots.append((as_int(number + u * block), spot, terms))
        exact = self.listed * many % (block * flight) == 0
        for place, spot, terms in spots:
            writes = self.unpacked(terms)
            writes += [Assign(self.float_at(self.number_at(spot + e * self.stride)), self.taken[e]) for e in range(vec)]
            work += writes if exact else [when(place < self.listed * many, writes)]
        return [loop(number, self.listed * many, work, THREAD, block * flight)]

    def flight(self, packs: int, threads: int) -> int:
        """Vectors that a thread has in flight, of ``packs`` that ``threads`` share."""
        return max(1, min(self.schedule.unroll, -(-packs // threads)))

    def joining(self) -> list[Stmt]:
        """Adds the terms of each sum of several terms to its first term."""
        number, entry, start, k = (Var(name, "int32") for name in ("q", "several_at", "start", "k"))
        total = Var("total", "float32")
        work: list[Stmt] = [
            Assign(entry, self.number_at(self.own_several + number)),
            Assign(start, as_int(entry >> _COUNT_BITS)),
            Assign(total, self.float_at(start)),
            loop(
                k,
                as_int(start + (entry & ((1 << _COUNT_BITS) - 1))),
                [Assign(total, total + self.float_at(k))],
                as_int(start + 1),
            ),
            Assign(self.float_at(start), total),
        ]
        return [loop(number, self.n_several, work, self.lane, WARP), WARP_BARRIER]

    def adding(self) -> list[Stmt]:
        """Reads the sums of the lane's destinations from ``column`` on, one variable for each."""
        first, before, totals = Var("c"), Var("z"), self.totals()
        out: list[Stmt] = [Assign(first, take("int32", self.vec, self.words_at(self.own_starts + self.column)))]
        out += [Assign(total, self.float_at(first[e])) for e, total in enumerate(totals)]
        if self.in_lists:
            out.append(Assign(before, take("float32", self.vec, self.sums())))
            out += [Assign(total, before[e] + total) for e, total in enumerate(totals)]
        return out

    def totals(self) -> list[Var]:
        return [Var(f"t{e}", "float32") for e in range(self.vec)]

    def each_pack(self, work: list[Stmt]) -> Stmt:
        """``work`` for each pack of the lane's destinations."""
        start, step = as_int(self.lane * self.vec), WARP * self.vec
        return loop(self.column, self.s.n_destinations, work, start, step)

    def clear(self) -> list[Stmt]:
        return [put(self.sums(), (ZERO,) * self.vec)]

    def storing(self) -> list[Stmt]:
        """Stores what the warp's sums make."""
        s, found = self.s, Var("z")
        given = {
            CudaEmitter.column.name: self.column,
            self.results.kept(0).name: found,
            CudaEmitter.ok.name: self.inside,
        }
        if self.in_lists:
            work = [Assign(found, take("float32", self.vec, self.sums())), *self.clear()]
        else:
            work = [*self.adding(), Assign(found, Tuple(tuple(self.totals())))]
        return [
            Assign(CudaEmitter.row, as_int(self.repeat * s.n_keys + self.key)),
            *before_pass(self.results, 1),
            self.each_pack([*work, Do(self.result(given))]),
            self.barrier,
        ]

    def body(self) -> list[Stmt]:
        s, part = self.s, Var("part", "int32")
        work = [*self.staging(), self.barrier, *self.joining()]
        before = self.listing()
        if self.in_lists:
            work += [self.each_pack([*self.adding(), put(self.sums(), tuple(self.totals()))]), self.barrier]
            work = [loop(self.base, s.n_tokens, [*before, *work], step=self.listed)]
            before = [self.each_pack(self.clear())]
        start = as_int(part * self.schedule.owned)
        return [
            Assign(THREAD, ThreadIndex()),
            Assign(self.lane, as_int(THREAD & (WARP - 1))),
            Assign(self.warp, quotient(THREAD, WARP)),
            Assign(part, quotient(BLOCK, self.groups)),
            Assign(self.first, as_int((BLOCK - part * self.groups) * self.warps)),
            Assign(self.inside, self.first + self.warp < s.n_keys),
            Assign(self.key, least(self.first + self.warp, s.n_keys - 1)),
            Assign(self.base, ZERO_INT),
            Assign(self.below, as_int((ONE_INT << self.lane) - 1)),
            Assign(self.own_terms, as_int(self.warp * self.stride)),
            Assign(self.own_positions, as_int(Const(self.at_positions) + self.warp * self.stride)),
            Assign(self.own_starts, as_int(Const(self.at_starts) + self.warp * self.row)),
            Assign(self.own_several, as_int(Const(self.at_several) + self.warp * (self.listed // 2))),
            Shared(self.floats, 0, "float32"),
            Shared(self.numbers, 0, "int32"),
            Shared(self.words32, 0, "uint32"),
            when(self.lane.equals(0), [Assign(self.float_at(self.zero), ZERO)]),
            *before,
            loop(self.repeat, least(start + self.schedule.owned, s.n_repeats), [*work, *self.storing()], start),
        ]

    def source(self) -> CudaSource:
        parts = [self.results, self.destinations, self.terms]
        align = [max(need) for need in zip(*(part.alignments() for part in parts), strict=True)]
        extent, params, units = self.s.graph.extents[0], self.results.params(), Units(self.groups * self.parts)
        return CudaSource.scheduled(
            self.body(), params, self.schedule, Counts(), units, extent, align, blocks_per_sm=0, shared=4 * self.words
        )
