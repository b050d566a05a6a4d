"""A CPU kernel whose innermost loops run over rows.

Where a reduction runs over an outer axis (a column sum, a batch norm), neighbours in memory belong to different rows,
and a walk along one row would touch a cache line for every element. Here a unit of work is a block of ``row_block``
neighbouring rows, the *lanes*: each column is taken for all lanes at once, and what a row has one of (accumulators,
means) is an array over the lanes in scratch. A few columns are taken together, so that an accumulator is fetched once
for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotune.compiler.program.program import Pass, Program, stride_of
from autotune.compiler.targets.cpu.expr import Printer
from autotune.compiler.targets.cpu.moves import AHEAD, fetched, streamed
from autotune.ir.graph import STORAGE_BYTES

if TYPE_CHECKING:
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

_LEAST = 16  # lanes: a cache line of fp32
_TOGETHER = 4  # columns per pass over the lanes
_PARTIAL = 512  # columns after which partial sums are added up


def lanes_suit(program: Program) -> bool:
    """Whether the innermost row axis is the contiguous one of most full tensors."""
    if program.pointwise or not program.rows or not program.cols:
        return False
    row, col = program.rows[-1], program.cols[-1]
    if program.graph.extents[row] < _LEAST:
        return False
    vote = 0
    for i, v in enumerate(program.graph.values):
        if v.op in ("load", "gather") and program.domain(i) == "full":
            vote += (stride_of(v, row) == 1) - (stride_of(v, col) == 1)
    return vote > 0


class LanePrinter(Printer):
    """Prints blocks of neighbouring rows."""

    def __init__(self, program: Program, schedule: CpuSchedule) -> None:
        super().__init__(program, schedule)
        self.lanes = max(schedule.row_block, _LEAST)
        self.axis = program.rows[-1]
        self.arrays: dict[str, str] = {}  # lane array -> its compute type
        self.streams = streamed(program, lanes=True) if schedule.stream else ()
        self.ahead = fetched(program, lanes=True) if schedule.prefetch else ()
        if self.streams:
            self.last.append("drain()")
        for i in program.kept:
            self.scratch.take(f"kept{i}", program.n_cols * self.lanes, self.values[i].dtype)

    # Arrays over the lanes ------------------------------------------------------------------------

    def _array(self, name: str, dtype: str) -> None:
        self.arrays[name] = dtype
        self.scratch.take(f"lane_{name}", self.lanes, dtype)

    def fetch(self, name: str) -> None:
        """Assign ``name`` from its lane array."""
        self.put(f"{name} = {self.load(self.arrays[name], f'lane_{name}')}(s_lane_{name}, j)")

    def keep(self, name: str, dtype: str, text: str | None = None) -> None:
        """Put ``name`` (or ``text``) into its lane array."""
        self._array(name, dtype)
        self.put(f"{self.store(dtype, f'lane_{name}')}(s_lane_{name}, j, {text or name})")

    def _fetch_rows(self, wanted: Iterable[int]) -> None:
        for i in sorted(set(wanted)):
            if self.values[i].op != "const" and self.program.domain(i) == "row":
                self.fetch(f"v{i}")

    def _over_lanes(self) -> None:
        self.put("for j in range(lanes):")
        self.depth += 1
        self.put(f"i{self.axis} = base + j")

    # Units ----------------------------------------------------------------------------------------

    def units(self) -> None:
        extent = self.extent(self.axis)
        outer = "1"
        if len(self.program.rows) > 1:
            n = 1
            for a in self.program.rows[1:-1]:
                n *= self.graph.extents[a]
            first = self.extent(self.program.rows[0])
            outer = self.sum_of([("n0", n)], 0) if first == "n0" else str(int(first) * n)
        # No more lanes than leave every thread some, in whole cache lines.
        self.put(f"outer = {outer}")
        self.put(f"share = (outer * {extent} + threads - 1) // threads")
        self.put(f"width = min({self.lanes}, max({_LEAST}, (share + {_LEAST - 1}) // {_LEAST} * {_LEAST}))")
        self.put(f"blocks = ({extent} + width - 1) // width")
        self.put("units = outer * blocks")
        self.put("step = 1")

    def unit(self) -> None:
        self.put("r = u // blocks")
        self.put("base = (u % blocks) * width")
        self.put(f"lanes = min(width, {self.extent(self.axis)} - base)")
        self.split_index("r", self.program.rows[:-1])
        for p in self.program.passes:
            self._row_values(p)
            if p.walks:
                self._walk(p)

    def _row_values(self, p: Pass) -> None:
        divisors = self.divisors(p.compute)
        if not p.row_values and not p.row_stores and not divisors:
            return
        self._over_lanes()
        values = self.values
        needed = {a for i in p.row_values for a in values[i].args} | set(divisors)
        needed |= {self.graph.outputs[k].value for k in p.row_stores}
        self._fetch_rows(needed - set(p.row_values))
        for i in p.row_values:
            if values[i].op in ("load", "gather"):
                self.put(f"o{i} = {self.row_offset(values[i])}")
            self.compute(i)
            self.keep(f"v{i}", values[i].dtype)
        for y in divisors:
            self.inverse(y)
            self.keep(f"d{y}", "float32")
        for k in p.row_stores:
            self.write(k, self.out_row_offset(k))
        self.depth -= 1

    # Passes ---------------------------------------------------------------------------------------

    def _walk(self, p: Pass) -> None:
        cols = self.program.cols
        inner = self.inner
        base = self.depth
        partial = [i for i in p.reduce if self.values[i].op == "sum" and self.values[i].dtype == "float32"]
        if p.reduce:
            self.put("for j in range(lanes):")
            self.depth += 1
            for i in p.reduce:
                v = self.values[i]
                self.keep(f"v{i}", v.dtype, self.start(v.op, v.dtype))
                if i in partial:
                    self.keep(f"t{i}", "float32", self.start("sum"))
            self.depth = base
        for a in cols[:-1]:
            self.put(f"for i{a} in range({self.graph.extents[a]}):")
            self.depth += 1
        tile = self.schedule.column_tile or _PARTIAL
        tiled = bool(partial) and inner > tile
        start, stop = "0", str(inner)
        if tiled:
            self.put(f"for t in range(0, {inner}, {tile}):")
            self.depth += 1
            self.put(f"e = min(t + {tile}, {inner})")
            start, stop = "t", "e"
        self.put(f"whole = {start} + ({stop} - {start}) // {_TOGETHER} * {_TOGETHER}")
        for begin, end, count in ((start, "whole", _TOGETHER), ("whole", stop, 1)):
            self.put(f"for c in range({begin}, {end}, {count}):")
            self.depth += 1
            self._columns(p, partial, count)
            self.depth -= 1
        if partial and not tiled:
            self.depth = base + len(cols) - 1
        if partial:
            self.put("for j in range(lanes):")
            self.depth += 1
            for i in partial:
                self.fetch(f"v{i}")
                self.fetch(f"t{i}")
                self.keep(f"v{i}", "float32", f"v{i} + t{i}")
                self.keep(f"t{i}", "float32", self.start("sum"))
        self.depth = base

    def _columns(self, p: Pass, partial: list[int], count: int) -> None:
        """``count`` columns from c on, over all lanes."""
        self._fetch_ahead(p, count)
        self._over_lanes()
        values = self.values
        compute = set(p.compute)
        used = {a for i in p.compute for a in values[i].args} | {values[i].args[0] for i in p.reduce}
        used |= {self.graph.outputs[k].value for k in p.stores}
        self._fetch_rows(used - compute)
        for y in self.divisors(p.compute):
            self.fetch(f"d{y}")
        accumulators = {i: f"t{i}" if i in partial else f"v{i}" for i in p.reduce}
        for acc in accumulators.values():
            self.fetch(acc)
        for n in range(count):
            self.put(f"i{self.program.cols[-1]} = c + {n}" if n else f"i{self.program.cols[-1]} = c")
            self._element(p, accumulators, n)
        for i, acc in accumulators.items():
            self.keep(acc, values[i].dtype)
        self.depth -= 1
        self._copy_out(p, count)

    def _at(self, column: int) -> None:
        """The indices of the first lane, ``column`` columns from c on."""
        self.put(f"i{self.axis} = base")
        self.put(f"i{self.program.cols[-1]} = c + {column}")

    def _fetch_ahead(self, p: Pass, count: int) -> None:
        """Ask for columns that the first pass to read them will come to: where each is a jump in memory, the processor
        does not see them coming."""
        first = {i: next(q for q in self.program.passes if i in q.compute) for i in self.ahead}
        loads = [i for i, q in first.items() if q is p]
        for n in range(count if loads else 0):
            self._at(AHEAD + n)
            for i in loads:
                v = self.values[i]
                storage = self.graph.inputs[v.slot]
                fetch = self.name(f"fetch_{storage}", f'fetcher("{storage}")')
                at = self.sum_of([(f"({self.row_offset(v)})", 1), *self.col_terms(v.axes, v.strides)], 0)
                self.put(f"{fetch}(x{v.slot}, {at}, lanes)")

    def _copy_out(self, p: Pass, count: int) -> None:
        """The columns that :meth:`_element` left in buffers, by streaming stores."""
        outputs = [k for k in p.stores if k in self.streams]
        for n in range(count if outputs else 0):
            self._at(n)
            for k in outputs:
                o = self.graph.outputs[k]
                copy = self.name(f"stream_{o.dtype}_{k}", f'streamer("{o.dtype}", "stream{k}", "out{k}", SPACES)')
                at = self.sum_of([(f"({self.out_row_offset(k)})", 1), *self.col_terms(o.axes, o.strides)], 0)
                self.put(f"{copy}(y{k}, {at}, s_stream{k} + {n * self.lanes * STORAGE_BYTES[o.dtype]}, lanes)")

    def _element(self, p: Pass, accumulators: dict[int, str], n: int) -> None:
        self.ready.clear()
        values = self.values
        span, terms = 1, []
        for a in reversed(self.program.cols):
            terms.append((f"i{a}", span))
            span *= self.graph.extents[a]
        if p.kept_in or p.kept_out:
            self.put(f"k = ({self.sum_of(reversed(terms), 0)}) * {self.lanes} + j")
        for i in p.kept_in:
            self.put(f"v{i} = {self.load(values[i].dtype, f'kept{i}')}(s_kept{i}, k)")
        for i in p.compute:
            if values[i].op in ("load", "gather"):
                self.put(f"o{i} = {self.row_offset(values[i])}")
            self.compute(i)
        for i in p.kept_out:
            self.put(f"{self.store(values[i].dtype, f'kept{i}')}(s_kept{i}, k, v{i})")
        for i, acc in accumulators.items():
            v = values[i]
            arg = self.cast(self.value(v.args[0]), values[v.args[0]].dtype, v.dtype)
            self.put(f"{acc} = {self.accumulate(v.op)}({acc}, {arg})")
        for k in p.stores:
            o = self.graph.outputs[k]
            if k in self.streams:
                self.scratch.take_bytes(f"stream{k}", _TOGETHER * self.lanes * STORAGE_BYTES[o.dtype])
                store = self.store(o.dtype, f"stream{k}")
                self.put(f"{store}(s_stream{k}, j + {n * self.lanes}, {self.stored(k)})")
                continue
            self.put(f"w{k} = {self.out_row_offset(k)}")
            self.write(k, self.sum_of([(f"w{k}", 1), *self.col_terms(o.axes, o.strides)], 0))
