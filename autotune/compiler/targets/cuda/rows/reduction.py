"""Reductions across the threads of a row, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from autotune.compiler.kernel.lower import ZERO, PassReducers, Plain, tree
from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Item, Select, Stmt, Var, when
from autotune.compiler.targets.cuda.device import THREAD, remote_store, shuffle
from autotune.compiler.targets.cuda.threads import Reductions, RowThreads, SharedArrays


class RowPass:
    """Reductions that threads of a row carry of one pass, and the number of elements behind a mean and its variance.

    Threads have equally many unless a row does not fill the last pack of all of them, or warps are no power of two.
    Then the number goes along as ``nc``.

    Attributes:
        uneven: True if threads may have different numbers of elements.
        each: elements of each thread, where they have not.
        pairs: two reductions that are reduced at once, and the first element of their parts in shared memory. Half of a
            warp's lanes carry the one, half the other: after one exchange across the warp's halves, in which each half
            gives away what the other one goes on with, a pair costs as many shuffles as one reduction alone. Layer
            norm's backward has two sums a row, whose shuffles are a fifth of its instructions.
        single: plain reductions that have no partner.
        slots: fields that are in no pair, their identities, and the first element of their parts.
        halved: those whose accumulators go through the warp's remaining shuffles: of a pair, the first one's.
    """

    count = Var("nc", "float32")
    upper, other = Var("upper", "bool"), Var("y", "float32")

    def __init__(self, reducers: PassReducers, threads: RowThreads, of_warps: SharedArrays, elements: int) -> None:
        self.reducers, self.threads = reducers, threads
        self.uneven = threads.full != threads.packs or threads.whole_warps != threads.warps
        self.each = float(threads.full * threads.vec)
        self.pairs: list[tuple[Plain, Plain, int]] = []
        plain, waiting = list(reducers.plain.values()), dict[str, Plain]()
        for r in plain if threads.warps > 1 else []:  # lanes of a single warp need both results right away
            if r.dtype == "float32" and r.op in waiting:
                self.pairs.append((waiting.pop(r.op), r, of_warps.take("float32", 2 * elements)))
            elif r.dtype == "float32":
                waiting[r.op] = r
        paired = [r for first, second, _ in self.pairs for r in (first, second)]
        self.single = [r for r in plain if r not in paired]
        self.halved = [*self.single, *(first for first, _, _ in self.pairs)]
        whole = (*self.single, *reducers.online, *reducers.moments)
        fields = [(f, nothing) for r in whole for f, nothing in zip(r.fields, r.identity, strict=True)]
        fields += [(count, ZERO) for count in self.counts]
        take = partial(of_warps.take, elements=elements)
        self.slots = [(f, nothing, take(f.dtype)) for f, nothing in fields] if threads.warps > 1 else []

    @property
    def counts(self) -> list[Var]:
        return [self.count] if self.reducers.moments and self.uneven else []

    def count_elements(self) -> list[Stmt]:
        threads = self.threads
        if not self.counts:
            return []
        least = Const(float(threads.full * threads.vec), "float32")
        if threads.full == threads.packs:
            return [Assign(self.count, least)]
        more = Const(float((threads.full + 1) * threads.vec), "float32")
        return [Assign(self.count, Select(threads.column(threads.full) < threads.columns, more, least))]

    def halve(self) -> list[Stmt]:
        """Lanes 0 to 15 go on with the first of each pair, the others with the second: in the first one's name."""
        out: list[Stmt] = [Assign(self.upper, (self.threads.lane & 16).differs(0))] if self.pairs else []
        for first, second, _ in self.pairs:
            a, b, other = first.carried, second.carried, self.other
            out += [Assign(other, Select(self.upper, a, b)), Assign(a, Select(self.upper, b, a))]
            out += [Assign(other, shuffle(other, 16)), *first.merge([other])]
        return out

    def shuffles(self, distances: Iterable[int]) -> list[Stmt]:
        """Combines each lane with those at these distances, one after the other."""
        out: list[Stmt] = []

        def other(name: str, x: Var, distance: int) -> Var:
            read = Var(name, x.dtype)
            out.append(Assign(read, shuffle(x, distance)))
            return read

        for n in distances:
            for r in self.single if n == 16 else self.halved:
                name = "y" if r.carried.dtype == "float32" else f"y{r.carried.dtype}"
                out += r.merge([other(name, r.carried, n)])
            for o in self.reducers.online:
                out += o.merge([other("ym", o.peak, n), other("yt", o.total, n)])
            if self.reducers.moments:
                count = other("yn", self.count, n) if self.uneven else self.count
                for m in self.reducers.moments:
                    parts = [other("ys", m.total, n), other("yq", m.square, n)]
                    out += replace(m, sides=(self.count, count) if self.uneven else self.each).merge(parts)
                if self.uneven:
                    out.append(Assign(self.count, self.count + count))
                else:
                    self.each *= 2
        return out


