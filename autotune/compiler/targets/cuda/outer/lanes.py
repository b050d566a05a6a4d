"""Values of a program with adjacent threads along a kept axis.

As in :mod:`autotune.compiler.targets.cuda.rows.emitter`, a pass over one pack is a device function. But here a pack is
``vec`` adjacent elements on the *kept* unit-stride axis at one index of the reduced axes. A value that varies over the
kept axis, including a reduction, has a lane for each of them; any other value is one number. The roles of rows and
columns are exchanged.

In a *tile* (:func:`autotune.compiler.program.vectors.across_lanes`) that axis is reduced over as well, within a pack
and by shuffles, since its threads are adjacent in a warp. It is then one of the axes that a pack covers, and neither a
row nor a column of the program.
"""

from __future__ import annotations

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.lower import OnlineSoftmax, Plain
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
    closed,
    when,
)
from autotune.compiler.program.program import Online, Pass, Program
from autotune.compiler.program.vectors import ACROSS, unit_axis, vector_along
from autotune.compiler.targets.cuda.device import Counts, shuffle
from autotune.compiler.targets.cuda.outer.reduction import StripPass
from autotune.compiler.targets.cuda.printer import computed
from autotune.compiler.targets.cuda.source import OuterSchedule
from autotune.compiler.targets.cuda.tensors import Tensors, fixed_index, moving_index, unravel_index, within
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Value
from autotune.ir.nodes import POINTWISE


