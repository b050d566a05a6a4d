"""Values of a program whose threads lie side by side on a kept axis.

As in :mod:`autotune.compiler.targets.cuda.rows.emitter`, a pass over one pack is a device function. But here a pack
is ``vec`` neighbours on the *kept* unit-stride axis at one place of the reduced axes, so what varies over the kept
axis has a lane for each of them, reductions included, and what does not is one number: the roles of rows and columns
are exchanged.

In a *tile* (:func:`autotune.compiler.program.vectors.across_lanes`) that axis is reduced over as well, within a pack
and by shuffles, whenever such a value is computed, for its threads are neighbours in a warp. It is then one of the
axes that a pack covers and neither a row nor a column of the program.
"""

from __future__ import annotations

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Function,
    Load,
    Pointer,
    Return,
    Stmt,
    Tuple,
    Unpack,
    Var,
    when,
)
from autotune.compiler.kernel.reducers import OnlineSoftmax, Plain
from autotune.compiler.kernel.rewrite import closed
from autotune.compiler.program.program import Online, Pass, Program
from autotune.compiler.program.vectors import ACROSS, unit_axis, vector_along
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.device import shuffle
from autotune.compiler.targets.cuda.memory.address import Tensors, fixed_index, moving_index, taken_apart, within
from autotune.compiler.targets.cuda.printing.operators import computed
from autotune.compiler.targets.cuda.source import OuterSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Value
from autotune.ir.ops import POINTWISE

PLACE = Var("place")
"""The place along the reduced axes, all of them together, that a pass function computes."""
LIVE = Var("live", "bool")
"""Whether a pass function may store."""
TILE_LANE = Var("tile_lane", "int32")
"""Number of the thread among those of its tile."""