class RowReductions(Reductions[RowPass]):
    """Reductions across the threads of a row."""

    parity = Var("par", "int32")
    """Where the present row's half of the arrays begins."""

    def __init__(self, threads: RowThreads) -> None:
        super().__init__(threads.group, SharedArrays("x"), SharedArrays("q"))
        self.threads, self.barriers = threads, 0
        self.elements = threads.rows_per_block * threads.warps  # of one value's parts

    def statements(self, reducers: PassReducers) -> list[Stmt]:
        """Reduce after the walk of a pass; results get their names, fields of online softmax stay."""
        before, after = self.reduce(RowPass(reducers, self.threads, self.of_warps, self.elements))
        out = [*before, *after]
        for m in reducers.moments:
            out += m.finish(self.threads.vec == 1)
        return out + [r.finish() for r in reducers.plain.values()]

    @property
    def span(self) -> int:
        """Elements of a half of the arrays, of any type at most."""
        return max(self.of_warps.sizes.values(), default=0)

    def at(self, dtype: str, first: int, *part: Expr) -> Item:
        """A part's element; ``part`` is a sum. Unsigned, as all indices of shared memory: Numba wraps a negative index
        round, five instructions each."""
        index = self.parity + first + self.threads.row_group * self.threads.warps
        for x in part:
            index = index + x
        return self.of_warps.array(dtype)[Cast("uint32", index)]

    def read(self, nothing: Const, first: int, *part: Expr) -> Expr:
        """The part that a lane reads: ``nothing`` where there is no such warp."""
        read, threads = self.at(nothing.dtype, first, *part), self.threads
        return read if threads.whole_warps == threads.warps else Select(threads.has_part, read, nothing)

    def in_warp(self, carried: RowPass) -> list[Stmt]:
        out = carried.count_elements()
        for n in self.group.distances:
            out += carried.halve() if n == 16 else []
            out += carried.shuffles([n])
        return out

    def store_parts(self, carried: RowPass) -> list[Stmt]:
        """Lane 0 of each warp stores its part; of a pair, the first lane of each half."""
        self.barriers += 1
        threads = self.threads
        half = ((threads.lane >> 4) * self.elements, threads.warp)
        writes = [Assign(self.at(f.dtype, n, threads.warp), f) for f, _, n in carried.slots]
        halves = [Assign(self.at("float32", n, *half), first.carried) for first, _, n in carried.pairs]
        out: list[Stmt] = [when(threads.lane.equals(0), writes)] if writes else []
        return out + ([when((threads.lane & 15).equals(0), halves)] if halves else [])

    def collect(self, carried: RowPass) -> list[Stmt]:
        """Every lane reads a warp's part, of a pair that of one of the two."""
        threads, upper, other = self.threads, carried.upper, carried.other
        whole, part, second = threads.whole_warps, threads.part, Cast("int32", Const(self.elements))
        out: list[Stmt] = [Assign(f, self.read(nothing, n, part)) for f, nothing, n in carried.slots]
        out += [Assign(upper, (threads.lane & whole).differs(0))] if carried.pairs and whole < 32 else []
        for first, last, n in carried.pairs:
            indices: list[tuple[Plain, tuple[Expr, ...]]] = [(first, (part,)), (last, (Const(self.elements), part))]
            if whole < 32:
                indices = [(first, (Select(upper, second, Cast("int32", Const(0))), part))]
            out += [Assign(r.carried, self.read(r.identity[0], n, *index)) for r, index in indices]
        out += carried.halve() if whole == 32 else []
        out += carried.shuffles(n for n in (16, 8, 4, 2, 1) if n < whole)
        for first, last, _ in carried.pairs:  # every lane gets both results
            a, b = first.carried, last.carried
            out += [Assign(other, shuffle(a, min(16, whole)))]
            out += [Assign(b, Select(upper, a, other)), Assign(a, Select(upper, other, a))]
        return out

    def in_cluster(self, carried: RowPass) -> tuple[Stmt, list[Stmt]]:
        size, reducers = self.group.cluster, carried.reducers
        first = {f: self.of_blocks.take(f.dtype, size) for f in (*reducers.fields, *carried.counts)}

        def part(f: Var, block: int) -> Expr:
            return self.of_blocks.array(f.dtype)[first[f] + block]

        sends = []
        for f, n in first.items():
            at = Cast("int64", Const(n)) + Cast("int64", self.threads.rank)
            sends.append(remote_store(self.of_blocks.array(f.dtype), at, Cast("int32", THREAD), f))
        out: list[Stmt] = []
        for r in reducers.plain.values():
            out.append(Assign(r.carried, tree(r.op, r.dtype, [part(r.carried, block) for block in range(size)])))
        peak, total, before, own = (Var(name, "float32") for name in ("ym", "yt", "na", "nb"))
        for o in reducers.online:
            out += [Assign(f, part(f, 0)) for f in o.fields]
            for block in range(1, size):
                out += [Assign(peak, part(o.peak, block)), Assign(total, part(o.total, block))]
                out += o.merge([peak, total])
        each = Const(carried.each, "float32")
        numbers = [part(carried.count, block) if carried.counts else each for block in range(size)]
        for m in reducers.moments:
            out += [*(Assign(f, part(f, 0)) for f in m.fields), Assign(before, numbers[0])]
            for block in range(1, size):
                out.append(Assign(own, numbers[block]))
                out += replace(m, sides=(before, own)).merge([part(f, block) for f in m.fields])
                out.append(Assign(before, before + own))
        return when(THREAD < size, sends), out
