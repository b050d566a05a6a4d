"""How a kernel reads and writes its tensors: vectors, addresses, guards; loads, gathers and stores of one pack."""

from __future__ import annotations

from collections.abc import Collection

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Load,
    Pointer,
    Select,
    Stmt,
    Store,
    Tuple,
    Unpack,
    Var,
    both,
    sum_of,
    when,
)
from autotune.compiler.program.program import Program, read_once
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.select_load import find_joins
from autotune.compiler.targets.cuda.source import CudaSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Value

ROW, COLUMN = Var("row"), Var("c")
"""Number of the row, and of the first column of the pack at hand."""
OK = Var("ok", "bool")
"""Whether the row is there."""
AHEAD = Var("x")
"""The words of one pack that were loaded a row ahead."""
FALSE = Const(False, "bool")


class Access:
    """How one load, gather or output is addressed in a pack."""

    def __init__(
        self, program: Program, axes: tuple[int, ...], strides: tuple[int, ...], offset: int, vec: int
    ) -> None:
        self.by_axis = dict(zip(axes, strides, strict=True))
        self.offset = offset
        inner = program.cols[-1] if program.cols else -1
        self.inner = self.by_axis.get(inner, 0)
        aligned = offset % vec == 0 and all(s % vec == 0 for a, s in self.by_axis.items() if a != inner)
        self.vector = vec > 1 and self.inner == 1 and aligned
        self.rows = [(a, s) for a, s in self.by_axis.items() if a in program.rows and s]
        self.outer = [(a, s) for a, s in self.by_axis.items() if a in program.cols and a != inner and s]


