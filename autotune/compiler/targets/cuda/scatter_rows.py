"""The scatter_rows skeleton: index-add along rows that have separate indices, without atomic additions.

A warp has one key, the rows with equal indices. It reads the key's indices once, as a list in shared memory, and sorts
the 32 indices of each step. For each row of the key it then adds the terms to sums in shared memory, 32 in a step.
Lanes with equal indices, which are adjacent, first add their terms to the first one's. So one lane writes a sum, and
results do not vary from run to run. The operators after the sum read it from shared memory.

On an H200, ``match.any`` takes about 67 cycles of a multiprocessor. Finding equal indices by it in each step cost more
than all other work.

Terms reach their warp through shared memory. If adjacent terms belong to adjacent keys (the second of two gradients in
disentangled attention), the block reads them for all its warps.
"""

from __future__ import annotations

from autotune.compiler.kernel.lower import ZERO
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Function,
    Item,
    Return,
    Select,
    Stmt,
    Unpack,
    Var,
    closed,
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
"""Most tokens whose indices a warp lists once for all rows of a key: one bit marks each of its steps."""
LISTED = 512
"""Tokens that it lists at a time if there are more."""
ROUNDS = 5
"""Rounds in which 32 lanes with equal indices add their terms."""
MOST_DESTINATIONS = 1 << 24
"""Most indices, of which an entry of a list holds one, with 6 bits for its lane."""
ZERO_INT, ONE_INT = Const(0, "int32"), Const(1, "int32")
_PIECE = Const(4, "int32")


