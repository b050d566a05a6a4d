"""Loads, gathers and stores of one pack of a row, and their guards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Load, Pointer, Select, Stmt, Tuple, Unpack, Var
from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.targets.cuda.device import Counts
from autotune.compiler.targets.cuda.rows.select_load import find_selected_loads
from autotune.compiler.targets.cuda.source import CudaSchedule
from autotune.compiler.targets.cuda.tensors import Tensors, fixed_index, items, moving_index, unravel_index, within
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Value

FALSE = Const(False, "bool")


def vector_of(program: Program, schedule: CudaSchedule) -> int:
    """Elements of a pack. Raises Unsupported if the schedule's vectors do not divide a row."""
    vec = vector_length(program, schedule.vector_bytes)
    if vec == 0:
        raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide a row")
    return vec


def counts_of(program: Program, vec: int) -> Counts:
    """The width of counters of rows and columns; a flat kernel counts the packs of all rows."""
    flat = program.pointwise and not program.columns
    return Counts.of(program.n_rows * (program.n_cols // vec if flat else 1), program.n_cols)


@dataclass(frozen=True)
class RowOptions:
    """Options of reading and writing tensors that are no parameters of a schedule.

    Attributes:
        apart: loads that are printed separately.
        overwritten: slots whose memory an output may share.
        tested: True if stores test that the row exists, for any schedule.
        count: the width of counters, if it does not follow from the program.
        wide_columns: True if the column number is an int64 although rows and columns are counted in int32.
    """

    apart: Collection[int] = ()
    overwritten: Collection[int] = ()
    tested: bool = False
    count: Counts | None = None
    wide_columns: bool = False


class RowTensors(Tensors):
    """The tensors of one program as a row-wise kernel reads and writes them."""

    row, column = Var("row"), Var("c")
    """Number of the row, and of the first column of the current pack."""
    ok = Var("ok", "bool")
    """True if the row exists."""
    prefetched = Var("x")
    """The words of one pack that were loaded before."""

    def __init__(self, program: Program, schedule: CudaSchedule, options: RowOptions | None = None) -> None:
        """
        Raises:
            Unsupported: the schedule's vectors do not divide a row.
        """
        self.options = options = options or RowOptions()
        vec = vector_of(program, schedule)
        along = program.cols[-1] if program.cols else -1
        super().__init__(program, schedule, along, vec, program.rows, options.overwritten)
        self.count = options.count or counts_of(program, vec)
        self.selected = find_selected_loads(program, options.apart)
        # There are no missing rows if their number is known and is a multiple of the rows of a block.
        partial = program.dynamic == 0 or program.n_rows % schedule.rows_per_block > 0
        several = (not program.pointwise or bool(program.columns)) and schedule.rows_per_block > 1
        self.ok_needed = options.tested or (several and partial)

    # ---- names ------------------------------------------------------------------------------------------------------

    def index(self, axis: int) -> Var:
        """The index along an axis, of the row or of the column."""
        return moving_index(axis) if axis in self.program.cols else fixed_index(axis)

    def varies(self, i: int) -> bool:
        return self.program.domain(i) != "row"

    # ---- what is read how -------------------------------------------------------------------------------------------

    def raw_words(self, i: int) -> int:
        """32-bit words of one raw pack of load ``i``."""
        return max(1, self.vec * STORAGE_BYTES[self.storage(i)] // 4)

    def source(self, i: int) -> tuple[Value, Expr, list[Stmt]]:
        """Of load ``i``: the load it is printed as, its pointer, and statements that select that."""
        v, joined = self.graph.values[i], self.selected.loads.get(i)
        if joined is None:
            return v, Pointer(v.slot), []
        chosen = Var(f"s{i}")
        return joined.load, chosen, [Assign(chosen, joined.pointer(self.index(joined.axis)))]

    def by_pack(self, v: Value) -> bool:
        """True if the guards of a load hold for all elements of a pack or for none."""
        return not any(a == self.program.cols[-1] and (lo % self.vec or hi % self.vec) for a, lo, hi in v.guards)

    def guard(self, v: Value, lane: int | None = None, rows_only: bool = False) -> Expr | None:
        """Condition under which a guarded load may touch memory in one lane, or with the whole pack."""
        inner = self.program.cols[-1] if self.program.cols else -1
        guards = [g for g in v.guards if not rows_only or g[0] in self.program.rows]

        def index(a: int) -> Expr:
            return self.index(a) + lane if a == inner and lane is not None else self.index(a)

        return within(guards, self.graph.extents, self.program.dynamic, index)

    # ---- indices and addresses --------------------------------------------------------------------------------------

    def row_indices(self) -> list[Stmt]:
        """Takes the number ``row`` apart into the index along each row axis."""
        return unravel_index(self.row, self.program.rows, self.graph.extents, self.count, fixed_index)

    def bases(self, loads: Collection[int] | None = None, stores: Collection[int] | None = None) -> list[Stmt]:
        """Sets the offset of this row in every tensor that a walk touches, or in those of ``loads`` and ``stores``."""
        used = {i for q in self.program.passes for i in q.compute if i in self.access} - self.selected.skipped
        written = {k for q in self.program.passes for k in q.stores}
        terms = [(self.base(i), self.access[i]) for i in sorted(used) if loads is None or i in loads]
        terms += [(self.out_base(k), self.out_access[k]) for k in sorted(written) if stores is None or k in stores]
        return [Assign(base, Cast("int64", access.base())) for base, access in terms]

    def column_indices(self) -> list[Stmt]:
        """Takes the column number ``c`` apart into the index along each column axis."""
        return unravel_index(self.column, self.program.cols, self.graph.extents, self.count, moving_index)

    # ---- loads, gathers, stores of one pack -------------------------------------------------------------------------

    def unpacked(self, i: int, pack: Expr) -> list[Stmt]:
        """The lanes of a pack that was loaded as one."""
        whole = Var(f"w{i}")
        return [Assign(whole, pack), *self.spread(i, whole)]

    def emit_load(self, i: int, issued: Sequence[int]) -> list[Stmt]:
        """Load ``i``, from its words if it is among the loads ``issued`` before."""
        lanes, access, storage, hint = self.variables(i), self.access[i], self.storage(i), self.load_hint(i)
        v, pointer, out = self.source(i)
        if access.vector and self.by_pack(v):
            words = self.raw(i)
            if i in issued:
                before = sum(map(self.raw_words, issued[: issued.index(i)]))
                own = Tuple(tuple(items(self.prefetched, self.raw_words(i), before)))
                return [Assign(words, own), *self.unpacked(i, Unpack(storage, self.vec, words))]
            at, guard = access.at(self.base(i)), self.guard(v)
            if self.packed(i):
                out.append(Assign(words, Load(storage, self.vec, hint, pointer, at, "words")))
                return out + self.unpacked(i, Unpack(storage, self.vec, words))
            return out + self.unpacked(i, Load(storage, self.vec, hint, pointer, at, guard=guard))
        if access.vector and self.vec * STORAGE_BYTES[storage] <= 16:
            return out + self._partial(i, v, pointer)
        single = access.step == 0 and not any(a == self.program.cols[-1] for a, _, _ in v.guards)
        for e in range(1 if single else self.vec):
            at = access.at(self.base(i), e)
            out.append(Assign(lanes[e], Load(storage, 1, hint, pointer, at, guard=self.guard(v, e))))
        return out + [Assign(x, lanes[0]) for x in lanes[1:] if single]

    def _partial(self, i: int, v: Value, pointer: Expr) -> list[Stmt]:
        """A pack whose guard may hold for some elements only: it is loaded whole, and the other elements are zero.

        After the last row this reads up to 14 bytes outside the tensor. They are in the tensor's last page, since the
        16 bytes are aligned and the first of them belong to the tensor.
        """
        inner, whole = self.program.cols[-1], Var(f"w{i}")
        low, high = next((lo, hi) for a, lo, hi in v.guards if a == inner)
        around = (inner, low - low % self.vec, -(-high // self.vec) * self.vec)
        wide = replace(v, guards=tuple(around if g[0] == inner else g for g in v.guards))
        at = self.access[i].at(self.base(i))
        load = Load(self.storage(i), self.vec, self.load_hint(i), pointer, at, "partial", self.guard(wide))
        along = replace(v, guards=tuple(g for g in v.guards if g[0] == inner))
        lanes = [(self.guard(along, e), item) for e, item in enumerate(items(whole, self.vec))]
        zero = Const(0, v.dtype)
        return [Assign(whole, load), *self.assigned(i, [Select(t, x, zero) if t else x for t, x in lanes])]

    def gathers_packs(self, i: int) -> bool:
        """True if gather ``i`` reads a whole aligned pack by one index, as in an embedding."""
        v, inner = self.graph.values[i], self.program.cols[-1]
        aligned = v.index_stride % self.vec == 0 and inner not in self.graph.values[v.args[0]].axes
        return self.access[i].vector and self.by_pack(v) and aligned

    def emit_gather(self, i: int) -> list[Stmt]:
        if not self.gathers_packs(i):
            return self.gather_each(i)
        v = self.graph.values[i]
        index, guard = self.name(v.args[0]), self.guard(v)
        inside = Select(index >= 0, index < v.bound, FALSE)
        at = self.access[i].at(self.base(i)) + Cast("int64", index) * v.index_stride
        guard = Select(guard, inside, FALSE) if guard else inside
        return self.unpacked(i, Load(self.storage(i), self.vec, "default", Pointer(v.slot), at, guard=guard))

    def emit_store(self, k: int) -> list[Stmt]:
        return self.store_pack(k, self.schedule.store_hint, self.vec, self.ok if self.ok_needed else None)
