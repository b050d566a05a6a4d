"""Print a kernel program as Numba CUDA source over raw pointers.

Two skeletons. A program with reductions is *row-wise*: ``threads_per_row`` threads walk the packs (vectors) of one
row, and reductions are combined by shuffles within a warp and by shared memory across warps: thread, warp and block
scope. A pointwise program is *flat*: threads walk the packs of all elements. Either way a pass over one pack is a
device function, so that Numba types it once however many packs a thread has, and what is kept between passes travels in
tuples, which end up in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.codegen.counts import Counts
from autotune.codegen.cuda_columns import add_columns, beginnings
from autotune.codegen.cuda_early import bits_made, bits_taken
from autotune.codegen.cuda_joined import find_joins
from autotune.codegen.cuda_moments import add_moments
from autotune.codegen.cuda_names import HINTS, NAMES, tuple_of
from autotune.codegen.expr import LOG2E, combine, literal, pointwise
from autotune.codegen.program import Pass, Program, read_once
from autotune.errors import Unsupported
from autotune.fusion.graph import STORAGE_BYTES, Value, compute_type
from autotune.fusion.ops import POINTWISE

GENERATOR = "cuda-3"
"""Changes when emitted code changes meaning; part of an artifact."""


@dataclass(frozen=True)
class CudaSchedule:
    """The parameters of ``search_spaces/fusion.toml`` under ``[cuda]``."""

    threads_per_row: int
    rows_per_block: int
    vector_bytes: int
    keep: str
    online: bool
    unroll: int
    max_registers: int
    load_hint: str
    store_hint: str
    blocks_per_sm: int
    cluster: int = 1
    finish: str = "kernel"
    prefetch: bool = False
    held: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CudaSchedule:
        later = ("cluster", "finish", "prefetch", "held")  # what configurations stored by earlier versions lack
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config or name not in later})

    @property
    def block(self) -> int:
        return self.threads_per_row * self.rows_per_block


@dataclass(frozen=True)
class CudaSource:
    """An emitted kernel, in parts, so that several may become one.

    Attributes:
        functions: text of its device functions, named ``f<n>`` and ``e<n>``.
        body: the kernel's lines. Block number and number of blocks are ``blk`` and ``nblk`` (int32) in them, never
            ``cuda.blockIdx`` and ``cuda.gridDim``; they return nowhere early.
        params: short storage names of its pointers ``p0``, ``p1``, ...; where ``launch["dynamic"]``, ``n0`` (int64)
            follows them.
        launch: the runtime's launch data.
        block: threads a block.
        max_registers: cap for ptxas; 0 for none.
        cluster: blocks a cluster.
    """

    functions: tuple[str, ...]
    body: tuple[str, ...]
    params: tuple[str, ...]
    launch: Mapping[str, Any]
    block: int
    max_registers: int
    cluster: int = 1

    @property
    def text(self) -> str:
        """Numba source that defines ``kernel`` and its device functions."""
        args = [f"p{k}" for k in range(len(self.params))] + (["n0"] if self.launch["dynamic"] else [])
        head = ["blk = int32(cuda.blockIdx.x)"]
        if any("nblk" in line for line in self.body):
            head.append("nblk = int32(cuda.gridDim.x)")
        kernel = [f"def kernel({', '.join(args)}):"] + ["    " + line for line in (*head, *self.body)]
        return "\n\n".join([*self.functions, "\n".join(kernel)]) + "\n"


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


def accumulators_of(pas: Pass) -> int:
    """Accumulators that a pass function returns before everything else."""
    return len(pas.reduce) + 2 * len(pas.online) + 2 * len(pas.moments)


class _Access:
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


class CudaEmitter:
    """Prints one program for one schedule; use :func:`emit`."""

    def __init__(self, program: Program, schedule: CudaSchedule) -> None:
        self.p, self.s, self.g = program, schedule, program.graph
        self.vec = vector_length(program, schedule.vector_bytes)
        if self.vec == 0:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide a row")
        flat = program.pointwise and not program.columns
        self.count = Counts.of(program.n_rows * (program.n_cols // self.vec if flat else 1), program.n_cols)
        n_in = len(self.g.inputs)
        self.out_ptr = [f"p{n_in + k}" for k in range(len(self.g.outputs))]
        self.access: dict[int, _Access] = {}
        for i, v in enumerate(self.g.values):
            if v.op in ("load", "gather"):
                self.access[i] = _Access(program, v.axes, v.strides, v.offset, self.vec)
        self.joins = find_joins(program)
        self.out_access = [_Access(program, o.axes, o.strides, o.offset, self.vec) for o in self.g.outputs]
        # Rows that are not there: none where their number is known and divides by those of a block.
        partial = program.dynamic == 0 or program.n_rows % schedule.rows_per_block > 0
        self.ok_needed = (not program.pointwise or bool(program.columns)) and schedule.rows_per_block > 1 and partial
        self.kept_of: dict[int, list[int]] = {}  # pass -> values it keeps
        self.where_kept: dict[int, int] = {}
        self.ahead: tuple[
            int, ...
        ] = ()  # loads that pass ``ahead_pass`` finds done: issued while the row before was at work
        self.ahead_pass = -1
        self.wide_columns = False  # whether the column number is an int64 where rows and columns are counted in int32
        self.masks = frozenset(program.early.kept_out if program.early else ())  # kept as bits of a word
        for q, pas in enumerate(self.all_passes):
            self.kept_of[q] = list(pas.kept_out)
            for i in pas.kept_out:
                self.where_kept[i] = q

    @property
    def all_passes(self) -> tuple[Pass, ...]:
        """The program's passes by number, then what is computed beside the first."""
        return (*self.p.passes, self.p.early) if self.p.early else self.p.passes

    def ahead_words(self, i: int, x: str) -> str:
        """The words of load ``i`` in the tuple ``x`` of what was loaded a row ahead."""
        at = sum(self.raw_words(k) for k in self.ahead[: self.ahead.index(i)])
        return ", ".join(f"{x}[{at + w}]" for w in range(self.raw_words(i)))

    def raw_words(self, i: int) -> int:
        """32-bit words of one pack of load ``i`` as it lies in memory."""
        return max(1, self.vec * STORAGE_BYTES[self.g.inputs[self.g.values[i].slot]] // 4)

    # ---- names and small pieces -------------------------------------------------------------------------------------

    def packed(self, i: int) -> bool:
        """Whether a kept value stays as loaded: 16-bit elements, two to a register."""
        v = self.g.values[i]
        return v.op == "load" and not v.guards and STORAGE_BYTES[self.g.inputs[v.slot]] == 2 and self.access[i].vector

    def kept_words(self, i: int) -> int:
        if i in self.masks:
            return 1
        return self.vec // 2 if self.packed(i) else self.vec

    def load_hint(self, i: int) -> str:
        """Hints apply to what is read once: loads that differ in every row and column."""
        once = read_once(self.g, i, (*self.p.rows, *self.p.cols))
        return HINTS[self.s.load_hint] if once else "d"

    def name(self, i: int, e: int) -> str:
        """Value ``i`` in lane ``e``: constants inline, row values without a lane."""
        v = self.g.values[i]
        d = self.p.domain(i)
        if v.op == "const":
            return literal(v.number, v.dtype)
        return f"v{i}" if d == "row" else f"v{i}_{e}"

    def base_terms(self, acc: _Access) -> str:
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

    def inner_rows(self) -> int:
        """Rows for each step along the axis of open extent; all of them where no row axis is open."""
        return self.g.size(a for a in self.p.rows if a != self.p.dynamic)

    def params(self) -> tuple[str, ...]:
        """Short type names of the kernel's pointers."""
        return tuple(NAMES[d] for d in (*self.g.inputs, *(o.dtype for o in self.g.outputs)))

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

    def address(self, acc: _Access, base: str, e: int) -> str:
        """Element of lane ``e`` of the pack at hand, ``base`` being the row's offset."""
        inner = self.p.cols[-1]
        terms = [base]
        terms += [f"j{a} * {s}" if s != 1 else f"j{a}" for a, s in acc.outer]
        if acc.inner:
            terms.append(f"j{inner}" if acc.inner == 1 else f"j{inner} * {acc.inner}")
            if e:
                terms.append(str(e * acc.inner))
        return " + ".join(terms)

    # ---- a pass over one pack ---------------------------------------------------------------------------------------

    def pass_function(self, q: int, pas: Pass) -> tuple[str, list[str], list[str]]:
        """Text of device function ``f<q>``; its parameters; names of the accumulators it returns first."""
        g, vec = self.g, self.vec
        body: list[str] = []
        params: list[str] = []

        def need(name: str) -> str:
            if name not in params:
                params.append(name)
            return name

        accs: list[str] = [f"a{r}" for r in pas.reduce]
        for o in pas.online:
            accs += [f"a{o.peak}", f"a{o.total}"]
        for m in pas.moments:
            accs += [f"a{m.total}", f"a{m.square}"]

        def use(i: int, e: int) -> str:
            n = self.name(i, e)
            if self.p.domain(i) == "row":
                need(n)
            return n

        inner = self.p.cols[-1]
        body += self.column_indices()

        def address(acc: _Access, base: str, e: int) -> str:
            return self.address(acc, need(base), e)

        for i in pas.kept_in:
            src = self.where_kept[i]
            z = need(f"z{src}")
            at = self.kept_offset(src, i)
            if i in self.masks:
                body += bits_taken(i, f"{z}[{at}]", vec)
            elif self.packed(i):
                short = NAMES[g.inputs[g.values[i].slot]]
                words = ", ".join(f"{z}[{at + w}]" for w in range(self.kept_words(i)))
                body.append(f"u{i} = un_{short}_{vec}(({words},))")
                body += [f"v{i}_{e} = u{i}[{e}]" for e in range(vec)]
            else:
                body += [f"v{i}_{e} = {z}[{at + e}]" for e in range(vec)]
        for i in pas.compute:
            v = g.values[i]
            if i in self.joins.skipped:
                continue
            if i in self.joins.results:
                one = self.joins.results[i]
                plus = f" + {literal(0, v.dtype)}" if self.joins.loads[one].added else ""
                body += [f"v{i}_{e} = v{one}_{e}{plus}" for e in range(vec)]
            elif v.op == "load":
                self.emit_load(i, v, body, need, address, q)
            elif v.op == "gather":
                self.emit_gather(i, v, body, need, address, use)
            elif v.op == "index":
                for e in range(vec):
                    lane = e if v.axes[0] == inner else 0
                    whole = f"int64(j{v.axes[0]}{f' + {lane}' if lane else ''}) * {v.scale} + {v.shift}"
                    place = f"{'float32' if v.dtype == 'float32' else v.dtype}({whole})"
                    if v.dtype == "int32" and self.wide_columns:  # 32-bit sums all the same
                        place = f"int32(v{i}_0 + {lane * v.scale})" if e else f"pin({place})"
                    body.append(f"v{i}_{e} = {place}")
            elif v.op in POINTWISE:
                types = [g.values[a].dtype for a in v.args]
                for e in range(vec):
                    body.append(f"v{i}_{e} = {pointwise(v, types, [use(a, e) for a in v.args])}")
            else:
                raise Unsupported(f"operator {v.op} inside a walk")
        for r in pas.reduce:
            v = g.values[r]
            arg = v.args[0]
            lanes = [use(arg, e) for e in range(vec)]
            if g.values[arg].dtype == "bool":
                lanes = [f"sel({x}, int32(1), int32(0))" for x in lanes]
            elif g.values[arg].dtype != v.dtype:
                lanes = [f"{v.dtype}({x})" for x in lanes]
            need(f"a{r}")
            body.append(f"a{r} = {combine(v.op, v.dtype, f'a{r}', self.tree(v.op, v.dtype, lanes))}")
        for o in pas.online:
            need(f"a{o.peak}")
            need(f"a{o.total}")
            lanes = [use(o.score, e) for e in range(vec)]
            peak, total = f"a{o.peak}", f"a{o.total}"
            body.append(f"m{o.peak} = fmax({peak}, {self.tree('max', 'float32', lanes)})")
            # Differences first, then the exponential: a scale of exactly 1 while the maximum stands still, so that
            # thousands of steps do not drift, and no cancellation where scores are large.
            body.append(f"s{o.peak} = sel(abs(m{o.peak}) == float32(inf), float32(0), m{o.peak})")
            terms = [f"ex2(({x} - s{o.peak}) * {LOG2E})" for x in lanes]
            body.append(f"r{o.peak} = sel({peak} == m{o.peak}, float32(1), ex2(({peak} - s{o.peak}) * {LOG2E}))")
            body.append(f"{total} = {total} * r{o.peak} + {self.tree('sum', 'float32', terms)}")
            body.append(f"{peak} = m{o.peak}")
        for m in pas.moments:
            add_moments(self, m, body, need, use)
        for k in pas.stores:
            self.emit_store(k, body, need, address, use)
        columns = add_columns(self, q, pas, body, need, use)
        returns = list(accs)
        for i in self.kept_of[q]:
            if i in self.masks:
                body.append(bits_made(i, vec))
                returns.append(f"m{i}")
            elif self.packed(i):
                returns += [f"u{i}[{w}]" for w in range(self.kept_words(i))]
            else:
                returns += [f"v{i}_{e}" for e in range(vec)]
        returns += columns
        if returns:
            body.append(f"return {tuple_of(returns)}")
        need("c")
        text = [f"def f{q}({', '.join(params)}):"] + [f"    {x}" for x in body]
        return "\n".join(text), params, accs

    def tree(self, op: str, dtype: str, xs: list[str]) -> str:
        while len(xs) > 1:
            nxt = [combine(op, dtype, xs[k], xs[k + 1]) for k in range(0, len(xs) - 1, 2)]
            xs = nxt + ([xs[-1]] if len(xs) % 2 else [])
        return xs[0]

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
        for a, _, _ in v.guards:
            if a in self.p.rows:
                need(f"i{a}")
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
        whole = not any(a == inner and (lo % self.vec or hi % self.vec) for a, lo, hi in v.guards)
        return (
            self.access[i].vector
            and whole
            and v.index_stride % self.vec == 0
            and inner not in self.g.values[v.args[0]].axes
        )

    def emit_gather(self, i: int, v: Value, body: list[str], need: Any, address: Any, use: Any) -> None:
        vec, acc, short, ptr = self.vec, self.access[i], NAMES[self.g.inputs[v.slot]], need(f"p{v.slot}")
        axes = (*self.p.cols, *self.p.rows)
        for a, _, _ in v.guards:
            if a in self.p.rows:
                need(f"i{a}")

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

    def kept_offset(self, q: int, i: int) -> int:
        """Where value ``i`` begins in the tuple that pass ``q`` returns."""
        at = accumulators_of(self.all_passes[q])
        for j in self.kept_of[q]:
            if j == i:
                return at
            at += self.kept_words(j)
        raise KeyError(i)

    def empty_function(self, q: int, accs: list[str]) -> str:
        """Device function ``e<q>``: what ``f<q>`` returns for a pack outside the row."""
        zeros: list[str] = []
        for i in self.kept_of[q]:
            zero = "uint32(0)" if self.packed(i) else literal(0, self.g.values[i].dtype)
            zero = "int32(0)" if i in self.masks else zero
            zeros += [zero] * self.kept_words(i)
        zeros += beginnings(self, q)
        return f"def e{q}({', '.join(accs)}):\n    return {tuple_of(accs + zeros)}"

    # ---- row values -------------------------------------------------------------------------------------------------

    def row_value(self, i: int) -> list[str]:
        v = self.g.values[i]
        if v.op in ("load", "gather"):
            short = NAMES[self.g.inputs[v.slot]]
            base = self.base_terms(self.access[i])
            guard = self.guard_text(v, self.p.rows, "")
            if v.op == "gather":
                idx = self.name(v.args[0], 0)
                base = f"{base} + int64({idx}) * {v.index_stride}"
                bound = f"{idx} >= 0 and {idx} < {v.bound}"
                guard = f"{bound} and {guard}" if guard else bound
            if guard:
                load = f"    v{i} = lk_{short}_1_d(p{v.slot}, {base})"
                return [f"v{i} = {literal(0, v.dtype)}", f"if {guard}:", load]
            return [f"v{i} = ld_{short}_1_d(p{v.slot}, {base})"]
        if v.op == "index":
            return [f"v{i} = {'float32' if v.dtype == 'float32' else v.dtype}(i{v.axes[0]} * {v.scale} + {v.shift})"]
        types = [self.g.values[a].dtype for a in v.args]
        return [f"v{i} = {pointwise(v, types, [self.name(a, 0) for a in v.args])}"]

    def row_store(self, k: int) -> list[str]:
        o = self.g.outputs[k]
        x = self.stored(o.value, o.dtype, self.name(o.value, 0))
        where = "sel(tg == 0, ok, False)" if self.ok_needed else "tg == 0"
        return [f"sg_{NAMES[o.dtype]}_1_d({self.out_ptr[k]}, {self.base_terms(self.out_access[k])}, {x}, {where})"]


def emit(program: Program, schedule: CudaSchedule) -> CudaSource:
    """Source of ``program`` under ``schedule``.

    Raises:
        Unsupported: the schedule does not fit the program.
    """
    from autotune.codegen.cuda_flat import emit_flat
    from autotune.codegen.cuda_rows import emit_rows

    if not program.cols:
        raise Unsupported("a group with a single element a row")
    if any(program.graph.extents[a] == 0 for a in range(len(program.graph.extents))):
        raise Unsupported("an empty axis")
    emitter = CudaEmitter(program, schedule)
    return emit_flat(emitter) if program.pointwise else emit_rows(emitter)


__all__ = ["CudaEmitter", "CudaSchedule", "CudaSource", "emit", "narrowest", "vector_length"]