class Lanes(Tensors):
    """Computes the values of one program for one schedule.

    Args:
        copied: whether kept values lie where pass functions do not see it. They are then handed to a pass function as
            tuples of arithmetic values, and so are the loads ``ahead``, even in the pass that they belong to; and what
            online pairs are made of is among its results.
    """

    def __init__(self, program: Program, schedule: OuterSchedule, copied: bool = False) -> None:
        self.axis = unit_axis(program.graph)
        if self.axis < 0 or self.axis in program.cols:
            raise Unsupported("the axis whose elements are neighbours in memory is reduced over")
        self.tile = self.axis not in program.rows
        self.kept = (*program.rows, self.axis) if self.tile else program.rows
        vec = vector_along(program.graph, self.axis, schedule.vector_bytes)
        if not vec:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide the kept axis")
        super().__init__(program, schedule, self.axis, vec, self.kept)
        self.across = self.graph.extents[self.axis] // self.vec if self.tile else 1  # threads that lie on one tile
        if self.tile and (self.across > 32 or self.across & (self.across - 1)):
            raise Unsupported(f"{self.across} threads across a tile")
        self.count = Counts.of(self.graph.size(self.kept) // self.vec, program.n_cols)
        self.copied = copied
        self.ahead = self.copyable() if copied else ()

    def copyable(self) -> tuple[int, ...]:
        """The loads that asynchronous copies can make: kept by the first walk, in vectors of 4 bytes or more."""
        first = next(pas for pas in self.program.passes if pas.walks)
        out = []
        for i in first.kept_out:
            v = self.graph.values[i]
            if v.op != "load" or v.guards or self.lanes(i) != self.vec:
                continue
            if (self.access[i].vector or self.vec == 1) and self.vec * STORAGE_BYTES[self.storage(i)] >= 4:
                out.append(i)
        return tuple(out)

    # ---- names ------------------------------------------------------------------------------------------------------

    def lanes(self, i: int) -> int:
        return self.vec if self.varies(i) else 1

    def varies(self, i: int) -> bool:
        return self.axis in self.graph.values[i].axes

    def handed(self, i: int) -> Var:
        """A kept value as a pass function gets it where it does not see where that lies."""
        return Var(f"given{i}")

    def results(self, number: int) -> Var:
        """The tuple that pass ``number`` returned, as a later pass gets it."""
        return Var(f"z{number}")

    # ---- accumulators -----------------------------------------------------------------------------------------------

    def plain(self, pas: Pass, one: bool = False) -> list[Plain]:
        """The plain reductions of a pass, one for each lane; ``one``: for the first lane."""
        found = [(r, self.graph.values[r], lane) for r in pas.reduce for lane in range(1 if one else self.lanes(r))]
        return [Plain(v.op, v.dtype, self._carried(r, lane), self.variable(r, lane)) for r, v, lane in found]

    def online(self, pas: Pass, one: bool = False) -> list[OnlineSoftmax]:
        """The online pairs of a pass, one for each lane; ``one``: for the first lane."""
        return [x for pair in pas.online for x in self._pairs(pair, one)]

    def _pairs(self, pair: Online, one: bool = False) -> list[OnlineSoftmax]:
        lanes = range(1 if one else self.lanes(pair.peak))
        return [OnlineSoftmax(self._carried(pair.peak, lane), self._carried(pair.total, lane)) for lane in lanes]

    def _carried(self, i: int, lane: int) -> Var:
        name = f"a{i}_{lane}" if self.varies(i) else f"a{i}"
        return Var(name, lower.accumulator(self.graph.values[i].dtype))

    def fields(self, pas: Pass, one: bool = False) -> dict[Var, Const]:
        """What a thread carries of a pass and what it begins with, in the order in which the pass function returns
        it; ``one``: of the first lane."""
        pairs = [self._pairs(pair, one) for pair in pas.online]
        online = [(x.fields[n], x.identity[n]) for of_pair in pairs for n in (0, 1) for x in of_pair]
        return {p.carried: p.identity[0] for p in self.plain(pas, one)} | dict(online)

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def pass_words(self, pas: Pass) -> int:
        """Words that a pack of a pass leaves for later ones."""
        return sum(self.kept_words(i) for i in pas.kept_out)

    # ---- one value --------------------------------------------------------------------------------------------------

    def position(self, axis: int, lane: int) -> Expr:
        """The index along an axis."""
        if axis in self.program.cols:
            return moving_index(axis)
        return fixed_index(axis) + lane if axis == self.axis and lane else fixed_index(axis)

    def guard(self, v: Value, lane: int) -> Expr | None:
        return within(v.guards, self.graph.extents, 0, lambda axis: self.position(axis, lane))

    def compute(self, i: int) -> list[Stmt]:
        """Computes value ``i`` in all its lanes."""
        v = self.graph.values[i]
        if i in self.ahead:
            return self.spread(i, self.handed(i))
        if v.op == "load":
            return self._load(i, v)
        if v.op == "gather":
            return self.gather_each(i)
        if v.op.startswith(ACROSS):
            return self._reduce_across(i, v)
        return self.assigned(i, [self._pointwise(v, lane) for lane in range(self.lanes(i))])

    def _pointwise(self, v: Value, lane: int) -> Expr:
        if v.op == "index":
            whole = Cast("int64", self.position(v.axes[0], lane)) * int(v.scale) + int(v.shift)
            return Cast(v.dtype, whole)
        if v.op not in POINTWISE:
            raise Unsupported(f"operator {v.op} inside a walk")
        return computed(v, [self.name(a, lane) for a in v.args])

    def _terms(self, v: Value) -> list[Expr]:
        """The argument of a reduction in each of its lanes, in the type that the reduction is carried in."""
        (arg,) = v.args
        return [lower.term(self.name(arg, lane), v.dtype) for lane in range(self.lanes(arg))]

    def _reduce_across(self, i: int, v: Value) -> list[Stmt]:
        """Reduce over the lanes of a pack and the threads of its tile; all of them get the result."""
        op = v.op.removeprefix(ACROSS)
        of = lower.accumulator(v.dtype)
        own, other = Plain(op, v.dtype, Var(f"across{i}", of), self.variable(i, 0)), Var(f"other{i}", of)
        out: list[Stmt] = [Assign(own.carried, lower.tree(op, v.dtype, self._terms(v)))]
        distance = self.across // 2
        while distance:
            out += [Assign(other, shuffle(own.carried, distance)), *own.merge([other])]
            distance //= 2
        return [*out, own.finish()]

    def _load(self, i: int, v: Value) -> list[Stmt]:
        access, whole = self.access[i], Var(f"w{i}")
        zero = Const(0, v.dtype)

        def load(lane: int, lanes: int, form: str) -> Load:
            at = access.at(self.base(i), lane)
            return Load(self.storage(i), lanes, self.load_hint(i), Pointer(v.slot), at, form)

        by_pack = not any(a == self.axis and (low % self.vec or high % self.vec) for a, low, high in v.guards)
        out: list[Stmt] = []
        if access.vector and by_pack:
            guard = self.guard(v, 0)
            if self.packed(i):
                unpacked = Unpack(self.storage(i), self.vec, self.raw(i))
                out = [Assign(self.raw(i), load(0, self.vec, "words")), Assign(whole, unpacked)]
            elif guard:
                out.append(Assign(whole, Tuple((zero,) * self.vec)))
                out.append(when(guard, [Assign(whole, load(0, self.vec, "fixed"))]))
            else:
                out.append(Assign(whole, load(0, self.vec, "plain")))
            return out + self.spread(i, whole)
        for lane, var in enumerate(self.variables(i)):
            guard = self.guard(v, lane)
            if guard:
                out += [Assign(var, zero), when(guard, [Assign(var, load(lane, 1, "fixed"))])]
            else:
                out.append(Assign(var, load(lane, 1, "plain")))
        return out

    def store(self, k: int, hint: str) -> list[Stmt]:
        """Stores output ``k`` at this place, all lanes."""
        varies = self.axis in self.graph.outputs[k].axes
        out = self.store_pack(k, hint, self.vec if varies else 1)
        return [when(TILE_LANE.equals(0), out)] if self.tile and not varies else out  # one number a tile

    # ---- one pack ---------------------------------------------------------------------------------------------------

    def pass_function(self, pas: Pass, source: dict[int, int], guarded: bool) -> Function:
        """The function of a pass.

        Args:
            source: the pass that kept each kept value.
            guarded: whether stores wait for :data:`LIVE`.
        """
        body = self.place_indices()
        for i in pas.kept_in:
            body += self._take(i, source[i])
        for i in pas.compute:
            body += self.compute(i)
        of_reductions = [x for r in pas.reduce for x in self._terms(self.graph.values[r])]
        body += [s for p, x in zip(self.plain(pas), of_reductions, strict=True) for s in p.merge([x])]
        scores = [self.name(pair.score, e) for pair in pas.online for e in range(self.lanes(pair.peak))]
        if not self.copied:
            body += [s for x, score in zip(self.online(pas), scores, strict=True) for s in x.take_one(score)]
        stores = [s for k in pas.stores for s in self.store(k, self.schedule.store_hint)]
        body += [when(LIVE, stores)] if stores and guarded else stores
        returns: list[Expr] = [*self.returned(pas)]
        for i in (i for i in pas.kept_out if i not in self.ahead):
            returns += self.left(i)
        returns += scores if self.copied else []
        return closed([*body, Return(tuple(returns))] if returns else body)

    def returned(self, pas: Pass) -> list[Var]:
        """What a thread carries that the function of a pass returns, first of its results."""
        return [p.carried for p in self.plain(pas)] if self.copied else [*self.fields(pas)]

    def place_indices(self) -> list[Stmt]:
        """Takes the number of a place apart into the index along each reduced axis."""
        return taken_apart(PLACE, self.program.cols, self.graph.extents, self.count, moving_index)

    def _take(self, i: int, source: int) -> list[Stmt]:
        """Value ``i`` as pass ``source`` kept it."""
        if self.copied:
            return self.spread(i, self.handed(i))
        pas = self.program.passes[source]
        before = pas.kept_out[: pas.kept_out.index(i)]
        first = len(self.fields(pas)) + sum(self.kept_words(k) for k in before)
        return self.taken_up(i, self.results(source), first)

    # ---- after a walk -----------------------------------------------------------------------------------------------

    def reduced(self, pas: Pass) -> list[Stmt]:
        """Gives the reductions of a pass their names as values."""
        out: list[Stmt] = [p.finish() for p in self.plain(pas)]
        for pair in pas.online:
            out += self.assigned(pair.peak, [x.peak for x in self._pairs(pair)])
        return out

    def totals(self, pair: Online) -> list[Stmt]:
        """Brings an online sum to the shift its users expect."""
        out: list[Stmt] = []
        for lane, x in enumerate(self._pairs(pair)):
            peak, shift = self.name(pair.peak, lane), self.name(pair.shift, lane)
            out += x.rescaled(self.variable(pair.total, lane), peak, shift)
        return out
