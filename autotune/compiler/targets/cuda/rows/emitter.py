"""Print a kernel program as Numba CUDA source over raw pointers.

Two skeletons. A program with reductions is *row-wise*: ``threads_per_row`` threads walk the packs (vectors) of one
row, and reductions are combined by shuffles within a warp and by shared memory across warps: thread, warp and block
scope. A pointwise program is *flat*: threads walk the packs of all elements. Either way a pass over one pack is a
device function, so that Numba types it once however many packs a thread has, and what is kept between passes travels in
tuples, which end up in registers.
"""

from __future__ import annotations

from collections.abc import Collection

from autotune.compiler.program.program import Pass, Program
from autotune.compiler.targets.cuda.access import Access, Accesses
from autotune.compiler.targets.cuda.names import NAMES, tuple_of
from autotune.compiler.targets.cuda.operators import LOG2E, combine, literal, pointwise
from autotune.compiler.targets.cuda.rows.columns import add_columns, beginnings
from autotune.compiler.targets.cuda.rows.early import bits_made, bits_taken
from autotune.compiler.targets.cuda.rows.moments import add_moments
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource
from autotune.errors import Unsupported
from autotune.ir.ops import POINTWISE


def accumulators_of(pas: Pass) -> int:
    """Accumulators that a pass function returns before everything else."""
    return len(pas.reduce) + 2 * len(pas.online) + 2 * len(pas.moments)


class CudaEmitter(Accesses):
    """Prints one program for one schedule; use :func:`emit`."""

    def __init__(self, program: Program, schedule: CudaSchedule, apart: Collection[int] = ()) -> None:
        super().__init__(program, schedule, apart)
        self.kept_of: dict[int, list[int]] = {}  # pass -> values it keeps
        self.where_kept: dict[int, int] = {}
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

    # ---- names and small pieces -------------------------------------------------------------------------------------

    def kept_words(self, i: int) -> int:
        if i in self.masks:
            return 1
        return self.vec // 2 if self.packed(i) else self.vec

    def name(self, i: int, e: int) -> str:
        """Value ``i`` in lane ``e``: constants inline, row values without a lane."""
        v = self.g.values[i]
        d = self.p.domain(i)
        if v.op == "const":
            return literal(v.number, v.dtype)
        return f"v{i}" if d == "row" else f"v{i}_{e}"

    def inner_rows(self) -> int:
        """Rows for each step along the axis of open extent; all of them where no row axis is open."""
        return self.g.size(a for a in self.p.rows if a != self.p.dynamic)

    def params(self) -> tuple[str, ...]:
        """Short type names of the kernel's pointers."""
        return tuple(NAMES[d] for d in (*self.g.inputs, *(o.dtype for o in self.g.outputs)))

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

        def address(acc: Access, base: str, e: int) -> str:
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
    from autotune.compiler.targets.cuda.rows.flat import emit_flat
    from autotune.compiler.targets.cuda.rows.kernel import emit_rows

    if not program.cols:
        raise Unsupported("a group with a single element a row")
    if any(program.graph.extents[a] == 0 for a in range(len(program.graph.extents))):
        raise Unsupported("an empty axis")
    emitter = CudaEmitter(program, schedule)
    return emit_flat(emitter) if program.pointwise else emit_rows(emitter)
