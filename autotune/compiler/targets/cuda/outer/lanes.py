"""Values of a program whose threads lie side by side on a kept axis: the text of the outer scheme's passes.

As in :mod:`autotune.compiler.targets.cuda.rows.emitter`, a pass over one pack is a device function. But here a pack
is ``vec`` neighbours on the *kept* unit-stride axis at one place of the reduced axes, so what varies over the kept
axis has a lane for each of them, reductions included, and what does not is one number: the roles of rows and columns
are exchanged.

In a *tile* (see :func:`autotune.compiler.program.lane_axis.lower`) that axis is reduced over as well, within a pack
and by shuffles, whenever such a value is computed, for its threads are neighbours in a warp. It is then one of the
axes that a pack covers and neither a row nor a column of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.compiler.program.lane_axis import ACROSS, unit_axis, vector_length
from autotune.compiler.program.one_pass import Online
from autotune.compiler.program.program import Pass, Program, read_once
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.names import HINTS, NAMES
from autotune.compiler.targets.cuda.operators import LOG2E, accumulator, combine, identity, literal, pointwise
from autotune.compiler.targets.cuda.source import CudaSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Value, compute_type
from autotune.ir.ops import POINTWISE

Need = Callable[[str], str]


@dataclass(frozen=True)
class Field:
    """One accumulator of a thread: its name, the type it is carried in, and what it begins with."""

    name: str
    type: str
    nothing: str


class Access:
    """How a load, gather or output is addressed: kept axes make its base, reduced ones what is added to it."""

    def __init__(self, e: Lanes, axes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
        by_axis = dict(zip(axes, strides, strict=True))
        self.offset = offset
        self.step = by_axis.get(e.x, 0)
        self.kept = [(a, s) for a, s in by_axis.items() if a in e.kept and s]
        self.cols = [(a, s) for a, s in by_axis.items() if a in e.p.cols and s]
        aligned = offset % e.vec == 0 and all(s % e.vec == 0 for a, s in by_axis.items() if a != e.x)
        self.vector = e.vec > 1 and self.step == 1 and aligned

    def base(self) -> str:
        terms = [f"i{a} * {s}" if s != 1 else f"i{a}" for a, s in self.kept]
        if self.offset or not terms:
            terms.append(str(self.offset))
        return f"int64({' + '.join(terms)})"

    def at(self, base: str, lane: int) -> str:
        terms = [base, *(f"j{a} * {s}" if s != 1 else f"j{a}" for a, s in self.cols)]
        if lane and self.step:
            terms.append(str(lane * self.step))
        return " + ".join(terms)


class Lanes:
    """Prints the values of one program for one schedule."""

    def __init__(self, program: Program, schedule: CudaSchedule) -> None:
        self.p, self.s, self.g = program, schedule, program.graph
        self.x = unit_axis(self.g)
        if self.x < 0 or self.x in program.cols:
            raise Unsupported("the axis whose elements are neighbours in memory is reduced over")
        self.tile = self.x not in program.rows
        self.kept = (*program.rows, self.x) if self.tile else program.rows
        self.vec = vector_length(self.g, self.x, schedule.vector_bytes)
        if not self.vec:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide the kept axis")
        self.across = self.g.extents[self.x] // self.vec if self.tile else 1  # threads that lie on one tile
        if self.tile and (self.across > 32 or self.across & (self.across - 1)):
            raise Unsupported(f"{self.across} threads across a tile")
        self.count = Counts.of(self.g.size(self.kept) // self.vec, program.n_cols)
        self.access = {
            i: Access(self, v.axes, v.strides, v.offset)
            for i, v in enumerate(self.g.values)
            if v.op in ("load", "gather")
        }
        self.out_access = [Access(self, o.axes, o.strides, o.offset) for o in self.g.outputs]
        # For kernels that keep values where pass functions do not see it (``cuda_outer_async``):
        self.handing = False  # kept values reach a pass function as tuples s<i> of arithmetic values
        self.ahead: tuple[int, ...] = ()  # and so do these loads, even in the pass that they belong to
        self.scoring = False  # pass functions return what online pairs are made of, and do not add it to them

    # ---- names ------------------------------------------------------------------------------------------------------

    def lanes(self, i: int) -> int:
        return self.vec if self.x in self.g.values[i].axes else 1

    def name(self, i: int, e: int) -> str:
        """Value ``i`` in lane ``e``: constants inline, what does not vary along the kept axis without a lane."""
        v = self.g.values[i]
        if v.op == "const":
            return literal(v.number, v.dtype)
        return f"v{i}_{e}" if self.x in v.axes else f"v{i}"

    def part(self, name: str, i: int, one: bool = False) -> list[str]:
        """Names of what belongs to each lane of value ``i``; ``one``: to the first."""
        if self.x not in self.g.values[i].axes:
            return [f"{name}{i}"]
        return [f"{name}{i}_{e}" for e in range(1 if one else self.vec)]

    def fields(self, pas: Pass, one: bool = False) -> list[Field]:
        """The accumulators of a pass, in the order in which its function returns them; ``one``: of the first lane."""
        out = []
        for r in pas.reduce:
            v = self.g.values[r]
            out += [Field(n, accumulator(v.dtype), identity(v.op, v.dtype)) for n in self.part("a", r, one)]
        for o in pas.online:
            out += [Field(n, "float32", "float32(-inf)") for n in self.part("a", o.peak, one)]
            out += [Field(n, "float32", "float32(0)") for n in self.part("a", o.total, one)]
        return out

    def packed(self, i: int) -> bool:
        """Whether a kept value stays as loaded: 16-bit elements, two to a register."""
        v = self.g.values[i]
        return v.op == "load" and not v.guards and STORAGE_BYTES[self.g.inputs[v.slot]] == 2 and self.access[i].vector

    def kept_words(self, i: int) -> int:
        return self.vec // 2 if self.packed(i) else self.lanes(i)

    def pass_words(self, pas: Pass) -> int:
        """Words that a pack of a pass leaves for later ones."""
        return sum(self.kept_words(i) for i in pas.kept_out)

    def load_hint(self, i: int) -> str:
        """Hints apply to what is read once: loads that differ in all rows and columns."""
        once = read_once(self.g, i, (*self.kept, *self.p.cols))
        return HINTS[self.s.load_hint] if once else "d"

    def stored(self, i: int, storage: str, x: str) -> str:
        """``x`` converted to the arithmetic type its storage takes."""
        have, want = self.g.values[i].dtype, compute_type(storage)
        return x if have == want else pointwise(Value("cast", (i,), dtype=want), [have], [x])

    # ---- one value --------------------------------------------------------------------------------------------------

    def position(self, a: int, lane: int, need: Need) -> str:
        """The index along axis ``a``."""
        if a in self.p.cols:
            return f"j{a}"
        return need(f"i{a}") + (f" + {lane}" if a == self.x and lane else "")

    def guard(self, v: Value, lane: int, need: Need) -> str:
        """Condition under which a guarded load may touch memory."""
        conds = []
        for a, lo, hi in v.guards:
            i = self.position(a, lane, need)
            conds += [f"{i} >= {lo}"] if lo > 0 else []
            conds += [f"{i} < {hi}"] if hi < self.g.extents[a] or a == 0 else []
        return " and ".join(conds)

    def value(self, i: int, need: Need) -> list[str]:
        """Lines that compute value ``i`` in all its lanes; ``need`` notes what a device function must be given."""
        v = self.g.values[i]
        if i in self.ahead:
            return self._handed(i, need)
        if v.op == "load":
            return self._load(i, v, need)
        if v.op == "gather":
            return self._gather(i, v, need)
        if v.op.startswith(ACROSS):
            return self._across(i, v, need)
        out = []
        for e in range(self.lanes(i)):
            if v.op == "index":
                whole = f"int64({self.position(v.axes[0], e, need)}) * {v.scale} + {v.shift}"
                text = f"{'float32' if v.dtype == 'float32' else v.dtype}({whole})"
            elif v.op in POINTWISE:
                types = [self.g.values[a].dtype for a in v.args]
                text = pointwise(v, types, [self.use(a, e, need) for a in v.args])
            else:
                raise Unsupported(f"operator {v.op} inside a walk")
            out.append(f"{self.name(i, e)} = {text}")
        return out

    def _across(self, i: int, v: Value, need: Need) -> list[str]:
        """Reduce over the lanes of a pack and the threads of its tile; all of them get the result."""
        op, lanes = v.op.removeprefix(ACROSS), self._terms(v, need)
        while len(lanes) > 1:
            pairs = [combine(op, v.dtype, *lanes[k : k + 2]) for k in range(0, len(lanes) - 1, 2)]
            lanes = pairs + lanes[len(pairs) * 2 :]
        out = [f"l{i} = {lanes[0]}"]
        offset = self.across // 2
        while offset:
            out.append(f"y{i} = cuda.shfl_xor_sync(0xffffffff, l{i}, {offset})")
            out.append(f"l{i} = {combine(op, v.dtype, f'l{i}', f'y{i}')}")
            offset //= 2
        return [*out, f"v{i} = (l{i} != 0)" if v.dtype == "bool" else f"v{i} = l{i}"]

    def _terms(self, v: Value, need: Need) -> list[str]:
        """The argument of a reduction in each of its lanes, in the type that the reduction is carried in."""
        have, out = self.g.values[v.args[0]].dtype, []
        for e in range(self.lanes(v.args[0])):
            x = self.use(v.args[0], e, need)
            if have == "bool":
                x = f"sel({x}, {literal(1, accumulator(v.dtype))}, {literal(0, accumulator(v.dtype))})"
            elif have != v.dtype:
                x = f"{v.dtype}({x})"
            out.append(x)
        return out

    def use(self, i: int, e: int, need: Need) -> str:
        """Value ``i`` as an operand; a row value is one that a device function is given."""
        n = self.name(i, e)
        return need(n) if self.p.domain(i) == "row" else n

    def _load(self, i: int, v: Value, need: Need) -> list[str]:
        vec, acc, short = self.vec, self.access[i], NAMES[self.g.inputs[v.slot]]
        pointer, base, hint = need(f"p{v.slot}"), need(f"b{i}"), self.load_hint(i)
        zero = literal(0, v.dtype)
        whole = not any(a == self.x and (lo % vec or hi % vec) for a, lo, hi in v.guards)
        if acc.vector and whole:
            guard, at = self.guard(v, 0, need), acc.at(base, 0)
            load = f"w{i} = {'lk' if guard else 'ld'}_{short}_{vec}_{hint}({pointer}, {at})"
            if self.packed(i):
                out = [f"u{i} = lr_{short}_{vec}_{hint}({pointer}, {at})", f"w{i} = un_{short}_{vec}(u{i})"]
            elif guard:
                out = [f"w{i} = ({', '.join([zero] * vec)},)", f"if {guard}:", f"    {load}"]
            else:
                out = [load]
            return out + [f"v{i}_{e} = w{i}[{e}]" for e in range(vec)]
        out = []
        for e in range(self.lanes(i)):
            guard, n = self.guard(v, e, need), self.name(i, e)
            load = f"{n} = {'lk' if guard else 'ld'}_{short}_1_{hint}({pointer}, {acc.at(base, e)})"
            out += [f"{n} = {zero}", f"if {guard}:", f"    {load}"] if guard else [load]
        return out

    def _gather(self, i: int, v: Value, need: Need) -> list[str]:
        acc, short, out = self.access[i], NAMES[self.g.inputs[v.slot]], []
        pointer, base = need(f"p{v.slot}"), need(f"b{i}")
        for e in range(self.lanes(i)):
            index, n = self.use(v.args[0], e, need), self.name(i, e)
            conds = [f"{index} >= 0", f"{index} < {v.bound}", *filter(None, [self.guard(v, e, need)])]
            place = f"{acc.at(base, e)} + int64({index}) * {v.index_stride}"
            out += [f"{n} = {literal(0, v.dtype)}", f"if {' and '.join(conds)}:"]
            out.append(f"    {n} = lk_{short}_1_d({pointer}, {place})")
        return out

    def store(self, k: int, need: Need, hint: str) -> list[str]:
        """Lines that store output ``k`` at this place, all lanes."""
        o, acc, short = self.g.outputs[k], self.out_access[k], NAMES[self.g.outputs[k].dtype]
        pointer, base = need(f"p{len(self.g.inputs) + k}"), need(f"o{k}")
        lanes = self.vec if self.x in o.axes else 1
        xs = [self.stored(o.value, o.dtype, self.use(o.value, e, need)) for e in range(lanes)]
        if acc.vector:
            return [f"st_{short}_{self.vec}_{hint}({pointer}, {acc.at(base, 0)}, ({', '.join(xs)},))"]
        if self.tile and self.x not in o.axes:  # one number a tile
            return [f"if {need('lx')} == 0:", f"    st_{short}_1_{hint}({pointer}, {acc.at(base, 0)}, {xs[0]})"]
        return [f"st_{short}_1_{hint}({pointer}, {acc.at(base, e)}, {x})" for e, x in enumerate(xs)]

    # ---- one pack ---------------------------------------------------------------------------------------------------

    def pass_function(self, q: int, pas: Pass, source: dict[int, int], guarded: bool) -> tuple[str, list[str]]:
        """Text of device function ``f<q>`` and its parameters.

        Args:
            source: the pass that kept each kept value.
            guarded: whether stores wait for a parameter ``live``.
        """
        params: list[str] = []

        def need(name: str) -> str:
            if name not in params:
                params.append(name)
            return name

        body = self._columns(need)
        for i in pas.kept_in:
            if self.handing:
                body += self._handed(i, need)
            else:
                body += self._take(i, need(f"z{source[i]}"), self.kept_offset(source[i], i))
        for i in pas.compute:
            body += self.value(i, need)
        for r in pas.reduce:
            body += self._accumulate(r, need)
        for o in () if self.scoring else pas.online:
            body += self._online(o, need)
        stores = [line for k in pas.stores for line in self.store(k, need, HINTS[self.s.store_hint])]
        if stores and guarded:
            body.append(f"if {need('live')}:")
            stores = [f"    {line}" for line in stores]
        body += stores
        online = {name for pair in self.pairs(pas) for name in pair} if self.scoring else set()
        returns = [f.name for f in self.fields(pas) if f.name not in online]
        for i in (i for i in pas.kept_out if i not in self.ahead):
            if self.packed(i):
                returns += [f"u{i}[{w}]" for w in range(self.kept_words(i))]
            else:
                returns += [self.name(i, e) for e in range(self.lanes(i))]
        if self.scoring:
            returns += [self.use(o.score, e, need) for o in pas.online for e in range(len(self.part("a", o.peak)))]
        if returns:
            body.append(f"return ({', '.join(returns)},)")
        return "\n".join([f"def f{q}({', '.join(params)}):", *(f"    {line}" for line in body)]), params

    def _columns(self, need: Need) -> list[str]:
        """Take the number ``j`` of a place apart into the index along each reduced axis."""
        out, rest = [], need("j")
        for a in reversed(self.p.cols[1:]):
            n = self.g.extents[a]
            out += [f"j{a} = {self.count.urem}({rest}, {n})", f"n{a} = {self.count.udiv}({rest}, {n})"]
            rest = f"n{a}"
        return [*out, f"j{self.p.cols[0]} = {rest}"]

    def _handed(self, i: int, need: Need) -> list[str]:
        return [f"{self.name(i, e)} = {need(f's{i}')}[{e}]" for e in range(self.lanes(i))]

    def _take(self, i: int, z: str, at: int) -> list[str]:
        if not self.packed(i):
            return [f"{self.name(i, e)} = {z}[{at + e}]" for e in range(self.lanes(i))]
        words = ", ".join(f"{z}[{at + w}]" for w in range(self.kept_words(i)))
        out = [f"u{i} = un_{NAMES[self.g.inputs[self.g.values[i].slot]]}_{self.vec}(({words},))"]
        return out + [f"v{i}_{e} = u{i}[{e}]" for e in range(self.vec)]

    def kept_offset(self, q: int, i: int) -> int:
        """Where value ``i`` begins in the tuple that pass ``q`` returns."""
        pas = self.p.passes[q]
        before = pas.kept_out[: pas.kept_out.index(i)]
        return len(self.fields(pas)) + sum(self.kept_words(j) for j in before)

    def _accumulate(self, r: int, need: Need) -> list[str]:
        v = self.g.values[r]
        pairs = zip(self.part("a", r), self._terms(v, need), strict=True)
        return [f"{a} = {combine(v.op, v.dtype, need(a), x)}" for a, x in pairs]

    def _online(self, o: Online, need: Need) -> list[str]:
        """One exponential an element: it scales the sum where the maximum moves, and is the new term where it stands.

        The scale is then exactly 1, so that thousands of steps do not drift. A sum whose maximum is infinite is put
        right by :meth:`settle`.
        """
        out = []
        for e, (m, t) in enumerate(zip(self.part("a", o.peak), self.part("a", o.total), strict=True)):
            x = self.use(o.score, e, need)
            need(m)
            need(t)
            out += [
                f"lo = fmin({m}, {x})",
                f"hi = fmax({m}, {x})",
                f"te = sel(lo == float32(-inf), float32(0), ex2((lo - hi) * {LOG2E}))",
                f"{t} = sel({x} > {m}, {t} * te + float32(1), {t} + te)",
                f"{m} = hi",
            ]
        return out

    def online_group(self, pas: Pass, n: int) -> list[str]:
        """Lines that take ``n`` places at a time into online pairs, from their scores ``x<peak>_<place>``.

        Their maximum first: a place takes an exponential, and so does moving the sum, once for all of them. That scale
        is exactly 1 where the maximum stands still (see :meth:`_online`).
        """
        out = []
        for m, t in self.pairs(pas):
            out.append(f"hi = {m}")
            out += [f"hi = fmax(hi, x{m}_{k})" for k in range(n)]
            out += [f"sm = {self.finite('hi')}", f"{t} = {t} * ex2(({m} - sm) * {LOG2E})"]
            out += [f"{t} = {t} + ex2((x{m}_{k} - sm) * {LOG2E})" for k in range(n)]
            out.append(f"{m} = hi")
        return out

    # ---- joining ----------------------------------------------------------------------------------------------------

    def settle(self, pas: Pass) -> list[str]:
        """Online sums after a walk: infinite where the maximum is."""
        out = []
        for o in pas.online:
            for m, t in zip(self.part("a", o.peak), self.part("a", o.total), strict=True):
                out.append(f"{t} = sel({m} == float32(inf), float32(inf), {t})")
        return out

    def merge(self, pas: Pass, other: Callable[[str], str], one: bool = False) -> list[str]:
        """Lines that take another thread's accumulators, named ``other(name)``, into this one's; online ones apart."""
        out = []
        for r in pas.reduce:
            v = self.g.values[r]
            out += [f"{a} = {combine(v.op, v.dtype, a, other(a))}" for a in self.part("a", r, one)]
        return out

    def pairs(self, pas: Pass, one: bool = False) -> list[tuple[str, str]]:
        """The names of each running maximum and of the sum that goes with it."""
        found = (zip(self.part("a", o.peak, one), self.part("a", o.total, one), strict=True) for o in pas.online)
        return [pair for both in found for pair in both]

    def finite(self, peak: str) -> str:
        """What to subtract where ``peak`` is the maximum: an infinite one would make a NaN of itself."""
        return f"sel(abs({peak}) == float32(inf), float32(0), {peak})"

    def results(self, pas: Pass) -> list[str]:
        """Lines that give the reductions of a pass their names as values."""
        out = []
        for r in pas.reduce:
            boolean = self.g.values[r].dtype == "bool"
            for v, a in zip(self.part("v", r), self.part("a", r), strict=True):
                out.append(f"{v} = ({a} != 0)" if boolean else f"{v} = {a}")
        for o in pas.online:
            out += [f"{v} = {a}" for v, a in zip(self.part("v", o.peak), self.part("a", o.peak), strict=True)]
        return out

    def totals(self, o: Online) -> list[str]:
        """Lines that bring an online sum to the shift its users expect."""
        out = []
        for e, (v, a) in enumerate(zip(self.part("v", o.total), self.part("a", o.total), strict=True)):
            peak = self.name(o.peak, e)
            out.append(f"sh = sel(abs({peak}) == float32(inf), float32(0), {peak})")
            out.append(f"{v} = {a} * ex2((sh - {self.name(o.shift, e)}) * {LOG2E})")
        return out

    def shift_chain(self, i: int) -> list[int]:
        """Row values that value ``i`` is made from, in order, ``i`` included; reductions and constants not."""
        seen: set[int] = set()
        stack = [i]
        while stack:
            j = stack.pop()
            v = self.g.values[j]
            if j not in seen and v.op not in REDUCTIONS and v.op != "const":
                seen.add(j)
                stack.extend(v.args)
        return sorted(seen)
