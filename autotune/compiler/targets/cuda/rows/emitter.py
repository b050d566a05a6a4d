"""A pass over one pack of a row as a device function.

So Numba types it once for any number of packs per thread. Values kept between passes are in tuples, which are compiled
to registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.lower import ONE, ZERO, reciprocal, reducers_of
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Function,
    Intrinsic,
    Load,
    Operand,
    Pointer,
    Return,
    Select,
    Stmt,
    Store,
    Tuple,
    Var,
    closed,
    conjunction,
    when,
)
from autotune.compiler.program.program import Column, Pass
from autotune.compiler.targets.cuda.printer import computed
from autotune.compiler.targets.cuda.rows.packs import FALSE, RowTensors
from autotune.compiler.targets.cuda.threads import RowThreads
from autotune.errors import Unsupported
from autotune.ir.nodes import POINTWISE

MOST_WORDS = 64
"""Most 32-bit registers of a thread for loads before other work."""
MOST_SELECTED = 48
"""Cost of both sides of a select from which a pack computes one of them.

A branch keeps later loads from being issued early. The gradient of a gated GELU has sides of 50, of a gated SiLU 30.
Sides whose own loads exceed :data:`MOST_WORDS` are a branch for any cost: the kernel that writes a concatenation of
three gradients with 13 loads each needs 182 registers without one.
"""


def parts_of(c: Column) -> tuple[str, ...]:
    """Suffixes of an accumulator's variables: moments are a mean "m" and the squared deviations "s" from it."""
    return ("m", "s") if c.kind == "moments" else ("",)


def beginning(c: Column) -> Const:
    """The first value of each part."""
    return Const(0, "float32") if c.kind == "moments" else lower.identity(c.kind, c.dtype)


