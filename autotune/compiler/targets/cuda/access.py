"""How a kernel reads and writes its tensors: vectors, addresses, guards; loads, gathers and stores of one pack."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autotune.compiler.program.program import Program, read_once
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.names import HINTS, NAMES
from autotune.compiler.targets.cuda.operators import literal, pointwise
from autotune.compiler.targets.cuda.select_load import find_joins
from autotune.compiler.targets.cuda.source import CudaSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Value, compute_type


def narrowest(program: Program) -> int:
    """Bytes of the narrowest storage type among the full-size tensors: the unit of ``vector_bytes``."""
    g = program.graph
    sizes = [
        STORAGE_BYTES[g.inputs[v.slot]]
        for i, v in enumerate(g.values)
        if v.op == "load" and program.domain(i) == "full" and program.col_stride(v) == 1
    ]
    sizes += [STORAGE_BYTES[o.dtype] for o in g.outputs if any(a in program.cols for a in o.axes)]
    return min(sizes, default=4)


def vector_length(program: Program, vector_bytes: int) -> int:
    """Elements a thread takes at a time; 0 if ``vector_bytes`` does not fit this program."""
    size = narrowest(program)
    if vector_bytes % size:
        return 0
    n = vector_bytes // size
    if n == 1:
        return 1
    if not program.cols or n > 16:
        return 0
    # A row of elements of any length is walked in vectors, and what is left over one by one.
    return n if open_row(program) or program.graph.extents[program.cols[-1]] % n == 0 else 0


def open_row(program: Program) -> bool:
    """Whether a group is one row of independent elements, their number an argument of the kernel."""
    return program.pointwise and not program.rows and program.dynamic == 0


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
        self.p, self.s, self.g = program, schedule, program.graph
        self.vec = vector_length(program, schedule.vector_bytes)
        if self.vec == 0:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide a row")
        flat = program.pointwise and not program.columns
        self.count = Counts.of(program.n_rows * (program.n_cols // self.vec if flat else 1), program.n_cols)
        n_in = len(self.g.inputs)
        self.out_ptr = [f"p{n_in + k}" for k in range(len(self.g.outputs))]
        self.access: dict[int, Access] = {}
        for i, v in enumerate(self.g.values):
            if v.op in ("load", "gather"):
                self.access[i] = Access(program, v.axes, v.strides, v.offset, self.vec)
        self.out_access = [Access(program, o.axes, o.strides, o.offset, self.vec) for o in self.g.outputs]
        self.joins = find_joins(program, apart)
        # Rows that are not there: none where their number is known and divides by those of a block.
        partial = program.dynamic == 0 or program.n_rows % schedule.rows_per_block > 0
        self.ok_needed = (not program.pointwise or bool(program.columns)) and schedule.rows_per_block > 1 and partial
        self.ahead: tuple[int, ...] = ()  # loads that pass ``ahead_pass`` finds done, issued a row before
        self.ahead_pass = -1

    def ahead_words(self, i: int, x: str) -> str:
        """The words of load ``i`` in the tuple ``x`` of what was loaded a row ahead."""
        at = sum(self.raw_words(k) for k in self.ahead[: self.ahead.index(i)])
        return ", ".join(f"{x}[{at + w}]" for w in range(self.raw_words(i)))

    def raw_words(self, i: int) -> int:
        """32-bit words of one pack of load ``i`` as it lies in memory."""
        return max(1, self.vec * STORAGE_BYTES[self.g.inputs[self.g.values[i].slot]] // 4)

    def packed(self, i: int) -> bool:
        """Whether a kept value stays as loaded: 16-bit elements, two to a register."""
        v = self.g.values[i]
        return v.op == "load" and not v.guards and STORAGE_BYTES[self.g.inputs[v.slot]] == 2 and self.access[i].vector

    def load_hint(self, i: int) -> str:
        """Hints apply to what is read once: loads that differ in every row and column."""
        once = read_once(self.g, i, (*self.p.rows, *self.p.cols))
        return HINTS[self.s.load_hint] if once else "d"

    def base_terms(self, acc: Access) -> str:
        terms = [f"i{a} * {s}" if s != 1 else f"i{a}" for a, s in acc.rows]
        if acc.offset:
            terms.append(str(acc.offset))
        return " + ".join(terms) if terms else "0"

    def row_indices(self) -> list[str]:
        """Lines that take the number ``row`` apart into the index ``i<axis>`` along each row axis."""
        out = []
        rem = "row"
        for a in reversed(self.p.rows[1:]):
            out.append(f"i{a} = int64({self.count.urem}({rem}, {self.g.extents[a]}))")
            out.append(f"q{a} = {self.count.udiv}({rem}, {self.g.extents[a]})")
            rem = f"q{a}"
        if self.p.rows:  # the outermost is what is left: its extent may be open
            out.append(f"i{self.p.rows[0]} = int64({rem})")
        return out

    def bases(self) -> list[str]:
        """Lines with the element offset of this row in every tensor that a walk touches."""
        used = sorted({i for q in self.p.passes for i in q.compute if i in self.access} - self.joins.skipped)
        out = [f"b{i} = int64({self.base_terms(self.access[i])})" for i in used]
        for k in sorted({k for q in self.p.passes for k in q.stores}):
            out.append(f"o{k} = int64({self.base_terms(self.out_access[k])})")
        return out

    def source(self, i: int) -> tuple[Value, list[int], str, list[str]]:
        """Of load ``i``: the load it is printed as, its slots, the name of its pointer, and lines that make that."""
        v, joined = self.g.values[i], self.joins.loads.get(i)
        if joined is None:
            return v, [v.slot], f"p{v.slot}", []
        index = f"{'j' if joined.axis in self.p.cols else 'i'}{joined.axis}"
        return joined.load, [p[2] for p in joined.parts], f"s{i}", [f"s{i} = {joined.pointer(index)}"]

    def by_pack(self, v: Value) -> bool:
        """Whether the guards of a load hold for all elements of a pack or for none."""
        return not any(a == self.p.cols[-1] and (lo % self.vec or hi % self.vec) for a, lo, hi in v.guards)

    def guard_text(self, v: Value, axes: tuple[int, ...], lane: str) -> str:
        """Condition under which a guarded load may touch memory, over the guards on ``axes``."""
        inner = self.p.cols[-1] if self.p.cols else -1
        conds = []
        for a, lo, hi in v.guards:
            if a not in axes:
                continue
            i = f"(j{a}{lane})" if a == inner else (f"j{a}" if a in self.p.cols else f"i{a}")
            if lo > 0:
                conds.append(f"{i} >= {lo}")
            if hi < self.g.extents[a] or a == self.p.dynamic:
                conds.append(f"{i} < {hi}")
        return " and ".join(conds)

    def need_guards(self, v: Value, need: Any) -> None:
        """Ask for the row indices that the guards of a load look at."""
        for a, _, _ in v.guards:
            if a in self.p.rows:
                need(f"i{a}")

    def column_indices(self) -> list[str]:
        """Lines that take the column number ``c`` apart into the index ``j<axis>`` along each column axis."""
        out = []
        rest = "c"
        for a in reversed(self.p.cols[1:]):
            out.append(f"j{a} = {self.count.urem}({rest}, {self.g.extents[a]})")
            out.append(f"n{a} = {self.count.udiv}({rest}, {self.g.extents[a]})")
            rest = f"n{a}"
        out.append(f"j{self.p.cols[0]} = {rest}")
        return out

    def address(self, acc: Access, base: str, e: int) -> str:
        """Element of lane ``e`` of the pack at hand, ``base`` being the row's offset."""
        inner = self.p.cols[-1]
        terms = [base]
        terms += [f"j{a} * {s}" if s != 1 else f"j{a}" for a, s in acc.outer]
        if acc.inner:
            terms.append(f"j{inner}" if acc.inner == 1 else f"j{inner} * {acc.inner}")
            if e:
                terms.append(str(e * acc.inner))
        return " + ".join(terms)

    def emit_load(self, i: int, v: Value, body: list[str], need: Any, address: Any, now: int) -> None:
        vec, acc, short = self.vec, self.access[i], NAMES[self.g.inputs[v.slot]]
        v, slots, ptr, which = self.source(i)
        hint = self.load_hint(i)
        if i not in self.ahead or now != self.ahead_pass:
            for slot in slots:
                need(f"p{slot}")
            body += which
        inner = self.p.cols[-1]
        axes = (*self.p.cols, *self.p.rows)
        self.need_guards(v, need)
        if acc.vector and self.by_pack(v):
            if i in self.ahead and now == self.ahead_pass:
                body.append(f"u{i} = ({self.ahead_words(i, need('x'))},)")
                body.append(f"w{i} = un_{short}_{vec}(u{i})")
                body.extend(f"v{i}_{e} = w{i}[{e}]" for e in range(vec))
                return
            guard = self.guard_text(v, axes, "")
            at = address(acc, f"b{i}", 0)
            if self.packed(i):
                body.append(f"u{i} = lr_{short}_{vec}_{hint}({ptr}, {at})")
                body.append(f"w{i} = un_{short}_{vec}(u{i})")
            elif guard:
                body.append(f"w{i} = lg_{short}_{vec}_{hint}({ptr}, {at}, {guard})")
            else:
                body.append(f"w{i} = ld_{short}_{vec}_{hint}({ptr}, {at})")
            body.extend(f"v{i}_{e} = w{i}[{e}]" for e in range(vec))
            return
        single = acc.inner == 0 and not any(a == inner for a, _, _ in v.guards)
        for e in range(1 if single else vec):
            guard = self.guard_text(v, axes, f" + {e}")
            at = address(acc, f"b{i}", e)
            if guard:
                body.append(f"v{i}_{e} = lg_{short}_1_{hint}({ptr}, {at}, {guard})")
            else:
                body.append(f"v{i}_{e} = ld_{short}_1_{hint}({ptr}, {at})")
        if single:
            body.extend(f"v{i}_{e} = v{i}_0" for e in range(1, vec))

    def gathers_packs(self, i: int) -> bool:
        """Whether gather ``i`` takes a whole pack from one place, as an embedding's rows are: by one index, aligned."""
        v, inner = self.g.values[i], self.p.cols[-1]
        return (
            self.access[i].vector
            and self.by_pack(v)
            and v.index_stride % self.vec == 0
            and inner not in self.g.values[v.args[0]].axes
        )

    def emit_gather(self, i: int, v: Value, body: list[str], need: Any, address: Any, use: Any) -> None:
        vec, acc, short, ptr = self.vec, self.access[i], NAMES[self.g.inputs[v.slot]], need(f"p{v.slot}")
        axes = (*self.p.cols, *self.p.rows)
        self.need_guards(v, need)

        def place(e: int) -> tuple[str, str, str]:
            index = use(v.args[0], e)
            at = f"{address(acc, f'b{i}', e)} + int64({index}) * {v.index_stride}"
            return at, f"sel({index} >= 0, {index} < {v.bound}, False)", index

        if self.gathers_packs(i):
            at, inside, _ = place(0)
            guard = self.guard_text(v, axes, "")
            where = f"sel({guard}, {inside}, False)" if guard else inside
            body.append(f"w{i} = lg_{short}_{vec}_d({ptr}, {at}, {where})")
            body.extend(f"v{i}_{e} = w{i}[{e}]" for e in range(vec))
            return
        for e in range(vec):
            at, _, index = place(e)
            guard = self.guard_text(v, axes, f" + {e}")
            body.append(f"v{i}_{e} = {literal(0, v.dtype)}")
            body.append(f"if {index} >= 0 and {index} < {v.bound}{' and ' + guard if guard else ''}:")
            body.append(f"    v{i}_{e} = lk_{short}_1_d({ptr}, {at})")

    def emit_store(self, k: int, body: list[str], need: Any, address: Any, use: Any) -> None:
        o, acc, vec = self.g.outputs[k], self.out_access[k], self.vec
        short, ptr, hint = NAMES[o.dtype], need(self.out_ptr[k]), HINTS[self.s.store_hint]
        xs = [self.stored(o.value, o.dtype, use(o.value, e)) for e in range(vec)]
        name, where = ("sg", f", {need('ok')}") if self.ok_needed else ("st", "")
        if acc.vector:
            at = address(acc, f"o{k}", 0)
            body.append(f"{name}_{short}_{vec}_{hint}({ptr}, {at}, ({', '.join(xs)}){where})")
        else:
            for e in range(vec):
                body.append(f"{name}_{short}_1_{hint}({ptr}, {address(acc, f'o{k}', e)}, {xs[e]}{where})")

    def stored(self, i: int, storage: str, x: str) -> str:
        """``x`` converted to the arithmetic type its storage takes."""
        have, want = self.g.values[i].dtype, compute_type(storage)
        if have == want:
            return x
        return pointwise(Value("cast", (i,), dtype=want), [have], [x])