class Lanes(Tensors):
    """Computes the values of one program for one schedule.

    Args:
        copied: kept values are in memory that pass functions do not see. A pass function then gets them as tuples of
            arithmetic values, and the ``prefetched`` loads, even in the pass that they belong to. Scores of online
            pairs are among its results.
    """

    place = Var("place")
    """The place along the reduced axes, all of them together, that a pass function computes."""
    live = Var("live", "bool")
    """True if a pass function may store."""
    tile_lane = Var("tile_lane", "int32")
    """Number of the thread among those of its tile."""

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
        self.across = self.graph.extents[self.axis] // self.vec if self.tile else 1  # threads of one tile
        if self.tile and (self.across > 32 or self.across & (self.across - 1)):
            raise Unsupported(f"{self.across} threads across a tile")
        self.count = Counts.of(self.graph.size(self.kept) // self.vec, program.n_cols)
        self.copied = copied
        self.prefetched = self.copyable() if copied else ()
        self.reducing = [pas for pas in program.passes if pas.reduce or pas.online]
        self.carried: dict[Pass, StripPass] = {}
        for pas in program.passes:
            number = self.reducing.index(pas) if pas in self.reducing else -1
            self.carried[pas] = self._carried_by(pas, number, self.vec, self._carried_by(pas, number, 1))

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
        """A kept value that is handed to a pass function."""
        return Var(f"given{i}")

    def results(self, number: int) -> Var:
        """The tuple that pass ``number`` returned, as a later pass gets it."""
        return Var(f"z{number}")

    # ---- accumulators -----------------------------------------------------------------------------------------------

    def _carried_by(self, pas: Pass, number: int, most: int, heads: StripPass | None = None) -> StripPass:
        """The reductions of a pass in ``most`` lanes; fields in the order in which its function returns them."""
        plain = [
            Plain(self.graph.values[r].op, self.graph.values[r].dtype, self._variable(r, lane), self.variable(r, lane))
            for r in pas.reduce
            for lane in range(min(most, self.lanes(r)))
        ]
        pairs = [self._pairs(pair)[:most] for pair in pas.online]
        fields = {p.carried: p.identity[0] for p in plain}
        fields |= {x.fields[n]: x.identity[n] for of_pair in pairs for n in (0, 1) for x in of_pair}
        return StripPass(number, plain, [x for of_pair in pairs for x in of_pair], fields, heads)

    def _pairs(self, pair: Online) -> list[OnlineSoftmax]:
        lanes = range(self.lanes(pair.peak))
        return [OnlineSoftmax(self._variable(pair.peak, lane), self._variable(pair.total, lane)) for lane in lanes]

    def _variable(self, i: int, lane: int) -> Var:
        name = f"a{i}_{lane}" if self.varies(i) else f"a{i}"
        return Var(name, lower.accumulator(self.graph.values[i].dtype))

    # ---- one value --------------------------------------------------------------------------------------------------

    def position(self, axis: int, lane: int) -> Expr:
        if axis in self.program.cols:
            return moving_index(axis)
        return fixed_index(axis) + lane if axis == self.axis and lane else fixed_index(axis)

    def guard(self, v: Value, lane: int) -> Expr | None:
        return within(v.guards, self.graph.extents, 0, lambda axis: self.position(axis, lane))

    def compute(self, i: int) -> list[Stmt]:
        v = self.graph.values[i]
        if i in self.prefetched:
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

        def loaded(var: Var, lane: int, lanes: int, nothing: Expr) -> list[Stmt]:
            if guard := self.guard(v, lane):
                return [Assign(var, nothing), when(guard, [Assign(var, load(lane, lanes, "fixed"))])]
            return [Assign(var, load(lane, lanes, "plain"))]

        if not access.vector or not by_pack:
            return [s for lane, var in enumerate(self.variables(i)) for s in loaded(var, lane, 1, zero)]
        if self.packed(i):
            unpacked = Unpack(self.storage(i), self.vec, self.raw(i))
            words: list[Stmt] = [Assign(self.raw(i), load(0, self.vec, "words")), Assign(whole, unpacked)]
            return words + self.spread(i, whole)
        return loaded(whole, 0, self.vec, Tuple((zero,) * self.vec)) + self.spread(i, whole)

    def store(self, k: int, hint: str) -> list[Stmt]:
        """Stores output ``k`` at this place, all lanes."""
        varies = self.axis in self.graph.outputs[k].axes
        out = self.store_pack(k, hint, self.vec if varies else 1)
        return [when(self.tile_lane.equals(0), out)] if self.tile and not varies else out  # one number a tile

    # ---- one pack ---------------------------------------------------------------------------------------------------

    def pass_function(self, pas: Pass, guarded: bool) -> Function:
        """The function of a pass; ``guarded`` if stores depend on :data:`self.live`."""
        body = self.place_indices()
        for i in pas.kept_in:
            if self.copied:
                body += self.spread(i, self.handed(i))
                continue
            source = self.program.kept_from[i]
            kept = self.program.passes[source]
            before = sum(map(self.kept_words, kept.kept_out[: kept.kept_out.index(i)]))
            body += self.taken_up(i, self.results(source), len(self.carried[kept].fields) + before)
        for i in pas.compute:
            body += self.compute(i)
        of_reductions = [x for r in pas.reduce for x in self._terms(self.graph.values[r])]
        body += [s for p, x in zip(self.carried[pas].plain, of_reductions, strict=True) for s in p.merge([x])]
        scores = [self.name(pair.score, e) for pair in pas.online for e in range(self.lanes(pair.peak))]
        if not self.copied:
            body += [s for x, score in zip(self.carried[pas].online, scores, strict=True) for s in x.take_one(score)]
        stores = [s for k in pas.stores for s in self.store(k, self.schedule.store_hint)]
        body += [when(self.live, stores)] if stores and guarded else stores
        returns: list[Expr] = [*self.returned(pas)]
        for i in (i for i in pas.kept_out if i not in self.prefetched):
            returns += self.left(i)
        returns += scores if self.copied else []
        return closed([*body, Return(tuple(returns))] if returns else body)

    def returned(self, pas: Pass) -> list[Var]:
        """The first results of the function of a pass."""
        return [p.carried for p in self.carried[pas].plain] if self.copied else [*self.carried[pas].fields]

    def place_indices(self) -> list[Stmt]:
        """Takes the number of a place apart into the index along each reduced axis."""
        return unravel_index(self.place, self.program.cols, self.graph.extents, self.count, moving_index)

    # ---- after a walk -----------------------------------------------------------------------------------------------

    def reduced(self, pas: Pass) -> list[Stmt]:
        """Gives the reductions of a pass their names as values."""
        out: list[Stmt] = [p.finish() for p in self.carried[pas].plain]
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