class CudaEmitter(RowTensors):
    """Builds one program for one schedule."""

    before, weight = Var("rm", "float32"), Var("wm", "float32")
    """For a pack that is merged with a thread's mean and variance: one over the elements before it (0 if none), and the
    weight of the difference of means."""
    seen, share = Var("cnt", "float32"), Var("rn", "float32")
    """Rows that the thread has added to accumulators over the rows, and one over them."""

    def kept(self, q: int, pack: str = "") -> Var:
        """The tuple that pass ``q`` returned for a pack, in later passes; that of one of a thread's packs by name."""
        return Var(f"z{q}_{pack}" if pack else f"z{q}")

    def inner_rows(self) -> int:
        """Rows for each step along the axis of open extent; all of them where no row axis is open."""
        return self.graph.size(a for a in self.program.rows if a != self.program.dynamic)

    # ---- a pass over one pack ---------------------------------------------------------------------------------------

    def pass_function(self, q: int, pas: Pass, issued: Sequence[int] = ()) -> tuple[Function, list[Var]]:
        """Pass ``q`` over one pack as a function; the accumulators that it returns first.

        ``issued``: loads whose words the function is given, of :meth:`load_function`.
        """
        reducers = reducers_of(self.graph, pas)
        body = self.column_indices()
        for i in pas.kept_in:
            source = self.program.kept_from[i]
            body += self.taken_up(i, self.kept(source), self.kept_offset(source, i))
        body += self._computed(pas.compute, self._users(pas), issued)
        for i, plain in reducers.plain.items():
            body += plain.update(self.arguments(self.graph.values[i].args[0]))
        for online, o in zip(reducers.online, pas.online, strict=True):
            body += online.update(self.arguments(o.score))
        for moments, m in zip(reducers.moments, pas.moments, strict=True):
            body += moments.update(self.arguments(m.score), self.before, self.weight)
        for k in pas.stores:
            body += self.emit_store(k)
        columns = self._add_columns(q, pas, body)
        returns: list[Expr] = list(reducers.fields)
        for i in pas.kept_out:
            returns += self.left(i)
        returns += columns
        if returns:
            body.append(Return(tuple(returns)))
        return closed(body), reducers.fields

    def _users(self, pas: Pass) -> dict[int, set[int]]:
        """The values of a pass that read each value; a reduction, a store or a later pass is -1."""
        users: dict[int, set[int]] = {i: set() for i in pas.compute}
        for i in pas.compute:
            for a in self.graph.values[i].args:
                users.setdefault(a, set()).add(i)
        later = [self.graph.values[i].args[0] for i in pas.reduce]
        later += [o.score for o in pas.online] + [m.score for m in pas.moments] + list(pas.kept_out)
        later += [self.graph.outputs[k].value for k in pas.stores]
        later += [self.program.columns[n].value for n in pas.columns]
        for i in later:
            users.setdefault(i, set()).add(-1)
        return users

    def _computed(self, values: Sequence[int], users: Mapping[int, set[int]], issued: Sequence[int]) -> list[Stmt]:
        """The values of one pack, in order; the sides of a branch at its select."""
        branches = self._branches(values, users, issued)
        inside = {i for sides in branches.values() for side in sides for i in side}
        out: list[Stmt] = []
        for i in values:
            if i in branches:
                test, *args = self.graph.values[i].args
                then, other = (
                    [
                        *self._computed(side, users, issued),
                        *(Assign(x, self.name(arg, e)) for e, x in enumerate(self.variables(i))),
                    ]
                    for side, arg in zip(branches[i], args, strict=True)
                )
                out.append(when(self.name(test, 0), then, other))
            elif i not in inside:
                out += self.value(i, issued)
        return out

    def _branches(
        self, values: Sequence[int], users: Mapping[int, set[int]], issued: Sequence[int]
    ) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The selects with expensive sides and the same choice for a whole pack, and the values of each side alone."""
        found: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        free = {j for j in values if self.graph.values[j].op in (*POINTWISE, "load", "gather")}
        free.difference_update(self.selected.skipped, self.selected.results, issued)
        for place in reversed(range(len(values))):
            i = values[place]
            if i not in free or not self._chooses_packs(i):
                continue
            before = [j for j in values[:place] if j in free]
            then, other = (self._side(i, k, before, users) for k in (1, 2))
            read = [j for j in (*then, *other) if self.graph.values[j].op not in POINTWISE]
            many = sum(map(self._registers, read)) > MOST_WORDS
            if not many:
                before = [j for j in before if self.graph.values[j].op in POINTWISE]
                then, other = (self._side(i, k, before, users) for k in (1, 2))
            if many or sum(POINTWISE[self.graph.values[j].op].cost for j in (*then, *other)) >= MOST_SELECTED:
                found[i] = then, other
                free.difference_update(then, other)
        return found

    def _side(self, i: int, k: int, values: Sequence[int], users: Mapping[int, set[int]]) -> tuple[int, ...]:
        """Those of ``values`` that argument ``k`` of select ``i`` alone needs."""
        args, own = self.graph.values[i].args, set[int]()
        for j in reversed(values):
            direct = i in users[j] and (args.count(j) > 1 or args[k] != j)
            if users[j] and users[j] <= own | {i} and not direct:
                own.add(j)
        return tuple(j for j in values if j in own)

    def _registers(self, i: int) -> int:
        """The registers that hold a pack of load or gather ``i`` as it is read: as words, or element by element."""
        access = self.access[i]
        return self.raw_words(i) if access.vector else self.vec if access.step else 1

    def _chooses_packs(self, i: int) -> bool:
        """True for a select by a position, as of a concatenation, that is the same for all elements of a pack."""
        v = self.graph.values[i]
        if v.op != "where" or self.graph.values[v.args[0]].op != "lt":
            return False
        position, bound = (self.graph.values[a] for a in self.graph.values[v.args[0]].args)
        if position.op != "index" or bound.op != "const" or position.dtype == "float32":
            return False
        if (position.scale, position.shift) != (1, 0):
            return False
        return position.axes[0] != self.program.cols[-1] or int(bound.number) % self.vec == 0

    def pack_weights(self, pack: Operand) -> list[Stmt]:
        """Sets ``before`` and ``weight`` for the thread's pack number ``pack``."""
        if isinstance(pack, int):
            values = (1 / (pack * self.vec) if pack else 0.0, pack * self.vec / (pack + 1))
            return [Assign(x, Const(v, "float32")) for x, v in zip((self.before, self.weight), values, strict=True)]
        packs, elements = Var("kf", "float32"), Const(float(self.vec), "float32")
        return [
            Assign(packs, Cast("float32", pack)),
            Assign(self.before, Select(pack > 0, reciprocal(packs * elements), ZERO)),
            Assign(self.weight, packs * elements * reciprocal(packs + ONE)),
        ]

    def arguments(self, i: int) -> list[Expr]:
        """Value ``i`` in every lane, as others take it."""
        return [self.name(i, e) for e in range(self.vec)]

    def value(self, i: int, issued: Sequence[int]) -> list[Stmt]:
        """Value ``i`` of one pack; ``issued`` as of :meth:`pass_function`."""
        v, lanes = self.graph.values[i], self.variables(i)
        if i in self.selected.skipped:
            return []
        if i in self.selected.results:
            one = self.selected.results[i]
            zero = [Const(0, v.dtype)] if self.selected.loads[one].added else []
            return [Assign(x, sum(zero, y)) for x, y in zip(lanes, self.variables(one), strict=True)]
        if v.op == "load":
            return self.emit_load(i, issued)
        if v.op == "gather":
            return self.emit_gather(i)
        if v.op == "index":
            return self.positions(i)
        if v.op in POINTWISE:
            return [Assign(x, computed(v, [self.name(a, e) for a in v.args])) for e, x in enumerate(lanes)]
        raise Unsupported(f"operator {v.op} inside a walk")

    def positions(self, i: int) -> list[Stmt]:
        """The index along an axis, lane by lane."""
        v, lanes = self.graph.values[i], self.variables(i)
        (axis,) = v.axes
        inner = axis == self.program.cols[-1]
        out: list[Stmt] = []
        for e, x in enumerate(lanes):
            at = self.index(axis) + e if inner and e else self.index(axis)
            place: Expr = Cast(v.dtype, Cast("int64", at) * v.scale + v.shift)
            if v.dtype == "int32" and self.options.wide_columns:  # 32-bit sums all the same
                step = e * v.scale if inner else 0
                place = Cast("int32", lanes[0] + step) if e else Intrinsic("pin", (place,), "int32")
            out.append(Assign(x, place))
        return out

    # ---- accumulators over the rows: a tuple ``g<pass>`` for each pack of columns -----------------------------------

    def column_lanes(self, q: int) -> list[tuple[int, str, int]]:
        """The accumulators of pass ``q`` in the order of their tuple: (column, "" or "m" or "s", lane)."""
        out = []
        for n in self.program.passes[q].columns:
            out += [(n, part, lane) for part in parts_of(self.program.columns[n]) for lane in range(self.vec)]
        return out

    def beginnings(self, q: int) -> list[Const]:
        """The first values of the accumulators of pass ``q``."""
        return [beginning(self.program.columns[n]) for n, _, _ in self.column_lanes(q)]

    def take_row(self, n: int, x: Expr, held: Sequence[Expr], new: Sequence[Var]) -> list[Stmt]:
        """Takes ``x`` of one more row into accumulator number ``n``: from the parts ``held`` to the ``new`` ones."""
        c = self.program.columns[n]
        if c.kind != "moments":
            return [Assign(new[0], lower.combine(c.kind, c.dtype, held[0], x))]
        (mean, square), away = held, Var(f"d{n}", "float32")
        return [
            Assign(away, x - mean),
            Assign(new[0], mean + away * self.share),
            Assign(new[1], square + away * (x - new[0])),
        ]

    def _add_columns(self, q: int, pas: Pass, body: list[Stmt]) -> list[Var]:
        """Adds one pack to the accumulators, and returns the variables that a pass function returns for them."""
        order = self.column_lanes(q)
        held = {at: Var(f"g{q}")[k] for k, at in enumerate(order)}
        new = {(n, part, lane): Var(f"k{n}{part}_{lane}") for n, part, lane in order}
        for n in pas.columns:
            c = self.program.columns[n]
            for lane in range(self.vec):
                x, here = lower.term(self.name(c.value, lane), c.dtype), [(n, part, lane) for part in parts_of(c)]
                body += self.take_row(n, x, [held[at] for at in here], [new[at] for at in here])
                if self.ok_needed:
                    body += [Assign(new[at], Select(self.ok, new[at], held[at])) for at in here]
        return [new[at] for at in order]

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def kept_offset(self, q: int, i: int) -> int:
        """The first item of value ``i`` in the tuple that pass ``q`` returns."""
        pas = self.program.passes[q]
        first = len(pas.reduce) + 2 * len(pas.online) + 2 * len(pas.moments)
        return first + sum(map(self.kept_words, pas.kept_out[: pas.kept_out.index(i)]))

    def empty_function(self, q: int, accumulators: list[Var]) -> Function:
        """A function with the results of pass ``q`` for a pack outside the row."""
        zeros: list[Expr] = []
        for i in self.program.passes[q].kept_out:
            kind = "uint32" if self.packed(i) else self.graph.values[i].dtype
            zeros += [Const(0, kind)] * self.kept_words(i)
        return closed([Return((*accumulators, *zeros, *self.beginnings(q)))])

    # ---- loads before the other work --------------------------------------------------------------------------------

    def issuable(self, pas: Pass | None = None) -> tuple[int, ...]:
        """The loads of a pass (by default the first that walks) that can be issued before its other work.

        They are whole vectors, different for each row, with guards that hold for all of a vector or for none of it.
        """
        pas = pas or next((p for p in self.program.passes if p.walks), Pass())
        return tuple(
            i
            for i in pas.compute
            if (v := self.graph.values[i]).op == "load"
            and i not in self.selected.skipped
            and self.program.domain(i) == "full"
            and (self.access[i].vector and self.by_pack(v))
            and (not v.guards or self.access[i].fixed)  # or the same in all rows but for its guard
        )

    def words_of(self, loads: Iterable[int]) -> int:
        """32-bit registers that one raw pack of ``loads`` takes."""
        return sum(map(self.raw_words, loads))

    def held(self, loads: tuple[int, ...], packs: int) -> tuple[int, ...]:
        """``loads`` if registers can hold ``packs`` packs of them, else none."""
        return loads if self.words_of(loads) * packs <= MOST_WORDS else ()

    def load_function(self, loads: Sequence[int]) -> Function:
        """The raw words of one pack of ``loads``."""
        body = self.column_indices()
        words: list[Expr] = []
        for i in loads:
            v, pointer, chosen = self.source(i)
            at = self.access[i].at(self.base(i))
            load = Load(self.storage(i), self.vec, self.load_hint(i), pointer, at, "words", self.guard(v))
            body += [*chosen, Assign(self.raw(i), load)]
            words += [self.raw(i)[w] for w in range(self.raw_words(i))]
        return closed([*body, Return(tuple(words))])

    def no_words(self, loads: Iterable[int]) -> Tuple:
        """The words of one pack of ``loads`` outside the row."""
        return Tuple((Const(0, "uint32"),) * self.words_of(loads))

    # ---- row values -------------------------------------------------------------------------------------------------

    def row_value(self, i: int) -> list[Stmt]:
        """Sets a value that has one number a row."""
        v = self.graph.values[i]
        target = Var(f"v{i}", v.dtype)
        if v.op in ("load", "gather"):
            at, guard = self.access[i].base(), self.guard(v, rows_only=True)
            if v.op == "gather":
                index = self.name(v.args[0], 0)
                at = at + Cast("int64", index) * v.index_stride
                guard = conjunction(index >= 0, index < v.bound, guard)
            form = "plain" if guard is None else "fixed"
            load = Assign(target, Load(self.storage(i), 1, "default", Pointer(v.slot), at, form))
            return [load] if guard is None else [Assign(target, Const(0, v.dtype)), when(guard, [load])]
        if v.op == "index":
            return [Assign(target, Cast(v.dtype, self.index(v.axes[0]) * v.scale + v.shift))]
        return [Assign(target, computed(v, [self.name(a, 0) for a in v.args]))]

    def row_store(self, k: int) -> list[Stmt]:
        """Stores an output that has one number a row, by the first thread of the row."""
        o = self.graph.outputs[k]
        first = RowThreads.row_thread.equals(0)
        guard = Select(first, self.ok, FALSE) if self.ok_needed else first
        at, x = self.out_access[k].base(), lower.stored(self.name(o.value, 0), o.dtype)
        return [Store(o.dtype, "default", self.out_pointer(k), at, (x,), guard)]
