"""A CPU kernel that takes its rows one at a time, and the columns of a row in vectorised loops.

A unit of work is a row, or for a pointwise group a tile of one row. Each pass is a loop over the columns. With
``column_tile`` the loop is cut into tiles, which bounds the error of long sums and is what an online softmax rescales
by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from autotune.compiler.program.one_pass import Online
from autotune.compiler.program.program import Pass, Program, stride_of
from autotune.compiler.targets.cpu.expr import Printer
from autotune.compiler.targets.cpu.moves import STRETCH, fetched, streamed
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES

if TYPE_CHECKING:
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

_LONG_ROW = 65536  # sums over more columns than this are made of partial sums even where the schedule has no tiles
_PARTIAL = 16384
_POINTWISE_TILE = 4096
_MOST_CUTS = 4  # places where the columns are cut into pieces
_VECTOR, _UNROLLED, _LONG_WALK = 16, 64, 192
"""Columns from which a walk is a loop: those of one vector; but numbers that four vectors at a time do not divide stay
constant up to a larger one, since the tail costs more than the loop saves."""


class RowPrinter(Printer):
    """Prints one row after the other.

    ``factor``: columns of a pointwise group without rows that one step of a dynamic extent stands for.
    """

    def __init__(self, program: Program, schedule: CpuSchedule, factor: int = 1) -> None:
        super().__init__(program, schedule)
        self.factor = factor
        self.rows_done: set[int] = set()
        self.flat = program.pointwise and len(program.cols) == 1
        self.tile = schedule.column_tile
        if not self.flat:
            long = any(self.values[i].op == "sum" for i in program.reductions) and self.inner > _LONG_ROW
            if not self.tile and long:
                self.tile = _PARTIAL
            if self.tile >= self.inner:
                self.tile = 0
        self.streams = streamed(program) if schedule.stream else ()
        self.ahead = fetched(program) if schedule.prefetch else ()
        self.later = [p for p in program.passes if p.walks][1:]
        self.base = "0"  # the column that is the first of the buffers of streamed outputs
        if self.streams:
            self.last.append("drain()")
        for i in program.kept:
            self.scratch.take(f"kept{i}", program.n_cols, self.values[i].dtype)
        for p in program.passes:
            for o in p.online:
                self.scratch.take(f"tile{o.score}", self.tile or self.inner, "float32")

    def units(self) -> None:
        self.put(f"rows = {self.total_rows()}")
        if self.flat:
            self._tiles()
        else:
            self.put("units = rows")
            self.hide_columns()
        # No more rows at a time than leave every thread some.
        self.put(f"step = min({self.schedule.row_block}, max(1, (units + threads - 1) // threads))")

    def hide_columns(self) -> None:
        """Assign ``columns``, the number of columns, such that LLVM knows what divides it and nothing else.

        A walk over a constant number of columns is unrolled whole before LLVM thinks of vectors: a maximum over 32
        becomes a chain of 32 comparisons (2 to 10 times slower), and of rows of 512 the loads are reordered until the
        processor's prefetchers lose the thread (10 to 20%).
        """
        known = min(256, self.inner & -self.inner) or 1
        self.put(f"columns = hidden({self.inner // known}) * {known}")

    def _tiles(self) -> None:
        self.put(f"cols = {self.sum_of([(self.extent(self.program.cols[0]), self.factor)], 0)}")
        shared = f"max({_POINTWISE_TILE}, (cols + threads - 1) // threads)"
        if self.tile:
            self.put(f"tile = {self.tile}")
        elif self.program.rows:
            self.put(f"tile = max(1, cols) if rows >= threads else {shared}")
        else:
            self.put(f"tile = {shared}")
        self.put("tiles = (cols + tile - 1) // tile")
        self.put("units = rows * tiles")

    def unit(self) -> None:
        self.put("r = u // tiles" if self.flat and self.program.rows else "r = u")
        self.put_more("u + 1 < min(first + step, units)")
        self.split_index("r", self.program.rows)
        self._offsets()
        for p in self.program.passes:
            self.row_part(p)
            if not p.walks:
                continue
            if self.flat:
                self.put("t = (u % tiles) * tile")
                column = f"i{self.program.cols[0]}"
                for first, last in self.stretches(p, "t", "min(t + tile, cols)", None):
                    self.put(f"for {column} in range({first}, {last}):")
                    self.depth += 1
                    self.columns(p, column, "0", ())
                    self.depth -= 1
            else:
                self.walk(p)

    def put_more(self, condition: str) -> None:
        """Whether this thread has the next row too: another one would read it from memory once more."""
        if self.ahead:
            self.put(f"more = {condition}")

    def row_part(self, p: Pass) -> None:
        """What a pass does once a row, before its walk."""
        self.row_values(p.row_values)
        for y in self.divisors(p.compute):
            if y not in self.inverses:
                self.inverse(y)
        for k in p.row_stores:
            self.write(k, f"w{k}")

    def _offsets(self) -> None:
        """Where the row starts in each input and output."""
        live = {i for p in self.program.passes for i in (*p.row_values, *p.compute)} | self._shift_values()
        for i in sorted(live):
            v = self.values[i]
            if v.op in ("load", "gather"):
                self.put(f"o{i} = {self.row_offset(v)}")
        for k in range(self.n_outputs):
            self.put(f"w{k} = {self.out_row_offset(k)}")

    def _shift_values(self) -> set[int]:
        found: set[int] = set()
        for p in self.program.passes:
            for o in p.online:
                found.update(self._row_closure(o.shift))
        return found

    def _row_closure(self, i: int) -> list[int]:
        """Row values that make ``i`` from finished reductions, in order."""
        seen: set[int] = set()
        stack = [i]
        while stack:
            j = stack.pop()
            if j in seen or self.values[j].op in REDUCTIONS or self.values[j].op == "const":
                continue
            seen.add(j)
            stack.extend(self.values[j].args)
        return sorted(seen)

    def row_values(self, values: Iterable[int]) -> None:
        for i in values:
            if i not in self.rows_done and self.values[i].op != "const":
                self.rows_done.add(i)
                self.compute(i)

    def walk(self, p: Pass) -> None:
        """The loops of one pass over a row."""
        tiled = bool(self.tile) or len(self.program.cols) > 1
        for i in p.reduce:
            v = self.values[i]
            self.put(f"v{i} = {self.start(v.op, v.dtype)}")
        for o in p.online:
            zero = self.start("sum")
            self.put(f"v{o.peak} = {self.start('max')}")
            self.put(f"m{o.peak} = {zero}")
            self.put(f"v{o.total} = {zero}")
        base = self.depth
        for a in self.program.cols[:-1]:
            self.put(f"for i{a} in range({self.graph.extents[a]}):")
            self.depth += 1
        flat = "0"
        if len(self.program.cols) > 1:
            span, terms = self.inner, []
            for a in reversed(self.program.cols[:-1]):
                terms.append((f"i{a}", span))
                span *= self.graph.extents[a]
            flat = "f"
            self.put(f"f = {self.sum_of(reversed(terms), 0)}")
        n = self.inner
        looped = n >= _LONG_WALK or (n >= _VECTOR and (n % _UNROLLED == 0 or n < _UNROLLED))
        start, stop = "0", "columns" if looped else str(n)
        if self.tile:
            self.put(f"for t in range(0, {self.inner}, {self.tile}):")
            self.depth += 1
            self.put(f"e = min(t + {self.tile}, {self.inner})")
            start, stop = "t", "e"
        floats = [i for i in p.reduce if self.values[i].op == "sum" and self.values[i].dtype == "float32"]
        partial = floats if tiled else []
        for i in partial:
            self.put(f"t{i} = {self.start('sum')}")
        for o in p.online:
            self.put(f"t{o.peak} = {self.start('max')}")
        column = f"i{self.program.cols[-1]}"
        position = column if flat == "0" else f"f + {column}"
        for first, last in self.stretches(p, start, stop, self.tile or n):
            self.put(f"for {column} in range({first}, {last}):")
            self.depth += 1
            self.columns(p, position, column if start == "0" else f"{column} - t", partial)
            self.depth -= 1
        for i in partial:
            self.put(f"v{i} += t{i}")
        for o in p.online:
            self.rescale(o, start, stop)
        self.depth = base
        for o in p.online:
            # What shift needs of the row; the peak is whole now.
            self.row_values(self._row_closure(o.shift))
            exp = self.op("exp")
            self.put(f"v{o.total} = v{o.total} * {exp}(m{o.peak} - {self.value(o.shift)})")

    def stretches(self, p: Pass, start: str, stop: str, most: int | None) -> Iterator[tuple[str, str]]:
        """The columns from ``start`` to ``stop``, at most ``most``, in pieces for loops over them.

        What a pass streams is copied out after each stretch of them. The passes after the first ask for the next row
        between them, a share before each stretch: one that computes much leaves memory to them, which one that stores
        does not.
        """
        outputs = [k for k in p.stores if k in self.streams]
        ahead = self.ahead if p in self.later else ()
        if not outputs and not ahead:
            yield from self.ranges(p, start, stop)
            return
        sizes = {k: STORAGE_BYTES[self.graph.outputs[k].dtype] for k in outputs}
        read = {i: STORAGE_BYTES[self.graph.inputs[self.values[i].slot]] for i in ahead}
        length, depth = STRETCH // max(*sizes.values(), *read.values(), 1), self.depth
        # A piece costs a sum the additions across a vector: not cut for the stores' sake while the buffer stays in the
        # second-level cache.
        whole = bool(p.reduce) and not ahead and most is not None and most <= 16 * length
        if most is not None and (p.online or most <= length or whole):
            length = most
            self.base = start
        else:
            self.put(f"for c in range({start}, {stop}, {length}):")
            self.depth += 1
            self.put(f"d = min(c + {length}, {stop})")
            self.base, start, stop = "c", "c", "d"
        for k, size in sizes.items():
            self.scratch.take_bytes(f"stream{k}", length * size)
        count = stop if start == "0" else f"{stop} - {start}"
        if ahead:
            self._ask(p, ahead, start, stop, count)
        yield from self.ranges(p, start, stop)
        for k in outputs:
            o = self.graph.outputs[k]
            copy = self.name(f"stream_{o.dtype}_{k}", f'streamer("{o.dtype}", "stream{k}", "out{k}", SPACES)')
            at = self._from(start, (f"w{k}", 1), *self.col_terms(o.axes, o.strides))
            self.put(f"{copy}(y{k}, {at}, s_stream{k}, {count})")
        self.depth, self.base = depth, "0"

    def _ask(self, p: Pass, loads: Sequence[int], start: str, stop: str, count: str) -> None:
        """Ask for this pass's share of what the next row has in the columns from ``start`` to ``stop``."""
        self.put("if more:")
        n, before = len(self.later), self.later.index(p) * self.inner
        if n > 1:
            self.put(f"    s = ({before} + {start}) // {n}")
            start, count = "s", f"({before} + {stop}) // {n} - s"
        for i in loads:
            v = self.values[i]
            storage = self.graph.inputs[v.slot]
            fetch = self.name(f"fetch_{storage}", f'fetcher("{storage}")')
            at = self._from(start, (f"o{i}", 1), *self.col_terms(v.axes, v.strides))
            self.put(f"    {fetch}(x{v.slot}, {at} + {stride_of(v, self.program.rows[-1])}, {count})")

    def _from(self, start: str, *terms: tuple[str, int]) -> str:
        """A sum of terms with the innermost column at ``start``."""
        column = f"i{self.program.cols[-1]}"
        return self.sum_of([(start if t == column else t, s) for t, s in terms if t != column or start != "0"], 0)

    def ranges(self, p: Pass, start: str, stop: str) -> Iterator[tuple[str, str]]:
        """The columns from ``start`` to ``stop`` in pieces, in each of which a guarded load is made or is not.

        Concatenations and slices then cost no masks. A few pieces at most; else all columns at once, with masks.
        """
        axis = self.program.cols[-1]
        guards = [g for i in p.compute for g in self.values[i].guards if g[0] == axis]
        cuts = sorted({at for _, lo, hi in guards for at in (lo, hi) if 0 < at < self.inner})
        if not cuts or len(cuts) > _MOST_CUTS or axis == self.program.dynamic:
            yield start, stop
            return
        for lo, hi in pairwise((0, *cuts, self.inner)):
            self.piece = (axis, lo, hi)
            first = start if lo == 0 else str(lo) if start == "0" else f"max({start}, {lo})"
            last = stop if hi == self.inner else str(hi) if start == "0" else f"min({stop}, {hi})"
            yield first, last
        self.piece = None

    def columns(self, p: Pass, position: str, in_tile: str, partial: Iterable[int]) -> None:
        """The body of the innermost loop."""
        self.ready.clear()
        for i in p.kept_in:
            v = self.values[i]
            self.put(f"v{i} = {self.load(v.dtype, f'kept{i}')}(s_kept{i}, {position})")
        for i in p.compute:
            self.compute(i)
        for i in p.kept_out:
            self.put(f"{self.store(self.values[i].dtype, f'kept{i}')}(s_kept{i}, {position}, v{i})")
        for i in p.reduce:
            v = self.values[i]
            arg = self.cast(self.value(v.args[0]), self.values[v.args[0]].dtype, v.dtype)
            acc = f"t{i}" if i in partial else f"v{i}"
            self.put(f"{acc} = {self.accumulate(v.op)}({acc}, {arg})")
        for o in p.online:
            self.put(f"{self.store('float32', f'tile{o.score}')}(s_tile{o.score}, {in_tile}, {self.value(o.score)})")
            self.put(f"t{o.peak} = {self.accumulate('max')}(t{o.peak}, {self.value(o.score)})")
        for k in p.stores:
            out = self.graph.outputs[k]
            if k in self.streams:
                column = f"i{self.program.cols[-1]}"
                at = column if self.base == "0" else f"{column} - {self.base}"
                store = self.store(out.dtype, f"stream{k}")
                self.put(f"{store}(s_stream{k}, {at}, {self.stored(k)})")
                continue
            self.write(k, self.sum_of([(f"w{k}", 1), *self.col_terms(out.axes, out.strides)], 0))

    def rescale(self, o: Online, start: str, stop: str) -> None:
        """Take a tile into the running maximum and sum.

        The sum is kept relative to ``m``: the maximum where that is finite, else 0, so that rows of infinities come out
        as the two-pass formula has them. A sum of 0 (only -inf so far) is not rescaled: the factor may be infinite.
        """
        add, total, exp = self.accumulate("max"), self.accumulate("sum"), self.op("exp")
        zero = self.start("sum")
        self.put(f"v{o.peak} = {add}(v{o.peak}, t{o.peak})")
        self.put(f"n{o.peak} = {zero} if {self.op('isinf')}(v{o.peak}) else v{o.peak}")
        self.put(f"t{o.total} = {zero}")
        count = stop if start == "0" else f"{stop} - {start}"
        self.put(f"for j in range({count}):")
        score = f"{self.load('float32', f'tile{o.score}')}(s_tile{o.score}, j)"
        self.put(f"    t{o.total} = {total}(t{o.total}, {exp}({score} - n{o.peak}))")
        self.put(f"if v{o.total} != {zero}:")
        self.put(f"    v{o.total} = v{o.total} * {exp}(m{o.peak} - n{o.peak})")
        self.put(f"v{o.total} = v{o.total} + t{o.total}")
        self.put(f"m{o.peak} = n{o.peak}")