class ScatterRowsKernel:
    """The kernel of a group with one sum at indices along rows. Raises Unsupported where the schedule does not fit.

    Of a schedule ``rows_per_block`` are the warps of a block, each with a key. A block computes ``owned`` rows of each
    key. A thread has ``unroll`` vectors of terms in flight.
    """

    sums, lists, words32 = Var("sf"), Var("si"), Var("sw")
    """Shared memory as sums and terms, as indices, and as words of vectors."""
    lane, warp = int_var("lane"), int_var("warp")
    """Number of the thread in its warp, and of the warp."""
    first, key, repeat, base = int_var("first"), int_var("key"), int_var("repeat"), int_var("base")
    """The first key of the block and that of the warp, the row of the key, the first token of a list."""
    inside, clashes = Var("inside", "bool"), int_var("clashes")
    """True if the warp's key exists; a bit for each step in which lanes have equal indices."""
    step, token = int_var("step"), int_var("token")
    own_list, own_terms = int_var("own"), int_var("mine")
    """Where the warp's list and its terms begin in shared memory."""
    taken = Var("x")
    entry, given = int_var("e"), Var("t", "float32")
    """A lane's entry in the list of a step, and its term."""

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
        if s.n_destinations >= MOST_DESTINATIONS:
            raise Unsupported("more indices than a list's entries hold")
        self.destinations = emitter_of(s.destinations, schedule, s.pick)
        self.terms = emitter_of(s.terms, schedule, self.vec)
        self.results = emitter_of(s.results, schedule, self.vec, tested=True)
        self.destination, _ = self.destinations.pass_function(0, s.destinations.passes[0])
        self.term, _ = self.terms.pass_function(0, s.terms.passes[0])
        self.result, _ = self.results.pass_function(1, s.results.passes[1])
        self.joined = self.joining()  # a function, so that it is compiled once
        whole = -(-s.n_tokens // WARP) * WARP
        self.listed = whole if whole <= MOST_LISTED else LISTED
        self.steps = self.listed // WARP
        # Words of shared memory of a warp: its sums, its terms, its indices. The terms of adjacent keys begin in
        # separate banks.
        self.row = -(-s.n_destinations // 4) * 4
        self.stride = self.listed + (max(1, 4 * self.vec // self.warps) if s.is_across else 0)
        self.at_terms = self.warps * self.row
        self.at_lists = self.at_terms + self.warps * self.stride
        self.words = self.at_lists + self.warps * self.listed
        self.parts = -(-s.n_repeats // schedule.owned)
        self.groups = -(-s.n_keys // self.warps)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def word(self, array: Var, at: Expr) -> Item:
        return array[Cast("uint32", at)]

    def sum_words(self, column: Expr) -> Words:
        """The words of a pack of the warp's sums."""
        return self.words32, as_int(self.warp * self.row + column), _PIECE

    def listing(self) -> list[Stmt]:
        """Lists the indices of the warp's key from token ``base`` on, the number of destinations for one outside."""
        s, value, pack = self.s, Var("v", "int64"), Var("g")
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
            some.append(Assign(self.word(self.lists, self.own_list + self.token + e), listed))
        return [
            Assign(CudaEmitter.row, self.key),
            *before_pass(self.destinations, 0),
            loop(self.token, self.listed, some, as_int(self.lane * s.pick), WARP * s.pick),
            Assign(self.clashes, Const(0, "int32")),
            WARP_BARRIER,
            loop(self.step, self.steps, self.sorting()),
            WARP_BARRIER,
        ]

    def sorting(self) -> list[Stmt]:
        """Sorts the indices of one step, and marks the step if some are equal.

        The entry of a lane becomes its index times 64, plus the number of the term, plus 32 if another lane with this
        index comes before it.
        """
        here, there, place, equal, k = (Var(name, "int32") for name in ("e", "f", "at", "equal", "k"))
        entry = self.word(self.lists, self.own_list + self.step * WARP + place)
        alike = both(there.equals(here), k < self.lane)
        count: list[Stmt] = [
            Assign(there, shuffle_from(here, k)),
            Assign(place, as_int(place + Select(there < here, ONE_INT, Select(alike, ONE_INT, ZERO_INT)))),
            Assign(equal, as_int(equal | Select(alike, ONE_INT, ZERO_INT))),
        ]
        marked = ballot(both(here < self.s.n_destinations, equal.differs(0)))
        return [
            Assign(here, self.word(self.lists, self.own_list + self.step * WARP + self.lane)),
            Assign(place, ZERO_INT),
            Assign(equal, ZERO_INT),
            loop(k, rounds(WARP), count),
            WARP_BARRIER,
            Assign(entry, as_int(here * 64 + equal * 32 + self.lane)),
            Assign(there, marked),
            Assign(
                self.clashes, as_int(self.clashes | Select(there.equals(0), ZERO_INT, as_int(ONE_INT << self.step)))
            ),
        ]

    def unpacked(self, pack: Expr) -> list[Stmt]:
        """Sets ``x`` to the numbers of a pack of terms."""
        packed = self.terms.packed(self.s.term)
        return [Assign(self.taken, Unpack(self.terms.storage(self.s.term), self.vec, pack) if packed else pack)]

    def staging(self) -> list[Stmt]:
        """Brings the terms of row ``repeat`` of each key, from token ``base`` on, to shared memory."""
        return self.across() if self.s.is_across else self.along()

    def along(self) -> list[Stmt]:
        """The same for the warp's key, by the warp."""
        s, vec, flight = self.s, self.vec, self.flight(self.listed // self.vec, WARP)
        spots = [as_int(self.token + u * WARP * vec) for u in range(flight)]
        packs = [Var(f"x{u}") for u in range(flight)]
        work: list[Stmt] = []
        for spot, pack in zip(spots, packs, strict=True):
            column = least(self.base + spot, s.n_tokens - vec)
            work.append(Assign(pack, self.term({CudaEmitter.column.name: column})))
        for spot, pack in zip(spots, packs, strict=True):
            work += self.unpacked(pack)
            words = (self.words32, as_int(self.own_terms + spot), _PIECE)
            write = put(words, tuple(self.taken[e] for e in range(vec)))
            work.append(write if flight == 1 and self.listed % (WARP * vec) == 0 else when(spot < self.listed, [write]))
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
                Assign(spot, as_int(Const(self.at_terms) + pack * (vec * self.stride) + self.token)),
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
            writes += [Assign(self.word(self.sums, spot + e * self.stride), self.taken[e]) for e in range(vec)]
            work += writes if exact else [when(place < self.listed * many, writes)]
        return [loop(number, self.listed * many, work, THREAD, block * flight)]

    def flight(self, packs: int, threads: int) -> int:
        """Vectors that a thread has in flight, of ``packs`` that ``threads`` share."""
        return max(1, min(self.schedule.unroll, -(-packs // threads)))

    def adding(self) -> list[Stmt]:
        """Adds the warp's terms to its sums, a list at a time."""
        many = next(n for n in (4, 2, 1) if self.steps % n == 0)
        steps = [self.step + u if u else self.step for u in range(many)]
        entries = [(at, Var(f"e{u}", "int32"), Var(f"t{u}", "float32")) for u, at in enumerate(steps)]
        out: list[Stmt] = []
        for at, entry, _ in entries:
            out.append(Assign(entry, self.word(self.lists, self.own_list + at * WARP + self.lane)))
        for at, entry, term in entries:
            out.append(Assign(term, self.word(self.sums, self.own_terms + at * WARP + (entry & 31))))
        for at, entry, term in entries:
            index = quotient(entry, 64)
            total = self.word(self.sums, self.warp * self.row + index)
            joined = self.joined({self.entry.name: entry, self.given.name: term})
            out.append(when(as_int((self.clashes >> at) & 1).equals(1), [Assign(term, joined)]))
            first = both(index < self.s.n_destinations, (entry & 32).equals(0))
            out += [when(first, [Assign(total, total + term)]), WARP_BARRIER]
        return [loop(self.step, self.steps, out, step=many)]

    def joining(self) -> Function:
        """A function that adds the terms of lanes with equal indices to that of the first.

        In each round, a lane adds the partial sum of the lane ``distance`` further on if that has the same index. Equal
        indices are adjacent, so that the first lane then has the sum of twice as many.
        """
        index, distance, other = (Var(name, "int32") for name in ("i", "distance", "other"))
        own, partial, same = Var("x", "float32"), Var("y", "float32"), Var("same", "bool")
        further = as_int(Select(self.lane + distance < WARP, self.lane + distance, self.lane))
        turn: list[Stmt] = [
            Assign(other, shuffle_from(index, further)),
            Assign(partial, shuffle_from(own, further)),
            Assign(same, both(other.equals(index), self.lane + distance < WARP)),
            Assign(own, own + Select(same, partial, ZERO)),
            Assign(other, ballot(both(same, index < self.s.n_destinations))),
            Assign(distance, as_int(Select(other.equals(0), Const(WARP, "int32"), as_int(distance * 2)))),
        ]
        return closed([
            Assign(own, self.given),
            Assign(index, quotient(self.entry, 64)),
            Assign(distance, ONE_INT),
            loop(Var("turn", "int32"), rounds(ROUNDS), [when(distance < WARP, turn)]),
            Return((own,), alone=True),
        ])  # fmt: skip

    def clear(self, column: Expr) -> Stmt:
        return put(self.sum_words(column), (ZERO,) * self.vec)

    def storing(self) -> list[Stmt]:
        """Stores what the warp's sums make, and clears them."""
        s, column, found = self.s, Var("p", "int32"), Var("z")
        given = {
            CudaEmitter.column.name: column,
            self.results.kept(0).name: found,
            CudaEmitter.ok.name: self.inside,
        }
        work = [Assign(found, take("float32", self.vec, self.sum_words(column))), self.clear(column)]
        return [
            Assign(CudaEmitter.row, as_int(self.repeat * s.n_keys + self.key)),
            *before_pass(self.results, 1),
            loop(
                column, s.n_destinations, [*work, Do(self.result(given))], as_int(self.lane * self.vec), WARP * self.vec
            ),
            WARP_BARRIER,
        ]

    def body(self) -> list[Stmt]:
        s, part, column = self.s, Var("part", "int32"), Var("p", "int32")
        barrier = BARRIER if s.is_across else WARP_BARRIER
        listed_once = self.listed >= s.n_tokens
        work = [*self.staging(), barrier, *self.adding(), barrier]
        if not listed_once:
            work = [loop(self.base, s.n_tokens, [*self.listing(), *work], step=self.listed)]
        start = as_int(part * self.schedule.owned)
        return [
            Assign(THREAD, ThreadIndex()),
            Assign(self.lane, as_int(THREAD & (WARP - 1))),
            Assign(self.warp, quotient(THREAD, WARP)),
            Assign(part, quotient(BLOCK, self.groups)),
            Assign(self.first, as_int((BLOCK - part * self.groups) * self.warps)),
            Assign(self.inside, self.first + self.warp < s.n_keys),
            Assign(self.key, least(self.first + self.warp, s.n_keys - 1)),
            Assign(self.base, Const(0, "int32")),
            Assign(self.own_list, as_int(Const(self.at_lists) + self.warp * self.listed)),
            Assign(self.own_terms, as_int(Const(self.at_terms) + self.warp * self.stride)),
            Shared(self.sums, 0, "float32"),
            Shared(self.lists, 0, "int32"),
            Shared(self.words32, 0, "uint32"),
            loop(column, s.n_destinations, [self.clear(column)], as_int(self.lane * self.vec), WARP * self.vec),
            *(self.listing() if listed_once else [WARP_BARRIER]),
            loop(self.repeat, least(start + self.schedule.owned, s.n_repeats), [*work, *self.storing()], start),
        ]

    def source(self) -> CudaSource:
        parts = [self.results, self.destinations, self.terms]
        align = [max(need) for need in zip(*(part.alignments() for part in parts), strict=True)]
        extent, params, units = self.s.graph.extents[0], self.results.params(), Units(self.groups * self.parts)
        return CudaSource.scheduled(
            self.body(), params, self.schedule, Counts(), units, extent, align, blocks_per_sm=0, shared=4 * self.words
        )
