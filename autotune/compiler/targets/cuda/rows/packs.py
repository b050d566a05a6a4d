"""Loads, gathers and stores of one pack of a row, and their guards.

The parts of a stack, or of a sum of ``select_backward``, are loads at the same address of different tensors, each
guarded on a separate part of one axis (:mod:`autotune.ir.simplify`). Separately, each is a predicated load, and the
zeros of the others are unpacked and added. If the index on the axis is the same for a whole pack, one load with a
selected pointer is enough (:class:`SelectedLoad`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Load, Pointer, Select, Stmt, Tuple, Unpack, Var
from autotune.compiler.program.program import Program, stride_of
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.targets.cuda.device import Counts
from autotune.compiler.targets.cuda.source import CudaSchedule
from autotune.compiler.targets.cuda.tensors import Tensors, fixed_index, items, moving_index, unravel_index, within
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Value


@dataclass(frozen=True)
class SelectedLoad:
    """Guarded loads that become one.

    Attributes:
        axis: the axis of their guards.
        parts: disjoint (begin, end, slot), ordered by begin.
        load: the first of them, guarded on all parts together.
        added: True if they were added to zeros, which turns a negative zero into a positive one.
    """

    axis: int
    parts: tuple[tuple[int, int, int], ...]
    load: Value
    added: bool

    @property
    def whole(self) -> bool:
        """True if the parts leave no gap."""
        return all(a[1] == b[0] for a, b in pairwise(self.parts))

    def pointer(self, index: Expr) -> Expr:
        """The pointer to load from where the index along the axis is ``index``."""
        chosen: Expr = Pointer(self.parts[-1][2])
        for _, end, slot in reversed(self.parts[:-1]):
            chosen = Select(index < end, Pointer(slot), chosen)
        return chosen


@dataclass(frozen=True)
class SelectedLoads:
    """The loads of a program that are printed as one.

    Attributes:
        loads: by the load that is printed for the others.
        results: for each select or sum that is one load: that load.
        skipped: values that are not printed at all.
    """

    loads: Mapping[int, SelectedLoad]
    results: Mapping[int, int]
    skipped: frozenset[int]


def find_selected_loads(program: Program, apart: Collection[int] = ()) -> SelectedLoads:
    """The largest selects and sums of guarded loads of which exactly one is not a zero.

    Args:
        apart: loads that are each printed as they are.
    """
    graph, inner = program.graph, program.cols[-1] if program.cols else -1
    wanted = {i for p in program.passes for i in p.compute}
    taken = {o.value for o in graph.outputs} | {c.value for c in program.columns} | set(program.kept)
    found: dict[int, tuple[SelectedLoad, int, frozenset[int]]] = {}  # with its load, and its values

    def once(i: int) -> bool:
        return i not in taken and len(graph.users[i]) == 1

    for i in sorted(wanted):
        v = graph.values[i]
        if v.op == "load":
            if i in apart:
                continue
            for axis, begin, end in v.guards:
                if axis != inner and not stride_of(v, axis) and program.domain(i) == "full":
                    found[i] = SelectedLoad(axis, ((begin, end, v.slot),), v, False), i, frozenset([i])
                    break
            continue
        args = v.args[1:] if v.op == "where" else v.args
        if v.op not in ("where", "add") or len(set(args)) != 2 or any(a not in found or not once(a) for a in args):
            continue
        (left, first, some), (right, second, others) = (found[a] for a in args)
        both = _both(left, right, v.op == "add", [graph.inputs[p[2]] for p in (*left.parts, *right.parts)])
        if both is None or (v.op == "where" and not _selects(graph.values, v, left, right)):
            continue
        found[i] = both, (first if both.parts[0] == left.parts[0] else second), some | others | {i}
    whole = [i for i in found if found[i][0].whole and not any(u in found for u in graph.users[i])]
    roots = [i for i in whole if graph.values[i].op != "load"]
    loads = {found[i][1]: found[i][0] for i in roots}
    made = {j for i in roots for j in found[i][2]}
    return SelectedLoads(loads, {i: found[i][1] for i in roots}, frozenset(made - set(loads) - set(roots)))


def _both(left: SelectedLoad, right: SelectedLoad, added: bool, types: list[str]) -> SelectedLoad | None:
    """Two as one, if their parts are disjoint and their loads differ in slot and part only."""
    parts = tuple(sorted((*left.parts, *right.parts)))
    if left.axis != right.axis or len(set(types)) != 1 or any(a[1] > b[0] for a, b in pairwise(parts)):
        return None
    whole = (left.axis, parts[0][0], parts[-1][1])
    guards = [tuple(sorted([whole, *(g for g in x.load.guards if g[0] != left.axis)])) for x in (left, right)]
    load, other = (replace(x.load, guards=own) for x, own in zip((left, right), guards, strict=True))
    if load != replace(other, slot=load.slot):
        return None
    return SelectedLoad(left.axis, parts, load, added or left.added or right.added)


def _selects(values: tuple[Value, ...], v: Value, left: SelectedLoad, right: SelectedLoad) -> bool:
    """True if a select takes its first argument on its parts and the second one on later ones, and zeros are added to
    both or to neither."""
    test = values[v.args[0]]
    if test.op != "lt" or left.added != right.added:
        return False
    position, limit = (values[a] for a in test.args)
    if position.op != "index" or position.axes != (left.axis,) or limit.op != "const":
        return False
    if (position.scale, position.shift) != (1, 0) or position.dtype == "float32":
        return False
    return left.whole and right.whole and left.parts[-1][1] == int(limit.number) == right.parts[0][0]


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