class Accesses:
    """How the tensors of one program are read and written under one schedule."""

    def __init__(self, program: Program, schedule: CudaSchedule, apart: Collection[int] = ()) -> None:
        """``apart``: loads that are not to be joined with others."""
        self.program, self.schedule, self.graph = program, schedule, program.graph
        self.vec = vector_length(program, schedule.vector_bytes)
        if self.vec == 0:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide a row")
        flat = program.pointwise and not program.columns
        self.count = Counts.of(program.n_rows * (program.n_cols // self.vec if flat else 1), program.n_cols)
        self.access: dict[int, Access] = {}
        for i, v in enumerate(self.graph.values):
            if v.op in ("load", "gather"):
                self.access[i] = Access(program, v.axes, v.strides, v.offset, self.vec)
        self.out_access = [Access(program, o.axes, o.strides, o.offset, self.vec) for o in self.graph.outputs]
        self.joins = find_joins(program, apart)
        # Rows that are not there: none where their number is known and divides by those of a block.
        partial = program.dynamic == 0 or program.n_rows % schedule.rows_per_block > 0
        self.ok_needed = (not program.pointwise or bool(program.columns)) and schedule.rows_per_block > 1 and partial
        self.ahead: tuple[int, ...] = ()  # loads that pass ``ahead_pass`` finds done, issued a row before
        self.ahead_pass = -1

    # ---- names ------------------------------------------------------------------------------------------------------

    def index(self, axis: int) -> Var:
        """The index along an axis, of the row or of the column."""
        return Var(f"j{axis}") if axis in self.program.cols else Var(f"i{axis}", "int64")

    def base(self, i: int) -> Var:
        """Element offset of the row in the tensor of load or gather ``i``."""
        return Var(f"b{i}", "int64")

    def out_base(self, k: int) -> Var:
        """Element offset of the row in output ``k``."""
        return Var(f"o{k}", "int64")

    def lanes(self, i: int) -> list[Var]:
        """Value ``i`` of a pack, lane by lane."""
        return [Var(f"v{i}_{e}", self.graph.values[i].dtype) for e in range(self.vec)]

    def raw(self, i: int) -> Var:
        """A pack of load ``i`` as it lies in memory."""
        return Var(f"u{i}")

    def out_pointer(self, k: int) -> Pointer:
        return Pointer(len(self.graph.inputs) + k)

    def storage(self, i: int) -> str:
        """Storage type of load or gather ``i``."""
        return self.graph.inputs[self.graph.values[i].slot]

    # ---- what is read how -------------------------------------------------------------------------------------------

    def ahead_words(self, i: int) -> list[Expr]:
        """The words of load ``i`` among what was loaded a row ahead."""
        at = sum(self.raw_words(k) for k in self.ahead[: self.ahead.index(i)])
        return [AHEAD[at + w] for w in range(self.raw_words(i))]

    def raw_words(self, i: int) -> int:
        """32-bit words of one pack of load ``i`` as it lies in memory."""
        return max(1, self.vec * STORAGE_BYTES[self.storage(i)] // 4)

    def packed(self, i: int) -> bool:
        """Whether a kept value stays as loaded: 16-bit elements, two to a register."""
        v = self.graph.values[i]
        return v.op == "load" and not v.guards and STORAGE_BYTES[self.storage(i)] == 2 and self.access[i].vector

    def load_hint(self, i: int) -> str:
        """Hints apply to what is read once: loads that differ in every row and column."""
        once = read_once(self.graph, i, (*self.program.rows, *self.program.cols))
        return self.schedule.load_hint if once else "default"

    def source(self, i: int) -> tuple[Value, Expr, list[Stmt]]:
        """Of load ``i``: the load it is printed as, its pointer, and statements that select that."""
        v, joined = self.graph.values[i], self.joins.loads.get(i)
        if joined is None:
            return v, Pointer(v.slot), []
        chosen = Var(f"s{i}")
        return joined.load, chosen, [Assign(chosen, joined.pointer(self.index(joined.axis)))]

    def by_pack(self, v: Value) -> bool:
        """Whether the guards of a load hold for all elements of a pack or for none."""
        return not any(a == self.program.cols[-1] and (lo % self.vec or hi % self.vec) for a, lo, hi in v.guards)

    def guard(self, v: Value, lane: int | None = None, rows_only: bool = False) -> Expr | None:
        """Condition under which a guarded load may touch memory in one lane, or with the whole pack."""
        inner = self.program.cols[-1] if self.program.cols else -1
        tests: list[Expr] = []
        for a, lo, hi in v.guards:
            if rows_only and a not in self.program.rows:
                continue
            at = self.index(a) + lane if a == inner and lane is not None else self.index(a)
            if lo > 0:
                tests.append(at >= lo)
            if hi < self.graph.extents[a] or a == self.program.dynamic:
                tests.append(at < hi)
        return both(*tests)

    # ---- indices and addresses --------------------------------------------------------------------------------------

    def base_terms(self, access: Access) -> Expr:
        """Element offset of the row."""
        return sum_of(((self.index(a), s) for a, s in access.rows), access.offset)

    def row_indices(self) -> list[Stmt]:
        """Takes the number ``row`` apart into the index along each row axis."""
        out: list[Stmt] = []
        rest = ROW
        for a in reversed(self.program.rows[1:]):
            extent, above = self.graph.extents[a], Var(f"q{a}", self.count.type)
            out.append(Assign(self.index(a), Cast("int64", self.count.remainder(rest, extent))))
            out.append(Assign(above, self.count.quotient(rest, extent)))
            rest = above
        if self.program.rows:  # the outermost is what is left: its extent may be open
            out.append(Assign(self.index(self.program.rows[0]), Cast("int64", rest)))
        return out

    def bases(self, loads: Collection[int] | None = None, stores: Collection[int] | None = None) -> list[Stmt]:
        """Sets the offset of this row in every tensor that a walk touches, or in those of ``loads`` and ``stores``."""
        used = {i for q in self.program.passes for i in q.compute if i in self.access} - self.joins.skipped
        written = {k for q in self.program.passes for k in q.stores}
        terms = [(self.base(i), self.access[i]) for i in sorted(used) if loads is None or i in loads]
        terms += [(self.out_base(k), self.out_access[k]) for k in sorted(written) if stores is None or k in stores]
        return [Assign(base, Cast("int64", self.base_terms(access))) for base, access in terms]

    def column_indices(self) -> list[Stmt]:
        """Takes the column number ``c`` apart into the index along each column axis."""
        out: list[Stmt] = []
        rest = COLUMN
        for a in reversed(self.program.cols[1:]):
            extent, above = self.graph.extents[a], Var(f"n{a}", self.count.type)
            out.append(Assign(self.index(a), self.count.remainder(rest, extent)))
            out.append(Assign(above, self.count.quotient(rest, extent)))
            rest = above
        out.append(Assign(self.index(self.program.cols[0]), rest))
        return out

    def address(self, access: Access, base: Expr, lane: int) -> Expr:
        """Element of a lane of the pack at hand, ``base`` being the row's offset."""
        terms = [(base, 1), *((self.index(a), s) for a, s in access.outer)]
        return sum_of([*terms, (self.index(self.program.cols[-1]), access.inner)], lane * access.inner)

    # ---- loads, gathers, stores of one pack -------------------------------------------------------------------------

    def unpacked(self, i: int, pack: Expr) -> list[Stmt]:
        """The lanes of a pack that was loaded as one."""
        whole = Var(f"w{i}")
        return [Assign(whole, pack), *(Assign(x, whole[e]) for e, x in enumerate(self.lanes(i)))]

    def emit_load(self, i: int, number: int) -> list[Stmt]:
        """Load ``i`` in pass ``number``."""
        lanes, access, storage, hint = self.lanes(i), self.access[i], self.storage(i), self.load_hint(i)
        v, pointer, out = self.source(i)
        if access.vector and self.by_pack(v):
            words = self.raw(i)
            if i in self.ahead and number == self.ahead_pass:
                return [
                    Assign(words, Tuple(tuple(self.ahead_words(i)))),
                    *self.unpacked(i, Unpack(storage, self.vec, words)),
                ]
            at, guard = self.address(access, self.base(i), 0), self.guard(v)
            if self.packed(i):
                out.append(Assign(words, Load(storage, self.vec, hint, pointer, at, "words")))
                return out + self.unpacked(i, Unpack(storage, self.vec, words))
            return out + self.unpacked(i, Load(storage, self.vec, hint, pointer, at, guard=guard))
        single = access.inner == 0 and not any(a == self.program.cols[-1] for a, _, _ in v.guards)
        for e in range(1 if single else self.vec):
            at = self.address(access, self.base(i), e)
            out.append(Assign(lanes[e], Load(storage, 1, hint, pointer, at, guard=self.guard(v, e))))
        return out + [Assign(x, lanes[0]) for x in lanes[1:] if single]

    def gathers_packs(self, i: int) -> bool:
        """Whether gather ``i`` takes a whole pack from one place, as an embedding's rows are: by one index, aligned."""
        v, inner = self.graph.values[i], self.program.cols[-1]
        return (
            self.access[i].vector
            and self.by_pack(v)
            and v.index_stride % self.vec == 0
            and inner not in self.graph.values[v.args[0]].axes
        )

    def emit_gather(self, i: int) -> list[Stmt]:
        v, access, storage = self.graph.values[i], self.access[i], self.storage(i)

        def load(e: int, lanes: int, form: str, guard: Expr | None) -> Load:
            at = self.address(access, self.base(i), e) + Cast("int64", self.name(v.args[0], e)) * v.index_stride
            return Load(storage, lanes, "default", Pointer(v.slot), at, form, guard)

        if self.gathers_packs(i):
            index, guard = self.name(v.args[0], 0), self.guard(v)
            inside = Select(index >= 0, index < v.bound, FALSE)
            return self.unpacked(i, load(0, self.vec, "plain", Select(guard, inside, FALSE) if guard else inside))
        out: list[Stmt] = []
        for e, x in enumerate(self.lanes(i)):
            index = self.name(v.args[0], e)
            guard = both(index >= 0, index < v.bound, self.guard(v, e))
            out += [Assign(x, Const(0, v.dtype)), when(guard, [Assign(x, load(e, 1, "fixed", None))])]
        return out

    def emit_store(self, k: int) -> list[Stmt]:
        o, access = self.graph.outputs[k], self.out_access[k]
        xs = self.stored(k)
        step = self.vec if access.vector else 1
        return [
            Store(
                o.dtype,
                self.schedule.store_hint,
                self.out_pointer(k),
                self.address(access, self.out_base(k), e),
                tuple(xs[e : e + step]),
                OK if self.ok_needed else None,
            )
            for e in range(0, self.vec, step)
        ]

    def stored(self, k: int) -> list[Expr]:
        """The lanes of output ``k`` in the arithmetic type its storage takes."""
        o = self.graph.outputs[k]
        return [lower.stored(self.name(o.value, e), o.dtype) for e in range(self.vec)]

    def name(self, i: int, e: int) -> Expr:
        """Value ``i`` in lane ``e``: constants inline, row values without a lane."""
        v = self.graph.values[i]
        if v.op == "const":
            return Const(v.number, v.dtype)
        return Var(f"v{i}" if self.program.domain(i) == "row" else f"v{i}_{e}", v.dtype)
